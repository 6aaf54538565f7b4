"""Predictions of detectors, semantic and panoptic segmentors, as pictures and as files."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

import cv2
import numpy as np
from mmengine.config import Config
from mmengine.evaluator import DumpResults
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from PIL import Image
from torch import Tensor, nn

from ...mm.bands import read_bands
from ...results.drawing import class_palette
from ...results.predictions import Detections, Kind, LabelMap, Prediction, Segments
from ...runtime.images import load_image
from ...tooling.files import atomic_write, distinct_name
from ..config.load import dataset_class, kind_of, leaves
from .raster import ReadError, picture

INSTANCE_OFFSET = 1000  # mmdet: the id of a panoptic segment is its class + 1000 * its instance


def read_image(path: Union[str, Path], bands: Optional[Sequence[int]] = None) -> np.ndarray:
    """The image at `path`, see `load_image`, in OpenCV's order: (H, W, 3) BGR; or bands of it,
    (H, W, N) in float32, as the test pipeline reads them.

    Raises:
        ReadError: not a complete image.
    """
    try:
        if bands:
            return read_bands(path, bands)
        return cv2.cvtColor(load_image(path), cv2.COLOR_RGB2BGR)
    except OSError as error:
        if isinstance(error.__cause__, Image.DecompressionBombError):
            raise ReadError('too many pixels to be read at once; use --tile') from error
        raise ReadError(str(error).removesuffix(f': {path}')) from error


def loaded_bands(cfg: Config) -> Optional[tuple[int, ...]]:
    """The bands that the test pipeline of a config loads; None if it loads RGB."""
    for step in next(leaves(cfg.test_dataloader.dataset)).pipeline:
        if kind_of(step).endswith('LoadBands'):
            return tuple(step['bands'])
    return None


def dataset_meta(cfg: Config, checkpoint: dict, split: str = 'test') -> dict:
    """`classes`, from the checkpoint or else the config's data set, and their `palette`.

    The palette is that of the config or the data set's class, or else distinct colours. It is not
    the checkpoint's, where mmseg stores random colours if none are declared.
    """
    dataset = next(leaves(cfg[f'{split}_dataloader'].dataset))
    kind = dataset_class(dataset, cfg.default_scope)
    declared = {**kind.METAINFO, **(dataset.get('metainfo') or {})}
    trained = checkpoint.get('meta', {}).get('dataset_meta') or {}
    classes = {k.lower(): v for k, v in {**declared, **trained}.items()}.get('classes', ())
    return {'classes': classes, 'palette': class_palette(classes, declared.get('palette'))}


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
