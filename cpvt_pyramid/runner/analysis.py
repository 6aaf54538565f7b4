"""What the results of a test say: tables, charts and the worst images, as an HTML page."""

import io
import json
import math
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from mmengine.config import Config
from PIL import Image, ImageDraw
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tqdm import tqdm

from ..results import detection_errors
from ..results.detection_errors import CORRECT, ERRORS, Compared, Errors
from ..results.drawing import draw_boxes, draw_legend, draw_segmentation, painted_classes
from ..results.records import coco_fields
from ..runtime.predictor import check_score_thr
from ..tooling import charts, pages
from ..tooling.command import UserError, one_line
from ..tooling.rasters import ReadError
from .config.parts import as_list, data_of, dataset_meta, kind_of
from .datasets.checks import annotation_file, image_folder
from .datasets.coco import indexed_coco, is_number, usable_content
from .datasets.images import shown_image
from .datasets.label_maps import IGNORED_LABEL, label_map_reader
from .inference.trained import SCORE_THR

COLORS = '#2f6fde', '#e88c1e', '#d1343e'  # of curves
GREEN, ORANGE, CRIMSON = (40, 167, 69), (255, 159, 28), (230, 57, 70)
SIZES = ('all', 'small', 'medium', 'large')  # COCO's areas: below 32 x 32 pixels, 96 x 96, above
LISTED = 20  # confusions in a table


class Analysis(NamedTuple):
    """The results of a test, analysed."""

    numbers: dict[str, Any]  # as JSON values
    sections: list[pages.Markup]  # of an HTML page


def analyse_results(cfg: Config, path: Path, score_thr: Optional[float], worst: int) -> Analysis:
    """Analyse the results of a test, in a file of cpvt test --out or as COCO results; for the other
    arguments, see cpvt analyse."""
    datasets, is_segmentor = data_of(cfg, 'test'), cfg.default_scope == 'mmseg'
    kinds = [kind_of(dataset) for dataset in datasets]
    if len(datasets) != 1 or not is_segmentor and kinds != ['CocoDataset']:
        raise UserError(f'the test data must be one CocoDataset or one of label maps, got {kinds}')
    (dataset,) = datasets
    if is_segmentor:
        check_score_thr(score_thr, 'labels')
        return analyse_label_maps(cfg, dataset, path, worst)
    score_thr = SCORE_THR if score_thr is None else score_thr
    truth = ground_truth(dataset)
    meta = dataset_meta(cfg, {})
    names = {truth.cats[c]['name']: c for c in truth.getCatIds(catNms=list(meta['classes']))}
    if absent := [name for name in meta['classes'] if name not in names]:
        raise UserError(f'{annotation_file(dataset)} has no category {absent[0]!r}')
    results = read_detections(path, truth, list(names.values()))
    analysis = Analysis({}, [])
    for metric in metrics_of(cfg, results):
        evaluation = evaluate_detections(truth, results, names, metric)
        add_detections(analysis, evaluation, metric, score_thr)
    note = (
        f'Of detections with a score of at least {score_thr}: green is correct, red is wrong, '
        'orange is missed.'
    )
    pictures = pages.contact_sheet(
        worst_detections(evaluation, truth, image_folder(dataset), score_thr, worst)
    )
    analysis.sections.append(pages.html_section('The images with the most errors', note, pictures))
    return analysis


# Reading


class SafeUnpickler(pickle.Unpickler):
    """Reads results of mm without executing code from the file."""

    ALLOWED = {
        'collections': {'OrderedDict'},
        'torch._utils': {'_rebuild_tensor_v2'},
        'numpy': {'dtype', 'ndarray'},
        'numpy.core.multiarray': {'_reconstruct', 'scalar'},
        'numpy.core.numeric': {'_frombuffer'},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ('torch.storage', '_load_from_bytes'):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if name not in self.ALLOWED.get(module.replace('numpy._core', 'numpy.core'), ()):
            raise pickle.UnpicklingError(f'it holds a {module}.{name}')
        return super().find_class(module, name)


def read_list(path: Path) -> list[dict]:
    """The predictions that cpvt test --out wrote, or COCO results (JSON)."""
    try:
        with path.open('rb') as file:
            found = json.load(file) if path.suffix == '.json' else SafeUnpickler(file).load()
    except Exception as error:  # pickle raises many kinds
        raise UserError(f'cannot read {path}: {one_line(error, 120)}') from error
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise UserError(f'{path} must hold a list of predictions')
    return found


def ground_truth(dataset: dict) -> COCO:
    path = annotation_file(dataset)
    content, defects = usable_content(path)
    if problems := [problem for problem in defects.problems() if problem.is_error]:
        raise UserError(
            f'{path} has {problems[0]}; see cpvt check-data. If the test left them out with '
            '--skip-bad, name the rest: --cfg-options test_dataloader.dataset.ann_file=GOOD.json'
        )
    return indexed_coco(content)


def another_data_set(path: Path, missing: str) -> UserError:
    return UserError(f'{path} has results for another data set: there is no {missing}')


def read_detections(path: Path, truth: COCO, categories: Sequence[int]) -> list[dict]:
    """Detections as COCO results, from such a file or one of cpvt test --out."""
    results = read_list(path)
    if path.suffix != '.json':
        results = [r for sample in results for r in as_coco(sample, path, truth, categories)]
    for number, result in enumerate(results):
        box = result.get('bbox') or []
        values = [result.get('score'), *(box if isinstance(box, list) else [box])]
        has_shape = len(values) == 5 or not box and result.get('segmentation')
        if not has_shape or not all(map(is_number, values)):
            raise UserError(
                f'{path}: result {number} must have a finite score and a bbox of four numbers or '
                f'a segmentation, got {values}'[:300]
            )
        for key, known in (('image_id', truth.imgs), ('category_id', truth.cats)):
            if not isinstance(result.get(key), (int, str)) or result[key] not in known:
                raise another_data_set(path, f'{key} {result.get(key)!r}')
    return results


def as_coco(
    sample: dict, path: Path, truth: COCO, categories: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The detections in a sample of cpvt test --out as COCO results."""
    found, number = prediction_in(sample, 'pred_instances', path), sample['img_id']
    name = Path(sample['img_path']).name
    if number not in truth.imgs or Path(truth.imgs[number]['file_name']).name != name:
        raise another_data_set(path, f'image {number} {name}')
    boxes, scores, labels = (found[key].tolist() for key in ('bboxes', 'scores', 'labels'))
    if labels and max(labels) >= len(categories):
        raise another_data_set(path, f'label {max(labels)}')
    masks = found.get('masks') or [None] * len(scores)
    for box, score, label, mask in zip(boxes, scores, labels, masks):
        fields = coco_fields({'box': box, 'score': score, 'mask': mask})
        yield {'image_id': number, 'category_id': categories[label], **fields}


def prediction_in(sample: dict, key: str, path: Path) -> dict:
    if key not in sample:
        raise UserError(f'{path} has no {key}; it holds {", ".join(sorted(sample))[:120]}')
    return sample[key]


def metrics_of(cfg: Config, results: Sequence[dict]) -> list[str]:
    """bbox, segm or both: what the config evaluates and the results have."""
    evaluators = as_list(cfg.get('test_evaluator'))
    wanted = {name for metric in evaluators for name in as_list(metric.get('metric'))}
    keys = {'bbox': 'bbox', 'segm': 'segmentation'}
    present = [name for name, key in keys.items() if all(r.get(key) for r in results)]
    return [name for name in present if name in wanted and results] or [*present, 'segm'][:1]


# Detections


class Evaluation(NamedTuple):
    """Detections evaluated by pycocotools, and compared with the objects at an IoU of 0.5."""

    classes: list[str]
    precision: np.ndarray  # (10, 101, K, 4) by IoU, recall, class and size; -1 without objects
    images: list[Compared]
    crowds: int  # annotations that are ignored


def evaluate_detections(
    truth: COCO, results: Sequence[dict], names: dict[str, int], metric: str
) -> Evaluation:
    """Evaluate COCO results by a metric, bbox or segm; `names` has the category of each class."""
    annotations = [{**r, 'id': i, 'iscrowd': 0} for i, r in enumerate(results, 1)]
    for number, annotation in enumerate(annotations):
        if metric == 'segm':
            mask = run_lengths_of(truth, annotation, f'result {number}')
            annotation |= {'segmentation': mask, 'area': float(mask_utils.area(mask))}
            annotation['bbox'] = mask_utils.toBbox(mask).tolist()
        else:
            annotation['area'] = annotation['bbox'][2] * annotation['bbox'][3]
    for annotation in truth.anns.values() if metric == 'segm' else ():
        run_lengths_of(truth, annotation, f'annotation {annotation["id"]}')
    found = indexed_coco({**truth.dataset, 'annotations': annotations})
    coco_eval = COCOeval(truth, found, metric)
    categories = list(names.values())
    coco_eval.params.catIds = categories
    with redirect_stdout(io.StringIO()):
        coco_eval.evaluate()
        coco_eval.accumulate()
    # (10, 101, K, 4); the categories are sorted inside
    order = np.searchsorted(coco_eval.params.catIds, categories)
    precision = coco_eval.eval['precision'][..., -1][:, :, order]
    images = list(compared_images(coco_eval, truth, found, categories, metric))
    crowds = sum(annotation['iscrowd'] for annotation in truth.anns.values())
    return Evaluation(list(names), precision, images, crowds)


def run_lengths_of(truth: COCO, annotation: dict, name: str) -> dict[str, Any]:
    """The mask of an annotation or a result, which must have the size of its image."""
    image = truth.imgs[annotation['image_id']]
    try:
        mask = truth.annToRLE(annotation)
        mask_utils.decode(mask)
    except Exception:  # pycocotools raises many kinds
        mask = {'size': None}
    if mask['size'] != [image['height'], image['width']]:
        raise UserError(
            f'{name} must have a mask of its image, {image["height"]} x {image["width"]} pixels, '
            'for the metric segm; without masks, set test_evaluator.metric=bbox'
        )
    return mask


def compared_images(
    coco_eval: COCOeval, truth: COCO, found: COCO, categories: Sequence[int], metric: str
) -> Iterator[Compared]:
    """The detections of each image with the matches of pycocotools at an IoU of 0.5."""
    image_ids, label_of = coco_eval.params.imgIds, {c: i for i, c in enumerate(categories)}
    shape_of = truth.annToRLE if metric == 'segm' else itemgetter('bbox')
    evaluated = np.array(coco_eval.evalImgs, object).reshape(len(categories), -1, len(image_ids))
    by_image = tqdm(evaluated[:, 0].T, 'errors', leave=False, delay=3)  # of all sizes
    for image, of_categories in zip(image_ids, by_image):
        matched, objects = {}, []
        for result in filter(None, of_categories):
            matches = zip(result['dtIds'], result['dtIgnore'][0], result['dtMatches'][0])
            matched |= {key: match for key, ignored, match in matches if not ignored}
            truths = zip(result['gtIds'], result['gtIgnore'])
            objects += [truth.anns[key] for key, ignored in truths if not ignored]
        detections = sorted((found.anns[key] for key in matched), key=lambda a: -a['score'])
        place = {annotation['id']: j for j, annotation in enumerate(objects)}
        shapes = (list(map(shape_of, kind)) for kind in (detections, objects))
        iou = mask_utils.iou(*shapes, [0] * len(objects)) if detections and objects else []
        yield Compared(
            image,
            np.array([label_of[a['category_id']] for a in detections], int),
            np.array([a['score'] for a in detections], float),
            np.reshape([a['bbox'] for a in detections], (-1, 4)),
            np.array([place.get(int(matched[a['id']]), -1) for a in detections], int),
            np.array([label_of[a['category_id']] for a in objects], int),
            np.reshape([a['bbox'] for a in objects], (-1, 4)),
            np.reshape(iou, (len(detections), len(objects))),
        )


def averages(precision: np.ndarray) -> dict[str, float]:
    """The averages that pycocotools reports of precisions (10, 101, ..., 4), see `Evaluation`."""

    def mean(values: np.ndarray) -> float:
        values = values[values > -1]
        return float(values.mean()) if values.size else math.nan

    by_iou = {'AP': slice(None), 'AP50': 0, 'AP75': 5}
    found = {name: mean(precision[at, ..., 0]) for name, at in by_iou.items()}
    return found | {f'AP {size}': mean(precision[..., i]) for i, size in enumerate(SIZES) if i}


def add_detections(
    analysis: Analysis, evaluation: Evaluation, metric: str, score_thr: float
) -> None:
    """Add the numbers and sections of one metric."""
    classes, precision, images, crowds = evaluation
    count = len(classes)
    kind = {'bbox': 'Boxes', 'segm': 'Masks'}[metric]
    errors = detection_errors.find_errors(images, count)
    overall = averages(precision)
    labels, scores, correct = (
        np.concatenate([[], *values])
        for values in zip(*[(c.labels, c.scores, c.match >= 0) for c in images])
    )
    objects = sum(np.bincount(c.truth, minlength=count) for c in images)
    rows = []
    for label, name in enumerate(classes):
        mine = labels == label
        threshold, f1 = detection_errors.best_threshold(scores[mine], correct[mine], objects[label])
        row = {'class': name, 'objects': int(objects[label]), 'detections': int(mine.sum())}
        row |= averages(precision[:, :, label])
        rows.append({**row, 'best score': threshold, 'F1': f1})
    matrix = detection_errors.confusion_of(images, count, score_thr)
    analysis.numbers[metric] = {
        **overall,
        'classes': rows,
        'errors': {n: {'number': errors.counts[n], 'AP50': errors.costs[n]} for n in ERRORS},
        'confusion': matrix.tolist(),
    }
    about = (
        f'{len(images)} images, {int(objects.sum())} objects, {len(scores)} detections; '
        f'{crowds} crowd annotations are ignored.'
    )
    shown = {name: '–' if math.isnan(v) else f'{100 * v:.1f}' for name, v in overall.items()}
    note = (
        'AP from 0 to 1, as pycocotools computes it; small is an area below 32 × 32 pixels, large '
        'above 96 × 96. The best score is the threshold with the highest F1 at an IoU of 0.5. '
        'Click on a head to sort.'
    )
    table = pages.html_table(list(rows[0]), [list(row.values()) for row in rows])
    confused = (
        f'Detections with a score of at least {score_thr} and an IoU of at least 0.5. Last column: '
        'missed objects; last row: false detections.'
    )
    new = [
        pages.html_section(kind, about, pages.cards(shown)),
        pages.html_section(f'{kind}: classes', note, table),
        error_section(kind, errors, evaluation),
        confusion_section(f'{kind}: confusion', matrix, [*classes, 'nothing'], confused),
    ]
    analysis.sections.extend(new)


def error_section(kind: str, errors: Errors, evaluation: Evaluation) -> str:
    def curve(
        name: str, values: np.ndarray, color: str = charts.GRAY, width: float = 1
    ) -> charts.Curve:
        exists = values > -1  # (101, K)
        means = np.where(exists, values, 0).sum(1) / np.maximum(exists.sum(1), 1)
        return charts.Curve(name, list(zip(detection_errors.RECALLS, means)), color, width)

    precision = evaluation.precision[..., 0]
    curves = [
        curve(name, precision[0, :, [label]].T)
        for label, name in enumerate(evaluation.classes)
        if (precision[0, :, label] > -1).any()
    ]
    for name, index, color in zip(('IoU 0.5', 'IoU 0.75', 'IoU 0.9'), (0, 5, 8), COLORS):
        curves.append(curve(name, precision[index], color, 2.5))
    costs = {f'{name} ({errors.counts[name]})': 100 * errors.costs[name] for name in ERRORS}
    return pages.html_section(
        f'{kind}: errors',
        'Left: precision and recall, the mean over the classes; gray lines are single classes at '
        'an IoU of 0.5. Right: the kinds of errors of TIDE, by the AP50 (in points) that would be '
        'gained without them.',
        pages.side_by_side(
            charts.line_chart(curves, 'recall', 'precision'),
            charts.bar_chart(costs, 'AP50 lost by kind of error (number)', '{:.1f}'.format),
        ),
    )


def confusion_section(title: str, matrix: np.ndarray, names: Sequence[str], note: str) -> str:
    confused = Counter({at: int(n) for at, n in np.ndenumerate(matrix) if n and at[0] != at[1]})
    rows = [
        (names[i], names[j], n, f'{n / matrix[i].sum():.1%}')
        for (i, j), n in confused.most_common(LISTED)
    ]
    table = pages.html_table(['true', 'predicted', 'number', 'share of true'], rows)
    heat_map = charts.heat_map(matrix, names, names, 'true', 'predicted')
    return pages.html_section(title, note, pages.side_by_side(heat_map, table))


def worst_detections(
    evaluation: Evaluation, truth: COCO, root: Path, score_thr: float, count: int
) -> list[tuple[Image.Image, str]]:
    """Pictures of the images with the most errors, with captions."""

    def errors_in(compared: Compared) -> tuple[np.ndarray, np.ndarray]:
        shown = compared.scores >= score_thr
        missed = np.ones(len(compared.truth), bool)
        missed[compared.match[shown & (compared.match >= 0)]] = False
        return shown & (compared.match < 0), missed

    ranked = sorted(evaluation.images, key=lambda c: -sum(map(np.sum, errors_in(c))))
    pictures = []
    for compared in ranked[:count]:
        wrong, missed = errors_in(compared)
        if not wrong.any() and not missed.any():
            break
        types, _ = detection_errors.error_types(compared)
        record = truth.imgs[compared.image]
        name, size = record['file_name'], (record['height'], record['width'])
        image, problem = shown_or_blank(root / name, size)
        image, factor = pages.reduced(image)
        frames = Image.fromarray(image)
        for box in compared.boxes[(compared.scores >= score_thr) & (types == CORRECT)]:
            ImageDraw.Draw(frames).rectangle(list(corners(box) * factor), None, GREEN, 2)
        classes = evaluation.classes
        texts = [
            f'{classes[compared.labels[i]]} {compared.scores[i]:.2f}, {ERRORS[types[i]]}'
            for i in np.flatnonzero(wrong)
        ]
        texts += [f'missed {classes[label]}' for label in compared.truth[missed]]
        boxes = corners(np.concatenate([compared.boxes[wrong], compared.truth_boxes[missed]]))
        colors = [CRIMSON] * wrong.sum() + [ORANGE] * missed.sum()
        numbers = np.arange(len(texts))
        drawn = draw_boxes(np.array(frames), boxes * factor, numbers, None, texts, colors)
        caption = f'{name}: {wrong.sum()} wrong, {missed.sum()} missed{problem}'
        pictures.append((drawn, caption))
    return pictures


def shown_or_blank(path: Path, size: tuple[int, int]) -> tuple[np.ndarray, str]:
    """An image to draw on, or a black one of a size and why the image cannot be read."""
    try:
        return shown_image(path), ''
    except ReadError as error:
        return np.zeros((*size, 3), np.uint8), f'; {error}'


def corners(boxes: np.ndarray) -> np.ndarray:
    """(..., 4) x1, y1, x2, y2 from x, y, width, height."""
    return np.concatenate([boxes[..., :2], boxes[..., :2] + np.maximum(boxes[..., 2:], 0)], -1)


# Label maps


def analyse_label_maps(cfg: Config, dataset: dict, path: Path, worst: int) -> Analysis:
    """Analyse the results of a semantic segmentor."""
    meta = dataset_meta(cfg, {})
    classes, palette = list(meta['classes']), meta['palette']
    count = len(classes)
    infos, load = label_map_reader(dataset, cfg.default_scope)
    matrix, ranked, seen = np.zeros((count, count), np.int64), [], set()
    for sample in tqdm(read_list(path), 'comparing label maps', leave=False, delay=3):
        found = prediction_in(sample, 'pred_sem_seg', path)
        image = Path(sample['img_path']).resolve()
        if image not in infos:
            raise another_data_set(path, f'image {image.name}')
        labels = np.asarray(found['data'])
        labels, truth = labels.reshape(labels.shape[-2:]), load(infos[image])
        if labels.shape != truth.shape:
            raise UserError(
                f'{path}: the result for {image.name} has {labels.shape[0]} x {labels.shape[1]} '
                f'pixels, but its label map has {truth.shape[0]} x {truth.shape[1]}'
            )
        confused = pixel_confusion(truth, labels, count)
        matrix += confused
        seen.add(image)
        ranked.append((1 - accuracy(confused), image, labels.astype(np.uint16)))
        ranked = sorted(ranked, key=lambda item: -item[0])[:worst]
    hits, truths, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    with np.errstate(invalid='ignore'):  # nan for classes that do not occur
        iou, recall, precision = hits / (truths + predicted - hits), hits / truths, hits / predicted
    overall = {'mIoU': nan_mean(iou), 'mAcc': nan_mean(recall), 'aAcc': accuracy(matrix)}
    head = ['class', 'IoU', 'Acc', 'precision', 'true pixels', 'predicted pixels']
    columns = [values.tolist() for values in (iou, recall, precision, truths, predicted)]
    rows = list(zip(classes, *columns))
    shown = {name: f'{100 * value:.2f}' for name, value in overall.items()}
    best = np.argsort(-np.nan_to_num(iou), kind='stable')
    bars = {classes[i]: 100 * float(np.nan_to_num(iou[i])) for i in best}
    chart = charts.bar_chart(bars, 'IoU', '{:.1f}'.format)
    about = f'{len(seen)} of the {len(infos)} images of the data set have a result'
    note = 'IoU and accuracy (the share of true pixels that is found) as mmseg computes them.'
    sections = [
        pages.html_section('Label maps', about, pages.cards(shown)),
        pages.html_section(
            'Classes', note, pages.side_by_side(pages.html_table(head, rows), chart)
        ),
        confusion_section('Confusion', matrix, classes, 'Pixels of each class.'),
    ]
    if ranked:
        pictures = [
            worst_label_map(image, labels, load(infos[image]), error, classes, palette)
            for error, image, labels in ranked
        ]
        note = 'Image, truth, prediction, and wrong pixels in red.'
        used = sorted({i for _, _, labels in ranked for i in painted_classes(labels, classes)})
        legend = draw_legend([classes[i] for i in used], [palette[i] for i in used], 1000, 14)
        parts = pages.wide_picture(legend), pages.contact_sheet(pictures)
        sections.append(pages.html_section('The worst images', note, *parts))
    by_class = [dict(zip(head, row)) for row in rows]
    numbers = {**overall, 'classes': by_class, 'confusion': matrix.tolist()}
    return Analysis({'labels': numbers}, sections)


def pixel_confusion(truth: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Pixels by true class (row) and predicted class (column), without ignored ones."""
    valid = (truth != IGNORED_LABEL) & (truth < classes) & (labels < classes)
    pairs = truth[valid].astype(np.int64) * classes + labels[valid]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def accuracy(matrix: np.ndarray) -> float:
    return float(matrix.trace() / matrix.sum()) if matrix.sum() else math.nan


def nan_mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def worst_label_map(
    path: Path,
    labels: np.ndarray,
    truth: np.ndarray,
    error: float,
    classes: Sequence[str],
    palette: Sequence[tuple[int, int, int]],
) -> tuple[Image.Image, str]:
    """Four pictures in one, with a caption."""
    image, problem = shown_or_blank(path, truth.shape)
    small, _ = pages.reduced(image)
    height, width = small.shape[:2]
    rows = np.arange(height) * len(truth) // height
    columns = np.arange(width) * truth.shape[1] // width
    truth, labels = (values[rows][:, columns] for values in (truth, labels))
    wrong = (truth != labels) & (truth != IGNORED_LABEL)
    errors = np.where(wrong[..., None], CRIMSON, small * 0.4 + 140).astype(np.uint8)
    drawn = [
        np.asarray(draw_segmentation(small, values, classes, palette, legend=False, scale=1))
        for values in (truth, labels)
    ]
    both = np.concatenate([np.hstack([small, drawn[0]]), np.hstack([drawn[1], errors])])
    return Image.fromarray(both), f'{path.name}: {error:.1%} of the pixels are wrong{problem}'
