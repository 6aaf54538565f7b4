"""What becomes of a detector's or a segmentor's predictions: pictures and files."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Optional, Union

import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.evaluator import DumpResults
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from PIL import Image

from .drawing import class_palette, draw_boxes, draw_segmentation
from .launch import leaves
from .resume import appearing_whole


def read_image(path: Union[str, Path]) -> np.ndarray:
    """The image at `path` as the data pipelines read it, (H, W, 3) BGR, upright.

    Raises:
        OSError: it is no image, or not all of one; OpenCV alone fills in what is missing.
    """
    if not Path(path).is_file():
        raise OSError('no such file')
    if not Path(path).stat().st_size:
        raise OSError('an empty file')
    try:
        with Image.open(path) as image:
            image.load()
    except Exception as error:  # Pillow raises whatever the bytes of a torn file lead to
        raise OSError(f'not a whole image: {error}') from error
    array = mmcv.imread(path)
    if array is None:
        raise OSError('OpenCV does not read this kind of image')
    return array


def dataset_meta(cfg: Config, checkpoint: dict, split: str = 'test') -> dict:
    """`classes`, as the checkpoint has them or else the config's data set, and their `palette`.

    The palette is the one that the config or the kind of data set declares, or distinct colours;
    not the checkpoint's, because mmseg puts random colours there where none is declared.
    """
    dataset = next(leaves(cfg[f'{split}_dataloader'].dataset))
    with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
        declared = {**registry.get(dataset.type).METAINFO, **dataset.get('metainfo', {})}
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
    """A picture of what a model found in an image.

    Args:
        image: (H, W, 3) BGR.
        sample: the prediction, with `pred_instances` or `pred_sem_seg`.
        meta: `classes` and `palette` of the data set.
        score_thr: boxes of a lower score are left out.
        legend: of the classes, below segments.
    """
    rgb = np.ascontiguousarray(image[..., ::-1])
    if 'pred_sem_seg' in sample:
        return draw_segmentation(rgb, label_map(sample), meta['classes'], meta['palette'], legend)
    found = found_boxes(sample, score_thr)
    return draw_boxes(
        rgb, found.bboxes, found.labels, found.scores, meta['classes'], meta['palette']
    )


def found_boxes(sample: BaseDataElement, score_thr: float) -> BaseDataElement:
    """A detector's predictions of at least this score, as arrays, the best first."""
    found = sample.pred_instances
    found = found[found.scores >= score_thr].cpu().numpy()
    return found[found.scores.argsort()[::-1].copy()]


def detections(sample: BaseDataElement, meta: dict, score_thr: float) -> list[dict]:
    """The boxes of a prediction as plain values; boxes are x1, y1, x2, y2 in pixels."""
    found = found_boxes(sample, score_thr)
    classes = meta['classes']
    return [
        {
            'box': [round(float(v), 2) for v in box],
            'label': int(label),
            'class': classes[label] if label < len(classes) else str(label),
            'score': round(float(score), 4),
        }
        for box, label, score in zip(found.bboxes, found.labels, found.scores)
    ]


def label_map(sample: BaseDataElement) -> np.ndarray:
    """A segmentor's prediction: (H, W) indices of classes."""
    labels = sample.pred_sem_seg.data.cpu().numpy()  # (1, H, W), or (H, W) of merged ones
    return labels.reshape(labels.shape[-2:])


def labels_image(sample: BaseDataElement, meta: dict) -> Image.Image:
    """A segmentor's prediction as an image whose pixel values are indices of classes.

    Viewers show the classes' colours; beyond 256 classes, shades of grey.
    """
    labels = label_map(sample)
    if len(meta['classes']) > 256:
        return Image.fromarray(labels.astype(np.uint16))
    image = Image.fromarray(labels.astype(np.uint8), mode='P')
    image.putpalette([int(v) for color in meta['palette'] for v in color])
    return image


def write_detections(
    path: Path, image: Union[str, Path], sample: BaseDataElement, meta: dict, score_thr: float,
    **more: Any,
) -> None:  # fmt: skip
    """Write what a detector found in an image as JSON, a line for each box; `more` goes along."""
    head = ''.join(f'{json.dumps(k)}: {json.dumps(v)},\n ' for k, v in more.items())
    found = ',\n  '.join(map(json.dumps, detections(sample, meta, score_thr)))
    with appearing_whole(path) as file:
        file.write_text(
            f'{{"image": {json.dumps(str(image))},\n {head}"detections": [\n  {found}]}}\n'
        )


def write_results(
    folder: Path,
    name: str,
    path: Path,
    image: np.ndarray,
    sample: BaseDataElement,
    meta: dict,
    score_thr: float,
) -> None:
    """Write an image's picture, NAME.overlay.png, and NAME.detections.json or NAME.labels.png."""
    with appearing_whole(folder / f'{name}.overlay.png') as file:
        draw_prediction(image, sample, meta, score_thr).save(file, 'PNG')
    if 'pred_sem_seg' in sample:
        with appearing_whole(folder / f'{name}.labels.png') as file:
            labels_image(sample, meta).save(file, 'PNG')
    else:
        write_detections(folder / f'{name}.detections.json', path, sample, meta, score_thr)


def distinct_name(
    wanted: str, taken: set[str], unfit: Callable[[str], bool] = lambda name: False
) -> str:
    """`wanted`, with a number behind it if it is taken or unfit; it is taken then."""
    numbered = (f'{wanted}-{number}' for number in itertools.count(2))
    names = itertools.chain([wanted], numbered)
    name = next(name for name in names if name not in taken and not unfit(name))
    taken.add(name)
    return name


@HOOKS.register_module()
class PictureHook(Hook):
    """Draws every prediction of a test into a folder.

    Args:
        folder: where; it exists.
        score_thr: boxes of a lower score are left out.
    """

    def __init__(self, folder: str, score_thr: float = 0.3) -> None:
        self.folder = Path(folder)
        self.score_thr = score_thr
        self.names: set[str] = set()

    def after_test_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Optional[Sequence[BaseDataElement]] = None,
    ) -> None:
        meta = dataset_meta(runner.cfg, {})
        for sample in outputs:
            name = distinct_name(Path(sample.img_path).stem, self.names)
            picture = draw_prediction(read_image(sample.img_path), sample, meta, self.score_thr)
            picture.save(self.folder / f'{name}.png')


def results_dump(scope: str, path: str) -> DumpResults:
    """A metric that pickles all predictions to `path`, which must end in .pkl or .pickle."""
    if scope == 'mmdet':
        from mmdet.evaluation import DumpDetResults  # it packs the masks

        return DumpDetResults(path)
    return DumpSegResults(path)


class DumpSegResults(DumpResults):
    """mmengine's DumpResults without the ground truth and the scores of all classes, which for
    ADE20K are 150 floats to a pixel."""

    def process(self, data_batch: Any, predictions: Sequence[dict]) -> None:
        left_out = ('gt_sem_seg', 'seg_logits')
        slim = [{k: v for k, v in sample.items() if k not in left_out} for sample in predictions]
        super().process(data_batch, slim)
