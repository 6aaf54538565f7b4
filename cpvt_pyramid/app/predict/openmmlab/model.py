"""Models of OpenMMLab, from a config and a checkpoint to the predictions for images."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional, Union

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from torch import Tensor, nn

from ....acceleration.accelerate import accelerate, what_is_missing
from ....acceleration.processor import line_about_bfloat16
from ....mm.amp import replace_forward
from ...config.check import check_settings
from ...config.load import config_in_checkpoint, load_config, merge_options
from ...config.parts import dataset_meta, kind_of
from ...config.pipelines import (
    keeps_size,
    loaded_bands,
    loads_annotations,
    loads_image,
    pipeline_of,
)
from ...images.rasters import ReadError
from ...images.reading import picture, read_image
from ...predictions.drawing import Color
from ...predictions.kinds import SCORE_THR, Kind, Prediction
from ...tooling import memory
from ...tooling.command import UserError
from ...tooling.report import amount
from ..options import DEFAULTS, ModelOptions
from ..protocol import Prepared, TooLarge
from ..tiles import TILE, Boxes, Suppression
from .grouping import size_in_batch
from .label_maps import predict_labels
from .loading import build_model, fetch_checkpoint, load_whole_model
from .samples import data_sample, to_prediction

ADVICE = 'reduce the image'  # which does not fit into memory


class OpenMMLabModel:
    """A detector or a segmentor with the test pipeline of its config; see `protocol.Model`. What is
    wrong with the config becomes a UserError.

    Args:
        model: on its device, in evaluation mode.
        cfg: its config.
        meta: `classes` and `palette`.
        score_thr: boxes of a lower score are left out.
    """

    threads = 1

    def __init__(
        self, model: nn.Module, cfg: Config, meta: dict, score_thr: float = SCORE_THR
    ) -> None:
        self.model: Any = model
        self.cfg = cfg
        self.classes: Sequence[str] = meta['classes']
        self.palette: Sequence[Color] = meta['palette']
        self.score_thr = score_thr
        check_kind(model)
        self.kind = kind_of_results(cfg)
        self.bands = loaded_bands(pipeline_of(cfg, 'test'))
        self.least_score = least_score_of(model)
        self.suppression = suppression_of(model, score_thr)
        self.most_boxes = most_boxes_of(model)
        self.takes_tiles = not predicts_masks(model)
        self.own_tile = own_tile_of(model, cfg) if self.takes_tiles else None
        self.pipeline = image_pipeline(cfg)
        if self.kind == 'detections':
            leave_out_low_scores(model, score_thr)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def read(self, path: Path) -> np.ndarray:
        return read_image(path, self.bands)

    def prepare(self, image: np.ndarray) -> Prepared:
        height, width, channels = image.shape
        if self.bands and channels != len(self.bands):  # a frame of a video
            raise ReadError(f'the model takes {amount(len(self.bands), "band")}, got {channels}')
        try:
            with errors_of_model(f'{width} x {height} pixels', ADVICE):
                data = self.pipeline({'img': self.as_loaded(image), 'img_id': 0})
        except cv2.error as error:
            if error.code != cv2.Error.STS_ASSERT:
                raise
            raise ReadError(  # it would be resized to no pixels
                f'{width} x {height} pixels are too thin to be resized as the test pipeline says'
            ) from error
        if not {'inputs', 'data_samples'} <= {*data}:
            raise UserError(
                'the test pipeline must end with PackDetInputs or PackSegInputs, which make inputs '
                f'and data_samples, got {", ".join(data)}'
            )
        return Prepared(picture(image), data, size_in_batch(self.model, data['inputs']))

    def as_loaded(self, image: np.ndarray) -> np.ndarray:
        """An image as the pipelines load it, in BGR; bands are in their own order."""
        return image if self.bands else np.ascontiguousarray(image[..., ::-1])

    def predict(self, batch: Sequence[Prepared]) -> list[Prediction]:
        """The predictions for images with one padded size."""
        meta = {'classes': self.classes, 'palette': self.palette}
        sizes = [image.image.shape[:2] for image in batch]
        height, width = max(sizes, key=math.prod)
        what = f'{width} x {height} pixels'
        if len(batch) > 1:
            what = f'{len(batch)} images of up to {what}'
        with errors_of_model(what, ADVICE), torch.no_grad():
            data = pseudo_collate([image.data for image in batch])
            if self.kind == 'labels':
                samples = predict_labels(self.model, data)
            else:
                samples = self.model.test_step(data)
            if len(samples) != len(batch):
                raise UserError(
                    f'the model returned {len(samples)} results for a batch of {len(batch)}'
                )
            return [
                to_prediction(sample, image.image, meta, self.score_thr, self.most_boxes)
                for sample, image in zip(samples, batch)
            ]

    def predict_tiles(self, tiles: Sequence[np.ndarray]) -> list[Union[np.ndarray, Boxes]]:
        """Of the test pipeline, only the model's data preprocessor is applied."""
        inputs = [torch.from_numpy(self.as_loaded(tile)) for tile in tiles]
        height, width = tiles[0].shape[:2]
        what = f'tiles of {width} x {height} pixels'
        with errors_of_model(what, 'use smaller tiles'), torch.no_grad():
            # A GPU gets all tiles before the first result is waited for.
            if self.kind == 'detections':
                found = [self.boxes_in(tile) for tile in inputs]
                return [Boxes(*(part.cpu().numpy() for part in parts)) for parts in found]
            scores = [self.scores_of(tile) for tile in inputs]
            return [each.cpu().numpy() for each in scores]

    def boxes_in(self, tile: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The boxes, scores and labels in a tile (h, w, N)."""
        height, width = tile.shape[:2]
        sample = data_sample(False, (height, width))
        inputs = tile.permute(2, 0, 1).contiguous()
        found = self.model.test_step({'inputs': [inputs], 'data_samples': [sample]})
        instances = found[0].pred_instances
        return instances.bboxes, instances.scores, instances.labels

    def scores_of(self, tile: Tensor) -> Tensor:
        """The scores (K, h, w) of a tile (h, w, N)."""
        height, width = tile.shape[:2]
        inputs = tile.permute(2, 0, 1).contiguous()
        batch = {'inputs': [inputs], 'data_samples': [data_sample(True, (height, width))]}
        data = self.model.data_preprocessor(batch, False)
        metas = [sample.metainfo for sample in data['data_samples']]
        scores = self.model.inference(data['inputs'], metas)
        return scores[0, :, :height, :width].float()

    def to_labels(self, scores: np.ndarray) -> np.ndarray:
        if self.model.out_channels > 1:
            return torch.from_numpy(scores).argmax(0).numpy()
        threshold = self.model.decode_head.threshold
        return (torch.from_numpy(scores[0]).sigmoid() > threshold).numpy()


@contextmanager
def errors_of_model(what: str, advice: str) -> Iterator[None]:
    """Inside this context, in which a model or its pipeline runs, too little memory is reported as
    `TooLarge`; `what` does not fit."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise TooLarge(f'{what} do not fit into the memory of the GPU; {advice}') from error
    except (MemoryError, RuntimeError, cv2.error) as error:  # PyTorch has no class for it
        if not memory.is_exhausted(error):
            raise
        free = memory.free_text()
        raise TooLarge(f'{what} do not fit into memory ({free}); {advice}') from error


def check_kind(model: nn.Module) -> None:
    """Check that a model does not predict panoptic segments. Mask2Former need not do so."""
    settings = getattr(model, 'test_cfg', None) or {}
    if hasattr(model, 'panoptic_fusion_head') and settings.get('panoptic_on', True):
        raise UserError(
            f'{type(model).__name__} predicts panoptic segments, for which there are no results; '
            'Mask2Former and MaskFormer predict instances with --cfg-options '
            'model.test_cfg.panoptic_on=False model.test_cfg.instance_on=True'
        )


def predicts_masks(model: nn.Module) -> bool:
    """Whether a detector predicts masks of instances."""
    return getattr(model, 'with_mask', False) or hasattr(model, 'panoptic_fusion_head')


def own_tile_of(model: Any, cfg: Config) -> Optional[int]:
    """Side of the tiles that show what a whole image shows; see `protocol.Model`. None if the test
    pipeline changes images, or if the model itself moves a window over them."""
    settings = getattr(model, 'test_cfg', None) or {}
    is_unchanged = all(map(leaves_image, pipeline_of(cfg, 'test')))
    return TILE if is_unchanged and settings.get('mode') != 'slide' else None


def leaves_image(transform: dict) -> bool:
    """Whether a transform loads an image or packs it, and leaves its pixels as they are."""
    is_part_of_loading = kind_of(transform).startswith(('Load', 'Pack'))
    return is_part_of_loading or keeps_size(transform)


def kind_of_results(cfg: Config) -> Kind:
    """What a model's results are, as in the names of their files."""
    return 'labels' if cfg.default_scope == 'mmseg' else 'detections'


def leave_out_low_scores(model: Any, score_thr: float) -> None:
    """Let a detector with two stages leave out boxes with a score below `score_thr` before it
    computes their masks, in place. No other box changes: non-maximum suppression goes from high
    scores to low."""
    settings = getattr(getattr(model, 'roi_head', None), 'test_cfg', None) or {}
    if 'score_thr' in settings:  # it keeps boxes with a higher one
        below = float(np.nextafter(np.float32(score_thr), np.float32(-1)))
        settings['score_thr'] = max(settings['score_thr'], below)


def last_settings(model: Any) -> dict:
    """The `test_cfg` of the last stage of a detector."""
    settings = getattr(model, 'test_cfg', None) or {}
    return settings.get('rcnn') or settings


def least_score_of(model: Any) -> float:
    """The score below which a detector leaves out boxes, if its `test_cfg` says so."""
    least = last_settings(model).get('score_thr')
    return least if isinstance(least, (int, float)) else 0.0


def most_boxes_of(model: Any) -> Optional[int]:
    """How many boxes a detector returns for an image at most, if its `test_cfg` says so."""
    settings = last_settings(model)
    most = settings.get('max_per_img', settings.get('max_per_image'))  # the latter of Mask2Former
    return most if isinstance(most, int) and most > 0 else None


def suppression_of(model: Any, score_thr: float) -> Suppression:
    """A detector's non-maximum suppression, from the `test_cfg` of its last stage."""
    nms = last_settings(model).get('nms')
    if not isinstance(nms, dict):
        return Suppression()
    threshold: float = nms.get('iou_threshold', Suppression().iou_threshold)
    agnostic = bool(nms.get('class_agnostic', False))
    method = nms.get('method', 'linear')
    if nms.get('type') != 'soft_nms' or method == 'naive':
        return Suppression(threshold, agnostic)
    least = max(nms.get('min_score', 0.0), score_thr)
    return Suppression(threshold, agnostic, method, nms.get('sigma', 0.5), least)


def image_pipeline(cfg: Config) -> Compose:
    """The config's test pipeline, for images in memory and without annotations.

    Raises:
        UserError: it makes several inputs of an image.
    """
    transforms = []
    for transform in pipeline_of(cfg, 'test'):
        if kind_of(transform) == 'TestTimeAug':
            raise UserError(
                'the test pipeline must make one input of an image, got TestTimeAug; leave it in '
                'tta_pipeline, which cpvt test --tta uses'
            )
        if loads_image(transform):
            to_float32 = bool(loaded_bands(transform)) or transform.get('to_float32', False)
            transforms.append({'type': 'LoadImageFromNDArray', 'to_float32': to_float32})
        elif not loads_annotations(transform):
            transforms.append(transform)
    return Compose(transforms)


def open_trained(
    checkpoint: str, config: Optional[str] = None, options: ModelOptions = DEFAULTS
) -> OpenMMLabModel:
    """Build a model and load its weights.

    Args:
        checkpoint: the weights, a path or an address.
        config: a file; by default the config inside the checkpoint.
        options: how it is opened.

    Raises:
        UserError: the model cannot be loaded; one line that says why.
    """
    model, cfg, weights = load_from_config(checkpoint, config, options.cfg_options, options.device)
    if not what_is_missing():
        accelerate(model)  # on a CPU
    if options.dtype == 'bfloat16':
        if line := line_about_bfloat16(next(model.parameters()).device.type):
            warnings.warn(line, stacklevel=2)
        replace_forward(model)
    meta = dataset_meta(cfg, weights)
    score_thr = SCORE_THR if options.score_thr is None else options.score_thr
    return OpenMMLabModel(model, cfg, meta, score_thr)


def load_from_config(
    checkpoint: str, config: Optional[str], cfg_options: Sequence[str], device: Optional[str]
) -> tuple[nn.Module, Config, dict]:
    """The model in evaluation mode with its weights, its config, and its checkpoint; see
    `open_trained`."""
    if config is None:
        weights = fetch_checkpoint(checkpoint)
        cfg = config_in_checkpoint(weights, checkpoint)
        merge_options(cfg, cfg_options)
        check_settings(cfg, 'test_dataloader')
    else:
        cfg = load_config(config, cfg_options)
        check_settings(cfg, 'test_dataloader')
        weights = fetch_checkpoint(checkpoint)
    model = build_model(cfg, device)
    load_whole_model(model, weights, checkpoint)
    return model, cfg, weights
