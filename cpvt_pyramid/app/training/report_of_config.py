"""The page of `cpvt test CONFIG CHECKPOINT --report`: about the test data of a config."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from pycocotools.coco import COCO
from tqdm import tqdm

from ..config.parts import as_list, data_of, dataset_meta, kind_of
from ..data.config_data import annotation_file, image_folder, mask_reader
from ..data.data import Split
from ..data.defects import Defects
from ..data.layouts.coco import parse_coco, read_coco
from ..evaluate.report.common import WORST, Analysis
from ..evaluate.report.detections import analyse_detections
from ..evaluate.report.label_maps import ComparedImage, analyse_label_maps, compared_label_map
from ..predictions.average_precision import coco_with_index
from ..predictions.records import coco_fields
from ..tooling.command import UserError
from ..tooling.files import write_text
from ..tooling.pages import html_page


def check_reported(cfg: Config) -> None:
    """Check that there is a report for the test data of a config."""
    kinds = [kind_of(dataset) for dataset in data_of(cfg, 'test')]
    is_one = len(kinds) == 1
    if not is_one or (cfg.default_scope != 'mmseg' and kinds != ['CocoDataset']):
        raise UserError(
            f'--report needs test data of one CocoDataset or one of segmentation masks, got {kinds}'
        )


def write_test_report(cfg: Config, predictions: Path, out: Path, title: str, about: str) -> None:
    """Write a page about the predictions of a test, in a file of `cpvt test --out`."""
    found = analyse(cfg, predictions)
    write_text(out, html_page(title, about, found.sections))


def analyse(cfg: Config, predictions: Path, worst: int = WORST) -> Analysis:
    """Analyse the predictions of a test, in a file of `cpvt test --out`."""
    (dataset,) = data_of(cfg, 'test')
    meta = dataset_meta(cfg, {})
    classes = list(meta['classes'])
    if cfg.default_scope == 'mmseg':
        infos, load = mask_reader(dataset, cfg.default_scope)
        images = compared_label_maps(predictions, infos, load, len(classes))
        return analyse_label_maps(images, len(infos), classes, meta['palette'], worst)
    truth = ground_truth(dataset)
    known = {truth.cats[c]['name']: c for c in truth.getCatIds(catNms=classes)}
    for name in classes:
        if name not in known:
            raise UserError(f'{annotation_file(dataset)} has no category {name!r}')
    categories = {name: known[name] for name in classes}
    results = read_detections(predictions, list(categories.values()))
    metrics = metrics_of(cfg, results)
    return analyse_detections(truth, results, categories, metrics, image_folder(dataset), worst)


def read_predictions(path: Path) -> list[dict]:
    """The samples in a file that this process has written."""
    return pickle.loads(path.read_bytes())


def read_detections(path: Path, categories: Sequence[int]) -> list[dict]:
    """Detections as COCO results; `categories` has that of each label."""
    return [result for sample in read_predictions(path) for result in as_coco(sample, categories)]


def as_coco(sample: dict, categories: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The detections in a sample of mmdet as COCO results."""
    found = sample['pred_instances']
    boxes = found['bboxes'].tolist()
    scores = found['scores'].tolist()
    labels = found['labels'].tolist()
    masks = found.get('masks') or [None] * len(scores)
    for box, score, label, mask in zip(boxes, scores, labels, masks):
        fields = coco_fields({'box': box, 'score': score, 'mask': mask})
        yield {'image_id': sample['img_id'], 'category_id': categories[label], **fields}


def ground_truth(dataset: dict) -> COCO:
    path = annotation_file(dataset)
    content = read_coco(path)
    classes = [category['name'] for category in content['categories']]
    defects = Defects(as_it_is=True)
    parse_coco(content, Split([], image_folder(dataset)), classes, defects)
    if problems := [problem for problem in defects.problems() if problem.is_error]:
        raise UserError(f'{path} has {problems[0]}; see cpvt check-data')
    return coco_with_index(content)


def metrics_of(cfg: Config, results: Sequence[dict]) -> list[str]:
    """bbox, segm or both: what the config evaluates and all results have; or else the first that
    they have."""
    wanted = set()
    for evaluator in as_list(cfg.get('test_evaluator')):
        wanted.update(as_list(evaluator.get('metric')))
    keys = {'bbox': 'bbox', 'segm': 'segmentation'}
    present = [name for name, key in keys.items() if all(r.get(key) for r in results)]
    evaluated = [name for name in present if name in wanted]
    if evaluated and results:
        return evaluated
    return present[:1] or ['segm']


def compared_label_maps(
    path: Path, infos: dict, load: Callable[..., np.ndarray], classes: int
) -> Iterator[ComparedImage]:
    """The results in a file, compared with the label maps of a data set, see `mask_reader`."""
    progress = tqdm(read_predictions(path), 'comparing segmentation masks', leave=False, delay=3)
    for sample in progress:
        found = sample['pred_sem_seg']['data']
        image = Path(sample['img_path']).resolve()
        labels = np.asarray(found).reshape(found.shape[-2:])
        yield compared_label_map(image, labels, load(infos[image]), classes)
