"""What a training leaves to look at in its work dir: its curves, and validation images."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from PIL import Image
from torch import Tensor

from ..images.label_maps import nearest_at
from ..images.reading import picture
from ..predict.openmmlab.samples import to_prediction
from ..predictions.drawing import class_palette, draw_boxes, draw_segmentation
from ..predictions.kinds import SCORE_THR, Detections, Prediction
from ..tooling.command import one_line
from ..tooling.files import keep_former, write_text
from .curves import number_run, runs_of, write_curves

PAGE = 'validation.html'
CURVES = 'curves.png'
GAP = 8  # pixels between two pictures


@HOOKS.register_module()
class ResultPicturesHook(Hook):
    """Draws some validation images and the curves of the training after each evaluation, and the
    curves at its end.

    Only the first process draws, and images that it evaluates anyway. An error is a warning; the
    training goes on without further pictures.

    Args:
        images: how many images; they are from evenly spaced batches. With 0, nothing is drawn.
        score_thr: detections with a lower score are not drawn.

    Examples:
        >>> default_hooks = dict(pictures=dict(type='ResultPicturesHook', images=20, score_thr=0.5))
    """

    priority = 'VERY_LOW'  # after the log is written, and before StopOnSignalHook

    def __init__(self, images: int = 8, score_thr: float = SCORE_THR) -> None:
        self.images = images
        self.score_thr = score_thr
        self.pictures: list[tuple[str, Image.Image]] = []  # with the names of the images
        self.in_training = False

    def before_train(self, runner: Runner) -> None:
        self.in_training = True
        if not is_main_process():
            return
        number_run(Path(runner.log_dir))
        if runner.iter == 0 and self.images:  # else they are of this training
            for name in (PAGE, CURVES):
                if kept := keep_former(Path(runner.work_dir, name)):
                    runner.logger.info(f'{name} of a run before is {kept} now')

    def before_val_epoch(self, runner: Runner) -> None:
        self.pictures.clear()

    def after_val_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: dict,
        outputs: Sequence[BaseDataElement],
    ) -> None:
        if self.images == 0 or not is_main_process():
            return
        batches = len(runner.val_dataloader)
        of_a_batch = math.ceil(self.images / batches)
        interval = math.ceil(batches * of_a_batch / self.images)
        if batch_idx % interval == 0:
            inputs = data_batch['inputs'][:of_a_batch]
            samples = outputs[:of_a_batch]
            self.attempt('validation images', lambda: self.draw(runner, inputs, samples))

    def draw(
        self, runner: Runner, inputs: Sequence[Tensor], samples: Sequence[BaseDataElement]
    ) -> None:
        meta = getattr(runner.val_dataloader.dataset, 'metainfo', {})
        classes = meta.get('classes') or ()
        palette = class_palette(classes, meta.get('palette'))
        for image, sample in zip(inputs, samples):
            picture = truth_and_prediction(image, sample, classes, palette, self.score_thr)
            self.pictures.append((Path(sample.img_path).name, picture))

    def after_val_epoch(self, runner: Runner, **_: Any) -> None:
        if self.pictures:
            self.attempt(PAGE, lambda: self.write_page(runner))
        if self.in_training:
            self.write_curves(runner)

    def write_page(self, runner: Runner) -> None:
        from ..tooling.pages import html_page, html_section, wide_picture

        path = Path(runner.work_dir, PAGE).resolve()
        title = f'{path.parent.name}: validation after iteration {runner.iter}'
        about = f'Left: the truth. Right: the prediction; scores from {self.score_thr} on.'
        sections = [html_section(name, '', wide_picture(p)) for name, p in self.pictures]
        write_text(path, html_page(title, about, sections))

    def after_train(self, runner: Runner) -> None:
        self.write_curves(runner)

    def write_curves(self, runner: Runner) -> None:
        work_dir = Path(runner.work_dir)
        if self.images and is_main_process() and runs_of(work_dir):
            self.attempt(CURVES, lambda: write_curves(work_dir, work_dir / CURVES))

    def attempt(self, what: str, function: Callable[[], None]) -> None:
        """Call a function, whose errors must not end the training."""
        try:
            function()
        except Exception as error:
            reason = f'{type(error).__name__}: {one_line(error)}'
            warnings.warn(f'cannot draw {what} ({reason})', stacklevel=1)
            self.images = 0


# Pictures


def truth_and_prediction(
    inputs: Tensor,
    sample: BaseDataElement,
    classes: Sequence[str],
    palette: Sequence,
    score_thr: float,
) -> Image.Image:
    """The annotations and the prediction of a validated image, side by side; the prediction alone
    if the sample has no annotations.

    Args:
        inputs: (C, H, W), the image as the pipeline has loaded and resized it.
        sample: of mm, with what the model has found.
        classes: their names.
        palette: a colour for each class.
        score_thr: detections with a lower score are not drawn.
    """
    image = shown_inputs(inputs)
    sides = []
    truth = drawn_truth(image, sample, classes, palette)
    if truth is not None:
        sides.append(truth)
    meta = {'classes': classes, 'palette': palette}
    found = to_prediction(sample, image, meta, score_thr)
    sides.append(at_size_of(image, found, sample.ori_shape).draw())
    height = max(side.height for side in sides)  # they have legends of their own
    width = sum(side.width for side in sides) + GAP * (len(sides) - 1)
    both = Image.new('RGB', (width, height), 'white')
    left = 0
    for side in sides:
        both.paste(side, (left, 0))
        left += side.width + GAP
    return both


def shown_inputs(inputs: Tensor) -> np.ndarray:
    """The input of a model as an image (H, W, 3) RGB uint8, at most as large as a thumbnail."""
    from ..tooling.pages import reduced

    values = inputs.permute(1, 2, 0).cpu().numpy()
    if values.shape[-1] == 3 and values.dtype == np.uint8:
        values = values[..., ::-1]  # mm loads BGR
    else:
        values = picture(values.astype(np.float32))
    image, _ = reduced(np.ascontiguousarray(values))
    return image


def drawn_truth(
    image: np.ndarray, sample: BaseDataElement, classes: Sequence[str], palette: Sequence
) -> Optional[Image.Image]:
    """The annotations of a sample, drawn on its image; None if it has none. As for mm's metrics,
    coordinates are those of the original image."""
    found = sample.get('gt_sem_seg')
    if found is not None and 'data' in found:
        labels = as_array(found.data)
        labels = labels.reshape(labels.shape[-2:])
        return draw_segmentation(image, nearest_at(labels, image.shape[:2]), classes, palette)
    found = sample.get('gt_instances')
    if found is None:
        return None
    masks = found.get('masks')
    if masks is not None:
        masks = masks_at_size(as_array(masks), image.shape[:2])
    boxes = as_array(found.bboxes) * (image.shape[1] / sample.ori_shape[1])
    return draw_boxes(image, boxes, as_array(found.labels), None, classes, palette, masks)


def at_size_of(image: np.ndarray, found: Prediction, size: tuple[int, int]) -> Prediction:
    """The prediction for an image of a size (height, width), for the image that was reduced."""
    if isinstance(found, Detections):
        masks = found.masks
        if masks is not None:
            masks = masks_at_size(masks, image.shape[:2])
        return replace(found, boxes=found.boxes * (image.shape[1] / size[1]), masks=masks)
    return replace(found, labels=nearest_at(found.labels, image.shape[:2]))


def as_array(values: Any) -> np.ndarray:
    """A tensor, or boxes or masks of mmdet, as an array."""
    if hasattr(values, 'to_ndarray'):
        return values.to_ndarray()
    return getattr(values, 'tensor', values).cpu().numpy()


def masks_at_size(masks: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Masks (N, H, W) at another (height, width), as booleans."""
    resized = np.zeros((len(masks), *size), bool)
    for place, mask in zip(resized, masks):
        place[:] = nearest_at(mask, size)
    return resized
