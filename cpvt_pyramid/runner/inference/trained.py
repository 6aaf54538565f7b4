"""Training checkpoints of mm behind the interface of the runtime, which imports this by name."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Optional

import cv2
import numpy as np

from ...ops import use_winograd
from ...results.predictions import Prediction
from ...tooling.command import UserError
from ..config.load import config_in_checkpoint
from ..config.parts import dataset_meta
from ..models import build_model, fetch_checkpoint, load_whole_model
from .batched import ModelPredictor
from .prediction import is_panoptic, kind_of_results

SCORE_THR = 0.3  # as in cpvt infer


class TrainedModel:
    """A detector or a semantic segmentor of mm, from a checkpoint that has its config inside.

    Raises:
        UserError: not a complete checkpoint, without a config, or of a panoptic model.
    """

    def __init__(self, path: Path) -> None:
        weights = fetch_checkpoint(path)
        cfg = config_in_checkpoint(weights, path)
        model = build_model(cfg, None)
        if is_panoptic(model):
            raise UserError(f'{path} is a panoptic model; run it with cpvt infer')
        load_whole_model(model, weights, path)
        use_winograd(model)
        self.kind_of_results = kind_of_results(model, cfg)
        self.meta = dataset_meta(cfg, weights)
        self.classes = self.meta['classes']
        self.predictor = ModelPredictor(model, cfg, self.meta, 1, 0.0)

    def predict(self, images: Sequence[np.ndarray], score_thr: Optional[float]) -> list[Prediction]:
        self.predictor.batch_size = len(images)
        self.predictor.score_thr = SCORE_THR if score_thr is None else score_thr
        prepare = self.predictor.prepare
        inputs = (prepare(None, cv2.cvtColor(image, cv2.COLOR_RGB2BGR)) for image in images)
        found = self.predictor.predict(inputs)
        return [replace(result, image=image) for (_, result), image in zip(found, images)]
