"""Exported models in the place of mm's, for the videos and the tiles of cpvt infer."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor

from ... import __version__
from ...padding.batching import map_in_batches
from ...results.predictions import Prediction
from ...runtime.predictor import ExportedModel
from ..rasters import read_image
from .large_images import TileModel, hashed
from .tiling import Found

Source = tuple[Any, np.ndarray]  # the caller's reference to an image, and the image (H, W, 3) BGR


class ExportedPredictor:
    """An exported model with the interface of `batched.ModelPredictor`."""

    def __init__(self, model: ExportedModel, batch_size: int, score_thr: float) -> None:
        self.model, self.batch_size, self.score_thr = model, batch_size, score_thr
        self.meta = {'classes': model.classes, 'palette': model.palette}

    read = staticmethod(read_image)

    def prepare(self, source: Any, image: np.ndarray) -> Source:
        return source, image

    def predict(self, images: Iterable[Source]) -> Iterator[tuple[Any, Prediction]]:
        """The source and prediction of each, in order."""
        return map_in_batches(self._predict, images, self._canvas, self.batch_size)

    def _canvas(self, image: Source) -> tuple[int, int]:
        return self.model.canvas(image[1].shape[:2])

    def _predict(self, batch: Sequence[Source]) -> list[tuple[Any, Prediction]]:
        rgb = [np.ascontiguousarray(image[..., ::-1]) for _, image in batch]
        found = self.model.predict(rgb, self.score_thr)
        return [(source, prediction) for (source, _), prediction in zip(batch, found)]


def exported_tiles(model: ExportedModel, backend: str) -> TileModel:
    """An exported model for tiled inference. One that returns labels votes, with the weights of
    blended scores, where tiles overlap."""
    detects = model.about['task'] != 'segmentation'
    files = (path for path in (model.path, model.path.with_suffix('.bin')) if path.is_file())
    about = {
        'model': hashed(model.about),
        'checkpoint': hashlib.sha256(b''.join(path.read_bytes() for path in files)).hexdigest(),
        'device': backend,
        'version': __version__,
    }

    def predict(tile: Tensor) -> Union[Tensor, Found]:
        """Detections in a tile (3, h, w), BGR uint8, or its scores (K, h, w)."""
        image = np.ascontiguousarray(tile.numpy()[::-1].transpose(1, 2, 0))
        [output] = model.run_batch([image], [image.shape[:2]])
        if detects:
            used = output['labels'] >= 0
            return Found(*(torch.from_numpy(output[k][used]) for k in Found._fields))
        if 'probabilities' in output:
            planes = enumerate(output['probabilities'])
            return torch.from_numpy(np.stack([model.class_scores(x, i) for i, x in planes]))
        classes = np.arange(len(model.classes))[:, None, None]
        return torch.from_numpy((output['labels'] == classes).astype(np.float32))

    meta = {'classes': model.classes, 'palette': model.palette}
    return TileModel(detects, predict, meta, about, torch.device('cpu'))
