"""Exported models in the place of mm's, for the videos and the tiles of tools/infer.py. Imports
torch and mm."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch import Tensor

from .. import __version__
from ..runner.inference.large_images import TileModel
from ..runner.inference.prediction import read_image
from ..runner.inference.tiling import Found
from .predictor import ExportedModel, Result
from .results import Detections

Source = tuple[Any, np.ndarray]  # the caller's reference to an image, and the image (H, W, 3) BGR


class ExportedPredictor:
    """An exported model with the interface of `runner.inference.ModelPredictor`.

    Args:
        model: the model.
        batch_size: number of images that pass the model together.
        score_thr: boxes of a lower score are left out.
    """

    def __init__(self, model: ExportedModel, batch_size: int, score_thr: float) -> None:
        self.model, self.batch_size, self.score_thr = model, batch_size, score_thr
        self.meta = {'classes': model.classes, 'palette': model.palette}

    read = staticmethod(read_image)

    def prepare(self, source: Any, image: np.ndarray) -> Source:
        return source, image

    def predict(
        self, images: Iterable[Source]
    ) -> Iterator[tuple[Any, np.ndarray, BaseDataElement]]:
        """The source, image and prediction of each, in order."""
        images = iter(images)
        while batch := list(itertools.islice(images, self.batch_size)):
            results = self.model.predict([red_first(image) for _, image in batch], self.score_thr)
            for (source, image), result in zip(batch, results):
                yield source, image, as_data_sample(result)


def red_first(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(image[..., ::-1])


def as_data_sample(result: Result) -> BaseDataElement:
    """A prediction as mm's models return it."""
    if not isinstance(result, Detections):
        labels = torch.from_numpy(result.labels[None].astype(np.int64))
        return BaseDataElement(pred_sem_seg=PixelData(data=labels))
    found = {'bboxes': result.boxes, 'scores': result.scores, 'labels': result.labels}
    if result.masks is not None:
        found['masks'] = result.masks
    tensors = {name: torch.from_numpy(values) for name, values in found.items()}
    return BaseDataElement(pred_instances=InstanceData(**tensors))


def exported_tiles(model: ExportedModel, backend: str) -> TileModel:
    """An exported model for tiled inference.

    One that returns labels votes where tiles overlap, with the weights by which scores are blended.
    """
    detects = model.about['task'] != 'segmentation'
    predict = exported_boxes(model) if detects else exported_scores(model)
    files = (path for path in (model.path, model.path.with_suffix('.bin')) if path.is_file())
    about = {
        'model': hashlib.sha256(json.dumps(model.about, sort_keys=True).encode()).hexdigest(),
        'checkpoint': hashlib.sha256(b''.join(path.read_bytes() for path in files)).hexdigest(),
        'device': backend,
        'version': __version__,
    }
    meta = {'classes': model.classes, 'palette': model.palette}
    return TileModel(detects, predict, meta, about, torch.device('cpu'))


def outputs_of(model: ExportedModel, tiles: Tensor) -> Sequence[dict[str, np.ndarray]]:
    return model.run(
        [np.ascontiguousarray(tile.numpy()[::-1].transpose(1, 2, 0)) for tile in tiles]
    )


def exported_boxes(model: ExportedModel) -> Callable[[Tensor], list[Found]]:
    """A function from tiles (B, 3, h, w), BGR uint8, to the detections in each."""

    def found(output: dict[str, np.ndarray]) -> Found:
        keep = output['labels'] >= 0
        return Found(
            *(torch.from_numpy(output[name][keep]) for name in ('boxes', 'scores', 'labels'))
        )

    return lambda tiles: [found(output) for output in outputs_of(model, tiles)]


def exported_scores(model: ExportedModel) -> Callable[[Tensor], Tensor]:
    """A function from tiles (B, 3, h, w), BGR uint8, to scores (B, K, h, w)."""

    def scores(output: dict[str, np.ndarray], height: int, width: int) -> np.ndarray:
        if 'probabilities' in output:
            probabilities = output['probabilities'][:, :height, :width]
            return np.stack([model.class_scores(p, i) for i, p in enumerate(probabilities)])
        classes = np.arange(len(model.classes))[:, None, None]
        return (output['labels'][:height, :width] == classes).astype(np.float32)

    def predict(tiles: Tensor) -> Tensor:
        outputs = outputs_of(model, tiles)
        return torch.from_numpy(np.stack([scores(o, *tiles.shape[2:]) for o in outputs]))

    return predict
