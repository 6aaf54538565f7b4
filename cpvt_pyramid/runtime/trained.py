"""Training checkpoints of mm behind the interface of the runtime. The only file of it that imports
torch and mm; it is imported when a checkpoint is opened."""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import numpy as np

from ..runner.configs import config_in_checkpoint
from ..runner.inference.batched import ModelPredictor
from ..runner.inference.prediction import (
    dataset_meta,
    found_boxes,
    is_panoptic,
    kind_of_results,
    label_map,
)
from ..runner.models import build_model, fetch_checkpoint, load_whole_model
from ..tooling.command import UserError
from .results import Detections, LabelMap

SCORE_THR = 0.3  # as in tools/infer.py


class TrainedModel:
    """A detector or a semantic segmentor of mm, from a checkpoint that has its config inside.

    Args:
        path: the checkpoint.

    Raises:
        UserError: not a complete checkpoint, without a config, or of a panoptic model.
    """

    def __init__(self, path: Path) -> None:
        weights = fetch_checkpoint(path)
        cfg = config_in_checkpoint(weights, path)
        model = build_model(cfg, None)
        if is_panoptic(model):
            raise UserError(f'{path} is a panoptic model; run it with tools/infer.py')
        load_whole_model(model, weights, path)
        self.kind_of_results = kind_of_results(model, cfg)
        self.meta = dataset_meta(cfg, weights)
        self.classes = self.meta['classes']
        self.predictor = ModelPredictor(model, cfg, self.meta, 1, 0.0)

    def predict(
        self, images: Sequence[np.ndarray], score_thr: Optional[float]
    ) -> list[Detections | LabelMap]:
        self.predictor.batch_size = len(images)
        prepare, predict = self.predictor.prepare, self.predictor.predict
        inputs = (prepare(i, np.ascontiguousarray(im[..., ::-1])) for i, im in enumerate(images))
        results: dict[int, Detections | LabelMap] = {}
        for i, _, sample in predict(inputs):
            common = {'image': images[i], **self.meta}
            if 'pred_sem_seg' in sample:
                results[i] = LabelMap(labels=label_map(sample), **common)
                continue
            found = found_boxes(sample, SCORE_THR if score_thr is None else score_thr)
            masks = found.masks.astype(bool) if 'masks' in found else None
            boxes, scores, labels = found.bboxes, found.scores, found.labels
            results[i] = Detections(
                boxes=boxes, scores=scores, labels=labels, masks=masks, **common
            )
        return [results[i] for i in range(len(images))]
