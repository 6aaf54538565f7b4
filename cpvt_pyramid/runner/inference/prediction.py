"""Predictions of detectors, semantic and panoptic segmentors, as pictures and as files."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.evaluator import DumpResults
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from PIL import Image
from torch import nn

from ...mm.bands import read_bands
from ...tooling.drawing import class_palette, draw_boxes, draw_segmentation
from ...tooling.files import atomic_write, distinct_name
from ...tooling.formats import Kind
from ...tooling.records import detection_records, head_of_image, label_picture, write_list
from ..configs import dataset_class, leaves
from .bands import loaded_bands
from .raster import ReadError, picture

INSTANCE_OFFSET = 1000  # mmdet: the id of a panoptic segment is its class + 1000 * its instance


def read_image(path: Union[str, Path]) -> np.ndarray:
    """The image at `path` as the data pipelines read it, (H, W, 3) BGR, upright.

    Raises:
        ReadError: not a complete image. OpenCV alone would fill in missing pixels.
    """
    if not Path(path).is_file():
        raise ReadError('no such file')
    if not Path(path).stat().st_size:
        raise ReadError('the file is empty')
    try:
        with Image.open(path) as image:
            image.load()
    except Exception as error:  # Pillow raises many kinds on a truncated file
        raise ReadError(f'not a complete image: {error}') from error
    array = mmcv.imread(path)
    if array is None:
        raise ReadError('OpenCV cannot read this kind of image')
    return array


def image_reader(cfg: Config) -> Callable[[Path], np.ndarray]:
    """A function that reads an image as the test pipeline of a config does: (H, W, 3) BGR, or bands
    (H, W, N) in float32.

    It raises a ReadError if the file is not a complete image.
    """
    bands = loaded_bands(cfg)

    def read(path: Path) -> np.ndarray:
        try:
            return read_bands(path, bands)[0]
        except OSError as error:
            raise ReadError(str(error).removesuffix(f': {path}')) from error

    return read_image if bands is None else read


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


def draw_prediction(
    image: np.ndarray,
    sample: BaseDataElement,
    meta: dict,
    score_thr: float,
    legend: bool = True,
) -> Image.Image:
    """A picture of a prediction.

    Args:
        image: (H, W, 3) BGR.
        sample: the prediction, with `pred_instances`, `pred_sem_seg` or `pred_panoptic_seg`.
        meta: `classes` and `palette` of the data set.
        score_thr: boxes of a lower score are left out.
        legend: add a legend of the classes below segments.
    """
    rgb = np.ascontiguousarray(image[..., ::-1])
    if 'pred_panoptic_seg' in sample:
        ids = panoptic_ids(sample)
        labels, classes, palette = ids % INSTANCE_OFFSET, meta['classes'], meta['palette']
        return draw_segmentation(rgb, labels, classes, palette, legend, segments=ids)
    if 'pred_sem_seg' in sample:
        return draw_segmentation(rgb, label_map(sample), meta['classes'], meta['palette'], legend)
    found = found_boxes(sample, score_thr)
    return draw_boxes(
        rgb, found.bboxes, found.labels, found.scores, meta['classes'], meta['palette'],
        masks=found.get('masks'),
    )  # fmt: skip


def found_boxes(sample: BaseDataElement, score_thr: float) -> BaseDataElement:
    """The detections with at least this score, as arrays, best first: `bboxes`, `scores`, `labels`
    and, of models that predict them, boolean `masks`."""
    found = sample.pred_instances
    found = found[found.scores >= score_thr].cpu().numpy()
    if 'masks' in found:
        found.masks = found.masks.astype(bool)  # Mask2Former's are floats
    return found[found.scores.argsort()[::-1].copy()]


def detections(sample: BaseDataElement, meta: dict, score_thr: float) -> list[dict]:
    """The detections of a prediction as JSON values, see `detection_records`."""
    found = found_boxes(sample, score_thr)
    return detection_records(
        found.bboxes, found.scores, found.labels, meta['classes'], found.get('masks')
    )


def label_map(sample: BaseDataElement) -> np.ndarray:
    """A segmentor's prediction: class indices (H, W)."""
    labels = sample.pred_sem_seg.data.cpu().numpy()  # (1, H, W), or (H, W) after augmentation
    return labels.reshape(labels.shape[-2:])


def is_panoptic(model: nn.Module) -> bool:
    """Whether a detector predicts panoptic segments. Mask2Former can be one and still not do so."""
    settings = getattr(model, 'test_cfg', None) or {}
    return hasattr(model, 'panoptic_fusion_head') and settings.get('panoptic_on', True)


def kind_of_results(model: nn.Module, cfg: Config) -> Kind:
    """What a model's results are, as in the names of their files."""
    if cfg.default_scope == 'mmseg':
        return 'labels'
    return 'segments' if is_panoptic(model) else 'detections'


def panoptic_ids(sample: BaseDataElement) -> np.ndarray:
    """A panoptic prediction: mmdet's segment ids (H, W)."""
    ids = sample.pred_panoptic_seg.sem_seg.cpu().numpy()  # (1, H, W)
    return ids.reshape(ids.shape[-2:])


def panoptic_segments(
    sample: BaseDataElement, meta: dict
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """A panoptic prediction: segment numbers (H, W) from 1 on, 0 where there is none, and a
    description of each segment as JSON values."""
    ids, classes = panoptic_ids(sample), meta['classes']
    numbers, segments = np.zeros(ids.shape, np.int32), []
    for mmdet_id in np.unique(ids):
        label = int(mmdet_id % INSTANCE_OFFSET)
        if label >= len(classes):  # pixels without a segment
            continue
        mask = ids == mmdet_id
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        numbers[mask] = len(segments) + 1
        segments.append(
            {
                'id': len(segments) + 1,
                'label': label,
                'class': classes[label],
                'area': int(mask.sum()),
                'box': [int(v) for v in box],
            }
        )
    return numbers, segments


def write_detections(
    path: Path,
    image: Union[str, Path],
    size: tuple[int, int],
    sample: BaseDataElement,
    meta: dict,
    score_thr: float,
    **more: Any,
) -> None:
    """Write the detections in an image of a (height, width) as JSON, one line per box. `more` holds
    further fields."""
    head = {**head_of_image(image, size), **more}
    write_list(path, head, 'detections', detections(sample, meta, score_thr))


def write_results(
    folder: Path,
    name: str,
    path: Path,
    image: np.ndarray,
    sample: BaseDataElement,
    meta: dict,
    score_thr: float,
) -> None:
    """Write a picture of the prediction for an image, and the prediction itself.

    NAME.overlay.png, and NAME.detections.json, NAME.labels.png, or NAME.segments.png and .json.
    """
    with atomic_write(folder / f'{name}.overlay.png') as file:
        draw_prediction(image, sample, meta, score_thr).save(file, 'PNG')
    if 'pred_panoptic_seg' in sample:
        numbers, segments = panoptic_segments(sample, meta)
        with atomic_write(folder / f'{name}.segments.png') as file:
            Image.fromarray(numbers.astype(np.uint16)).save(file, 'PNG')
        head = head_of_image(path, image.shape[:2])
        write_list(folder / f'{name}.segments.json', head, 'segments', segments)
    elif 'pred_sem_seg' in sample:
        with atomic_write(folder / f'{name}.labels.png') as file:
            label_picture(label_map(sample), meta['classes'], meta['palette']).save(file, 'PNG')
    else:
        file, size = folder / f'{name}.detections.json', image.shape[:2]
        write_detections(file, path, size, sample, meta, score_thr)


@HOOKS.register_module()
class PictureHook(Hook):
    """Writes every prediction of a test into a folder, as a picture and as infer.py writes it.

    Args:
        folder: an existing folder.
        score_thr: boxes of a lower score are left out.
    """

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
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Optional[Sequence[BaseDataElement]] = None,
    ) -> None:
        meta, read = dataset_meta(runner.cfg, {}), image_reader(runner.cfg)
        for sample in outputs:
            name, path = self.names[sample.img_path], Path(sample.img_path)
            image = picture(read(path))
            write_results(self.folder, name, path, image, sample, meta, self.score_thr)


def results_dump(scope: str, path: str) -> DumpResults:
    """A metric that pickles all predictions to `path`, which must end in .pkl or .pickle."""
    if scope == 'mmdet':
        from mmdet.evaluation import DumpDetResults as Dump  # compresses the masks
    else:
        Dump = DumpSegResults

    class AtomicDump(Dump):
        def compute_metrics(self, results: list) -> dict:
            with atomic_write(path) as partial, partial.open('wb') as file:
                pickle.dump(results, file)
            return {}

    return AtomicDump(path)


class DumpSegResults(DumpResults):
    """mmengine's DumpResults without the ground truth and the scores, which take 150 floats per
    pixel for ADE20K."""

    def process(self, data_batch: Any, predictions: Sequence[dict]) -> None:
        left_out = ('gt_sem_seg', 'seg_logits')
        slim = [{k: v for k, v in sample.items() if k not in left_out} for sample in predictions]
        super().process(data_batch, slim)
