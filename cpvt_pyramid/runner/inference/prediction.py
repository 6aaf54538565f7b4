"""Predictions of detectors, semantic and panoptic segmentors, as pictures and as files."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from mmengine.config import Config
from mmengine.evaluator import DumpResults
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from ...results.predictions import Detections, Kind, LabelMap, Prediction, Segments
from ...tooling.files import atomic_write, distinct_name
from ..config.parts import dataset_meta, loaded_bands
from ..rasters import picture, read_image

INSTANCE_OFFSET = 1000  # mmdet: the id of a panoptic segment is its class + 1000 * its instance


def to_prediction(
    sample: BaseDataElement, image: np.ndarray, meta: dict, score_thr: float
) -> Prediction:
    """A data sample of mm, of an image (H, W, 3) BGR, as a prediction that can be drawn and
    written. Boxes with a score below `score_thr` are left out."""
    common = {'image': cv2.cvtColor(image, cv2.COLOR_BGR2RGB), **meta}
    if 'pred_panoptic_seg' in sample:
        ids = as_map(sample.pred_panoptic_seg.sem_seg)
        present = [i for i in np.unique(ids) if i % INSTANCE_OFFSET < len(meta['classes'])]
        numbers = np.zeros(ids.shape, np.int32)
        for number, mmdet_id in enumerate(present, 1):
            numbers[ids == mmdet_id] = number
        labels = np.array(present, int) % INSTANCE_OFFSET
        return Segments(numbers=numbers, labels=labels, **common)
    if 'pred_sem_seg' in sample:
        labels = as_map(sample.pred_sem_seg.data)
        dtype = np.uint8 if labels.max() < 256 else np.int32  # an eighth or half of the memory
        return LabelMap(labels=labels.astype(dtype), **common)
    found = sample.pred_instances
    found = found[found.scores >= score_thr].cpu().numpy()
    found = found[np.argsort(-found.scores, kind='stable')]
    # Mask2Former's masks are floats
    masks = found.masks.astype(bool) if 'masks' in found else None
    return Detections(
        boxes=found.bboxes, scores=found.scores, labels=found.labels, masks=masks, **common
    )


def as_map(data: Tensor) -> np.ndarray:
    """(1, H, W), or (H, W) after augmentation, as (H, W)."""
    values = data.cpu().numpy()
    return values.reshape(values.shape[-2:])


def is_panoptic(model: nn.Module) -> bool:
    """Whether a detector predicts panoptic segments. Mask2Former can be one and still not do so."""
    settings = getattr(model, 'test_cfg', None) or {}
    return hasattr(model, 'panoptic_fusion_head') and settings.get('panoptic_on', True)


def kind_of_results(model: nn.Module, cfg: Config) -> Kind:
    """What a model's results are, as in the names of their files."""
    detected = 'segments' if is_panoptic(model) else 'detections'
    return 'labels' if cfg.default_scope == 'mmseg' else detected


@HOOKS.register_module()
class PictureHook(Hook):
    """Writes every prediction of a test into a folder, as a picture and as cpvt infer writes it."""

    def __init__(self, folder: str, score_thr: float = 0.3) -> None:
        self.folder = Path(folder)
        self.score_thr = score_thr
        self.names: dict[str, str] = {}  # by path

    def before_test(self, runner: Runner) -> None:
        dataset, taken = runner.test_dataloader.dataset, set()
        for i in range(len(dataset)):  # the same in all processes that share a test
            path = dataset.get_data_info(i)['img_path']
            self.names[path] = distinct_name(Path(path).stem, taken)

    def after_test_iter(
        self, runner: Runner, *_: Any, outputs: Sequence[BaseDataElement], **__: Any
    ) -> None:
        meta, bands = dataset_meta(runner.cfg, {}), loaded_bands(runner.cfg)
        for sample in outputs:
            name, path = self.names[sample.img_path], Path(sample.img_path)
            image = picture(read_image(path, bands))
            to_prediction(sample, image, meta, self.score_thr).write(self.folder, name, path)


def results_dump(scope: str, path: str) -> DumpResults:
    """A metric that pickles all predictions to `path`, which must end in .pkl or .pickle."""
    Dump = DumpResults
    if scope == 'mmdet':
        from mmdet.evaluation import DumpDetResults as Dump  # compresses the masks

    class AtomicDump(Dump):
        def process(self, data_batch: Any, predictions: Sequence[dict]) -> None:
            left_out = 'gt_sem_seg', 'seg_logits'  # the latter: 150 floats per pixel for ADE20K
            kept = [{k: v for k, v in x.items() if k not in left_out} for x in predictions]
            super().process(data_batch, kept)

        def compute_metrics(self, results: list) -> dict:
            with atomic_write(path) as partial, partial.open('wb') as file:
                pickle.dump(results, file)
            return {}

    return AtomicDump(path)
