"""What a training leaves to look at in its work dir: its curves, and validation images."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from PIL import Image

from ...config.parts import dataset_meta, kind_of
from ...config.plan import Change, append
from ...data.images import shown_image
from ...data.page import at_size
from ...predict.drawing import draw_boxes, draw_segmentation
from ...predict.openmmlab.prediction import as_map, to_prediction
from ...predict.predictions import Detections, LabelMap, Prediction
from ...tooling.command import one_line
from ...tooling.files import write_text
from ...tooling.pages import html_page, html_section, reduced, wide_picture
from .curves import runs_of, write_curves

PAGE = 'validation.html'
CURVES = 'curves.png'
GAP = 8  # pixels between two pictures


def plan_pictures(cfg: Config) -> list[Change]:
    """A hook that draws the results of a training, unless the config has it."""
    if any(kind_of(hook) == 'DrawResultsHook' for hook in cfg.get('custom_hooks') or ()):
        return []
    reason = 'draws validation images and curves; --no-pictures leaves it out'
    return [append('custom_hooks', {'type': 'DrawResultsHook'}, reason)]


@HOOKS.register_module()
class DrawResultsHook(Hook):
    """Draws some validation images after each evaluation, and the curves at the end of a training.

    Only the first process draws, and images that it evaluates anyway. An error is a warning; the
    training goes on without further pictures.

    Args:
        images: how many images; they are from evenly spaced batches.
        score_thr: detections with a lower score are not drawn.

    Examples:
        >>> custom_hooks = [dict(type='DrawResultsHook', images=20, score_thr=0.5)]
    """

    # At the end, PreemptionHook, which is LOWEST, still holds signals back.
    priority = 'VERY_LOW'

    def __init__(self, images: int = 8, score_thr: float = 0.3) -> None:
        self.images = images
        self.score_thr = score_thr
        self.pictures: list[tuple[str, Image.Image]] = []  # with the names of the images

    def before_val_epoch(self, runner: Runner) -> None:
        self.pictures.clear()

    def after_val_iter(
        self, runner: Runner, batch_idx: int, outputs: Sequence[BaseDataElement], **_: Any
    ) -> None:
        if self.images == 0 or not is_main_process():
            return
        batches = len(runner.val_dataloader)
        of_a_batch = math.ceil(self.images / batches)
        interval = math.ceil(batches * of_a_batch / self.images)
        if batch_idx % interval == 0:
            self.attempt('validation images', lambda: self.draw(runner, outputs[:of_a_batch]))

    def draw(self, runner: Runner, samples: Sequence[BaseDataElement]) -> None:
        meta = dataset_meta(runner.cfg, {}, 'val')
        for sample in samples:
            picture = truth_and_prediction(sample, meta, self.score_thr)
            self.pictures.append((Path(sample.img_path).name, picture))

    def after_val_epoch(self, runner: Runner, **_: Any) -> None:
        if self.pictures:
            self.attempt(PAGE, lambda: self.write_page(runner))

    def write_page(self, runner: Runner) -> None:
        path = Path(runner.work_dir, PAGE).resolve()
        title = f'{path.parent.name}: validation after iteration {runner.iter}'
        about = f'Left: the truth. Right: the prediction; scores from {self.score_thr} on.'
        sections = [html_section(name, '', wide_picture(p)) for name, p in self.pictures]
        write_text(path, html_page(title, about, sections))

    def after_train(self, runner: Runner) -> None:
        work_dir = Path(runner.work_dir)
        if is_main_process() and runs_of(work_dir):
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


def truth_and_prediction(sample: BaseDataElement, meta: dict, score_thr: float) -> Image.Image:
    """A validated data sample of mm as two pictures side by side; without the first one if the
    sample has no annotations."""
    image, factor = reduced(shown_image(Path(sample.img_path)))
    found = to_prediction(sample, image[..., ::-1], meta, score_thr)
    prediction = reduced_prediction(found, factor).draw()
    if isinstance(found, Detections):
        truth = true_objects(sample, image, factor, meta)
    else:
        truth = true_label_map(sample, image, meta)
    if truth is None:
        return prediction
    height = max(truth.height, prediction.height)  # they have legends of their own
    both = Image.new('RGB', (truth.width + GAP + prediction.width, height), 'white')
    both.paste(truth, (0, 0))
    both.paste(prediction, (truth.width + GAP, 0))
    return both


def reduced_prediction(found: Prediction, factor: float) -> Prediction:
    """A prediction whose image was reduced by a factor, in pixels of that image."""
    size = found.image.shape[:2]
    if isinstance(found, LabelMap):
        return replace(found, labels=at_size(found.labels, size))
    if isinstance(found, Detections):
        masks = reduced_masks(found.masks, size)
        return replace(found, boxes=found.boxes * factor, masks=masks)
    return replace(found, numbers=at_size(found.numbers, size))


def reduced_masks(masks: Optional[np.ndarray], size: tuple[int, int]) -> Optional[np.ndarray]:
    """Masks (N, H, W) at another (height, width), as booleans; None if there are none."""
    if masks is None or not len(masks):
        return None
    return np.stack([at_size(mask, size) for mask in masks]).astype(bool)


def true_objects(
    sample: BaseDataElement, image: np.ndarray, factor: float, meta: dict
) -> Optional[Image.Image]:
    """The annotated objects of a data sample of mmdet, on its reduced image.

    As for mmdet's metrics, their coordinates are those of the original image.
    """
    if 'gt_instances' not in sample:
        return None
    objects = sample.gt_instances
    masks = objects.masks.to_ndarray() if 'masks' in objects else None
    return draw_boxes(
        image,
        objects.bboxes.cpu().numpy() * factor,
        objects.labels.cpu().numpy(),
        None,
        meta['classes'],
        meta['palette'],
        reduced_masks(masks, image.shape[:2]),
    )


def true_label_map(sample: BaseDataElement, image: np.ndarray, meta: dict) -> Optional[Image.Image]:
    """The annotated label map of a data sample, on its reduced image."""
    if 'gt_sem_seg' not in sample:
        return None
    annotated = sample.gt_sem_seg
    labels = annotated.sem_seg if 'sem_seg' in annotated else annotated.data  # mmdet, mmseg
    labels = at_size(as_map(labels), image.shape[:2])
    return draw_segmentation(image, labels, meta['classes'], meta['palette'])
