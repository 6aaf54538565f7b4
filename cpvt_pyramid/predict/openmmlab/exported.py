"""Exported models in the place of mm's, for the videos and the tiles of cpvt infer."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional, Union

import numpy as np
import torch
from torch import Tensor

from ... import __version__
from ...padding.batching import map_in_batches
from ...tooling.inputs import local_path
from ..predictions import Prediction
from ..predictor import ExportedModel
from .large_images import TileModel, hashed
from .rasters import read_image
from .tiling import Found

Source = tuple[Any, np.ndarray]  # the caller's reference to an image, and the image (H, W, 3) BGR


class ExportedPredictor:
    """An exported model with the interface of `trained.ModelPredictor`."""

    device = torch.device('cpu')  # of the tensors
    bands: Optional[tuple[int, ...]] = None  # RGB

    def __init__(
        self, model: ExportedModel, backend: str, batch_size: int, score_thr: Optional[float]
    ) -> None:
        self.model = model
        self.backend = backend
        self.batch_size = batch_size
        self.score_thr = model.about['score_thr'] if score_thr is None else score_thr
        self.kind = model.kind_of_results
        self.meta = {'classes': model.classes, 'palette': model.palette}

    read = staticmethod(read_image)

    def prepare(self, source: Any, image: np.ndarray) -> Source:
        return source, image

    def predict(self, images: Iterable[Source]) -> Iterator[tuple[Any, Prediction]]:
        """The source and prediction of each, in order."""
        return map_in_batches(self._predict, images, self._canvas, self.batch_size)

    def in_tiles(self) -> TileModel:
        """The model for images larger than memory. One that returns labels votes, with the weights
        of blended scores, where tiles overlap."""
        digest = hashlib.sha256()
        for path in (self.model.path, self.model.path.with_suffix('.bin')):
            if path.is_file():
                digest.update(path.read_bytes())
        about = {
            'model': hashed(self.model.about),
            'checkpoint': digest.hexdigest(),
            'backend': self.backend,
            'version': __version__,
        }
        detects = self.kind == 'detections'
        return TileModel(detects, self._predict_tile, self.meta, about, self.device, self.score_thr)

    def _canvas(self, image: Source) -> tuple[int, int]:
        return self.model.canvas(image[1].shape[:2])

    def _predict(self, batch: Sequence[Source]) -> list[tuple[Any, Prediction]]:
        rgb = [np.ascontiguousarray(image[..., ::-1]) for _, image in batch]
        found = self.model.predict(rgb, self.score_thr)
        return [(source, prediction) for (source, _), prediction in zip(batch, found)]

    def _predict_tile(self, tile: Tensor) -> Union[Tensor, Found]:
        """Detections in a tile (3, h, w), BGR uint8, or its scores (K, h, w)."""
        image = np.ascontiguousarray(tile.numpy()[::-1].transpose(1, 2, 0))
        [output] = self.model.run_batch([image], [image.shape[:2]])
        if self.kind == 'detections':
            used = output['labels'] >= 0
            return Found(*(torch.from_numpy(output[name][used]) for name in Found._fields))
        if 'probabilities' in output:
            scores = [
                self.model.class_scores(plane, label)
                for label, plane in enumerate(output['probabilities'])
            ]
            return torch.from_numpy(np.stack(scores))
        classes = np.arange(len(self.model.classes))[:, None, None]
        return torch.from_numpy((output['labels'] == classes).astype(np.float32))


def load_exported(
    path: str,
    *,
    backend: str = 'onnxruntime',
    batch_size: int = 1,
    score_thr: Optional[float] = None,
) -> ExportedPredictor:
    """Open an exported model; for the arguments, see `cpvt infer`."""
    model = ExportedModel(local_path(path), backend)
    return ExportedPredictor(model, backend, batch_size, score_thr)
