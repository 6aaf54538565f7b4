"""Trained models by name, in PyTorch.

A model is a session, as those of onnxruntime and OpenVINO are, so that images are prepared, and
results made, by the code for exported models.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from torch import Tensor

from ....acceleration.accelerate import accelerate, what_is_missing
from ....acceleration.processor import line_about_bfloat16
from ....tasks.segmentors import resize
from ....tasks.trained import PALETTES, TRAINED, load_trained
from ...predictions.drawing import class_palette
from ...predictions.kinds import SCORE_THR
from ...tooling.command import UserError, one_line
from ..exported import SessionModel
from ..options import DEFAULTS, ModelOptions
from ..tiles import Boxes
from .best_labels import best_labels

STRIDE = 32  # to multiples of which MMDetection pads images
NO_BOX = -1  # the label of unused rows


class TrainedModel(SessionModel):
    """A trained model with its pre- and post-processing; see `protocol.Model`.

    Args:
        name: see `cpvt models`.
        checkpoint: the file of its weights; None: it is downloaded.
        options: how it is opened. bfloat16 is for backbone and heads; boxes are float32.

    Raises:
        UserError: it cannot be loaded; one line that says why.
    """

    session: 'TorchSession'

    def __init__(
        self,
        name: str,
        checkpoint: Optional[str] = None,
        options: ModelOptions = DEFAULTS,
    ) -> None:
        trained = TRAINED[name]
        model = on_device(load_by_name(name, checkpoint), options.device)
        kind = DetectorSession if trained.detects else SegmentorSession
        about = {
            **about_trained(name, model),
            'task': 'detection' if trained.detects else 'segmentation',
            'stride': STRIDE,
            'masks': None,
            'score_thr': SCORE_THR,
        }
        if trained.detects:
            about['nms'] = {
                'score_thr': model.score_thresh,
                'iou_threshold': model.nms_thresh,
                'class_agnostic': False,
            }
        super().__init__(Path(name), kind(model, options.dtype), about, options)

    def _predict_tile(self, tile: np.ndarray) -> Union[np.ndarray, Boxes]:
        if isinstance(self.session, SegmentorSession):
            return self.session.scores(tile)
        return super()._predict_tile(tile)


def about_trained(name: str, model: Any) -> dict[str, Any]:
    """What the metadata of an exported file say about a trained model: its classes, colours, sizes
    of images and architecture."""
    trained = TRAINED[name]
    short, long = model.image_sides
    return {
        'classes': list(model.classes),
        'palette': class_palette(model.classes, PALETTES[trained.data]),
        'resize': {'short': short, 'long': long},
        'arch': f'{trained.head}, CPVTPyramid {trained.arch}',
    }


def load_by_name(name: str, checkpoint: Optional[str]) -> Any:
    """`load_trained`.

    Raises:
        UserError: it cannot be loaded; one line that says why.
    """
    try:
        return load_trained(name, checkpoint)
    except ImportError as error:
        raise UserError(
            f"{name} needs torch and torchvision; pip install '.[torch]' ({error})"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error


def on_device(model: Any, device: Optional[str]) -> Any:
    """A model on a device of PyTorch; on a CPU it is accelerated."""
    if device is None:
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'no device {device}: {one_line(error, 100)}') from error
    if next(model.parameters()).device.type == 'cpu' and not what_is_missing():
        accelerate(model)
    return model


class TorchSession:
    """A model in PyTorch as a `sessions.Session`, for one thread."""

    metadata: Optional[str] = None
    test: Optional[str] = None
    rows: Optional[int] = None
    requests = 1
    names: list[str]
    shapes: dict[str, list[Optional[int]]]

    def __init__(self, model: Any, dtype: str) -> None:
        self.model = model
        self.place = next(model.parameters()).device
        self.device = f'PyTorch on {self.place}'
        self.dtype = getattr(torch, dtype)
        if dtype == 'bfloat16' and (line := line_about_bfloat16(self.place.type)):
            warnings.warn(line, stacklevel=2)
        self.dtypes: dict[str, np.dtype] = {name: np.dtype(np.int64) for name in self.shapes}
        self.dtypes['images'] = np.dtype(np.float32)

    @torch.no_grad()
    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of `names` for the inputs of `shapes`."""
        images = torch.from_numpy(inputs['images']).to(self.place) / 255
        autocast = self.dtype != torch.float32
        with torch.autocast(self.place.type, self.dtype, enabled=autocast):
            return self.outputs(images, inputs)

    def outputs(self, images: Tensor, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`run` for images (B, 3, H, W) in [0, 1] on the model's device."""
        raise NotImplementedError


class DetectorSession(TorchSession):
    """A RetinaNet of `tasks.detectors`. Images are padded with zeros after normalization."""

    names = ['boxes', 'scores', 'labels']
    shapes = {'images': [None, 3, None, None], 'valid': [None, 2]}

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.rows = model.detections_per_img

    def outputs(self, images: Tensor, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        sizes = [(int(height), int(width)) for height, width in inputs['valid']]
        transform = self.model.transform
        normalized = [
            transform.normalize(image[:, :height, :width])
            for image, (height, width) in zip(images, sizes)
        ]
        found = self.model.detect(transform.batch_images(normalized, STRIDE), sizes)
        rows = max(len(each['scores']) for each in found)
        boxes = np.zeros((len(found), rows, 4), np.float32)
        scores = np.zeros((len(found), rows), np.float32)
        labels = np.full((len(found), rows), NO_BOX, np.int64)
        for i, each in enumerate(found):
            count = len(each['scores'])
            boxes[i, :count] = each['boxes'].cpu().numpy()
            scores[i, :count] = each['scores'].cpu().numpy()
            labels[i, :count] = each['labels'].cpu().numpy()
        return {'boxes': boxes, 'scores': scores, 'labels': labels}


class SegmentorSession(TorchSession):
    """A segmentor of `segmentors`. Its images are not padded: those of a batch have one size."""

    names = ['labels']
    shapes = {'images': [None, 3, None, None], 'original': [None, 2]}

    def outputs(self, images: Tensor, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        to_batch_size: Callable[[Tensor], Tensor]
        if self.model.window is None:
            scores = self.model.scores(images)
            size = images.shape[2:]

            def to_batch_size(x: Tensor) -> Tensor:
                return resize(x, size)

        else:
            scores = self.model(images)

            def to_batch_size(x: Tensor) -> Tensor:
                return x

        scores = scores.float().contiguous()
        originals = [(int(height), int(width)) for height, width in inputs['original']]
        height, width = np.max(originals, axis=0)
        dtype = np.uint8 if scores.shape[1] <= 256 else np.int32
        labels = np.zeros((len(originals), height, width), dtype)
        for i, original in enumerate(originals):
            own = label_map(scores[i : i + 1], to_batch_size, original)
            labels[i, : original[0], : original[1]] = own.cpu().numpy()
        return {'labels': labels}

    @torch.no_grad()
    def scores(self, tile: np.ndarray) -> np.ndarray:
        """The scores (K, h, w) of a tile (h, w, 3) RGB uint8."""
        image = torch.from_numpy(tile).to(self.place).permute(2, 0, 1)[None].float() / 255
        autocast = self.dtype != torch.float32
        with torch.autocast(self.place.type, self.dtype, enabled=autocast):
            scores = self.model(image)
        return scores[0].float().cpu().numpy()


def label_map(
    scores: Tensor, to_batch_size: Callable[[Tensor], Tensor], original: tuple[int, int]
) -> Tensor:
    """The labels (H, W) of an image of this size from its scores (1, K, h, w)."""
    if scores.is_cpu:
        return best_labels(scores, to_batch_size, {'ori_shape': original}, False)[0]
    return resize(to_batch_size(scores), original).argmax(1)[0]
