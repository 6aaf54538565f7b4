"""The analysis of detections: COCO's numbers, kinds of errors, confusion, the worst images."""

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tqdm import tqdm

from ...predictions.average_precision import COUNTED as COUNTED_IN_AP
from ...predictions.average_precision import evaluate_coco, mean_precision
from ...predictions.drawing import draw_boxes
from ...predictions.kinds import SCORE_THR
from ...tooling import charts, pages
from ...tooling.report import amount
from . import detection_errors
from .common import Analysis, confusion_section, shown_or_blank
from .detection_errors import CORRECT, ERRORS, Compared, Errors

COLORS = '#2f6fde', '#e88c1e', '#d1343e'  # of curves
GREEN, ORANGE, CRIMSON = (40, 167, 69), (255, 159, 28), (230, 57, 70)
# Detections of an image and class that count: in AP, and in the other averages of MMDetection
COUNTED = (COUNTED_IN_AP, 1000)
SIZES = ('all', 'small', 'medium', 'large')  # COCO's areas: below 32 x 32 pixels, 96 x 96, above


def analyse_detections(
    truth: COCO,
    results: Sequence[dict],
    categories: dict[str, int],
    metrics: Sequence[str],
    folder: Path,
    worst: int,
) -> Analysis:
    """Analyse detections.

    Args:
        truth: the objects.
        results: the detections, in COCO's format.
        categories: that of each class.
        metrics: bbox, segm or both.
        folder: of the images.
        worst: how many images are shown, those with the most errors.
    """
    analysis = Analysis({}, [])
    for metric in metrics:
        evaluation = evaluate_detections(truth, results, categories, metric)
        add_detections(analysis, evaluation, metric, SCORE_THR)
    note = (
        f'Of detections with a score of at least {SCORE_THR}: green is correct, red is wrong, '
        'orange is missed.'
    )
    pictures = pages.contact_sheet(worst_detections(evaluation, truth, folder, SCORE_THR, worst))
    analysis.sections.append(pages.html_section('The images with the most errors', note, pictures))
    return analysis


class Evaluation(NamedTuple):
    """Detections evaluated by pycocotools, and compared with the objects at an IoU of 0.5."""

    classes: list[str]
    # (10, 101, K, 4, 2) by IoU, recall, class, size and `COUNTED`; -1 without objects
    precision: np.ndarray
    images: list[Compared]
    crowds: int  # annotations that are ignored


def evaluate_detections(
    truth: COCO, results: Sequence[dict], names: dict[str, int], metric: str
) -> Evaluation:
    """Evaluate COCO results by a metric, bbox or segm; `names` has the category of each class."""
    categories = list(names.values())
    coco = evaluate_coco(truth, results, categories, metric, COUNTED)
    images = list(compared_images(coco.matches, truth, coco.found, categories, metric))
    crowds = sum(annotation['iscrowd'] for annotation in truth.anns.values())
    return Evaluation(list(names), coco.precision, images, crowds)


def compared_images(
    coco_eval: COCOeval, truth: COCO, found: COCO, categories: Sequence[int], metric: str
) -> Iterator[Compared]:
    """The detections of each image with the matches of pycocotools at an IoU of 0.5."""
    image_ids = coco_eval.params.imgIds
    evaluated = np.array(coco_eval.evalImgs, object).reshape(len(categories), -1, len(image_ids))
    of_all_sizes = evaluated[:, 0].T  # (images, categories)
    progress = tqdm(of_all_sizes, 'errors', leave=False, delay=3)
    for image, by_category in zip(image_ids, progress):
        match_of: dict[int, int] = {}  # a detection's id: that of its object, or 0
        objects = []
        for result in by_category:
            if result is None:  # neither objects nor detections of the category
                continue
            found_matches = zip(result['dtIds'], result['dtIgnore'][0], result['dtMatches'][0])
            match_of |= {key: match for key, ignored, match in found_matches if not ignored}
            truths = zip(result['gtIds'], result['gtIgnore'])
            objects += [truth.anns[key] for key, ignored in truths if not ignored]
        detections = sorted((found.anns[key] for key in match_of), key=lambda a: -a['score'])
        matches = [int(match_of[detection['id']]) for detection in detections]
        yield compared_image(image, detections, objects, matches, categories, truth, metric)


def compared_image(
    image: int,
    detections: Sequence[dict],
    objects: Sequence[dict],
    matches: Sequence[int],
    categories: Sequence[int],
    truth: COCO,
    metric: str,
) -> Compared:
    """The detections and objects of an image; `matches` has the id of each detection's object."""
    label_of = {category: label for label, category in enumerate(categories)}
    place_of = {annotation['id']: place for place, annotation in enumerate(objects)}
    shape_of = truth.annToRLE if metric == 'segm' else itemgetter('bbox')
    iou = np.zeros((len(detections), len(objects)))
    if iou.size:
        not_crowds = [0] * len(objects)
        found = [shape_of(detection) for detection in detections]
        iou = mask_utils.iou(found, [shape_of(annotation) for annotation in objects], not_crowds)
    return Compared(
        image,
        labels=np.array([label_of[a['category_id']] for a in detections], int),
        scores=np.array([a['score'] for a in detections], float),
        boxes=np.reshape([a['bbox'] for a in detections], (-1, 4)),
        match=np.array([place_of.get(match, -1) for match in matches], int),
        truth=np.array([label_of[a['category_id']] for a in objects], int),
        truth_boxes=np.reshape([a['bbox'] for a in objects], (-1, 4)),
        iou=iou,
    )


def averages(precision: np.ndarray) -> dict[str, float]:
    """The averages that MMDetection reports of precisions (10, 101, ..., 4, 2), see
    `Evaluation`."""

    found = {
        'AP': mean_precision(precision[..., 0, 0]),
        'AP50': mean_precision(precision[0, ..., 0, 1]),
        'AP75': mean_precision(precision[5, ..., 0, 1]),
    }
    for i, size in enumerate(SIZES[1:], 1):
        found[f'AP {size}'] = mean_precision(precision[..., i, 1])
    return found


def add_detections(
    analysis: Analysis, evaluation: Evaluation, metric: str, score_thr: float
) -> None:
    """Add the numbers and sections of one metric."""
    classes = evaluation.classes
    images = evaluation.images
    objects = np.zeros(len(classes), int)
    for compared in images:
        objects += np.bincount(compared.truth, minlength=len(classes))
    overall = averages(evaluation.precision)
    rows = rows_of_classes(evaluation, objects)
    errors = detection_errors.find_errors(images, len(classes))
    matrix = detection_errors.confusion_of(images, len(classes), score_thr)
    analysis.numbers[metric] = {
        **overall,
        'classes': rows,
        'errors': {n: {'number': errors.counts[n], 'AP50': errors.costs[n]} for n in ERRORS},
        'confusion': matrix.tolist(),
    }
    kind = {'bbox': 'Boxes', 'segm': 'Masks'}[metric]
    detections = sum(len(compared.labels) for compared in images)
    about = (
        f'{amount(len(images), "image")}, {amount(int(objects.sum()), "object")}, '
        f'{amount(detections, "detection")}; crowd annotations, which are ignored: '
        f'{evaluation.crowds}.'
    )
    shown = {name: '–' if math.isnan(v) else f'{100 * v:.1f}' for name, v in overall.items()}
    note = (
        f'Numbers are from 0 to 1, as MMDetection computes them: AP of the {COUNTED[0]} best '
        f'detections of an image and class, other averages of {COUNTED[1]}. Small is an area below '
        '32 × 32 pixels, large above 96 × 96. The best score is the threshold with the highest F1 '
        'at an IoU of 0.5. Click on a head to sort.'
    )
    table = pages.html_table(list(rows[0]), [list(row.values()) for row in rows])
    confused = (
        f'Detections with a score of at least {score_thr} and an IoU of at least 0.5. Last column: '
        'missed objects; last row: false detections.'
    )
    analysis.sections.extend(
        [
            pages.html_section(kind, about, pages.cards(shown)),
            pages.html_section(f'{kind}: classes', note, table),
            error_section(kind, errors, evaluation),
            confusion_section(f'{kind}: confusion', matrix, [*classes, 'nothing'], confused),
        ]
    )


def rows_of_classes(evaluation: Evaluation, objects: np.ndarray) -> list[dict[str, Any]]:
    """For each class, the number of its objects, given, and of its detections, and its averages."""
    images = evaluation.images
    labels = np.concatenate([np.zeros(0), *(compared.labels for compared in images)])
    scores = np.concatenate([np.zeros(0), *(compared.scores for compared in images)])
    correct = np.concatenate([np.zeros(0), *(compared.match >= 0 for compared in images)])
    rows = []
    for label, name in enumerate(evaluation.classes):
        mine = labels == label
        threshold, f1 = detection_errors.best_threshold(scores[mine], correct[mine], objects[label])
        row = {'class': name, 'objects': int(objects[label]), 'detections': int(mine.sum())}
        row |= averages(evaluation.precision[:, :, label])
        rows.append({**row, 'best score': threshold, 'F1': f1})
    return rows


def error_section(kind: str, errors: Errors, evaluation: Evaluation) -> pages.Markup:
    def curve(
        name: str, values: np.ndarray, color: str = charts.GRAY, width: float = 1
    ) -> charts.Curve:
        exists = values > -1  # (101, K)
        means = np.where(exists, values, 0).sum(1) / np.maximum(exists.sum(1), 1)
        return charts.Curve(name, list(zip(detection_errors.RECALLS, means)), color, width)

    precision = evaluation.precision[..., 0, 1]
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


def worst_detections(
    evaluation: Evaluation, truth: COCO, root: Path, score_thr: float, count: int
) -> list[tuple[Image.Image, str]]:
    """Pictures of the images with the most errors, with captions."""

    def number_of_errors(compared: Compared) -> int:
        wrong, missed = errors_in(compared, score_thr)
        return int(wrong.sum() + missed.sum())

    ranked = sorted(evaluation.images, key=number_of_errors, reverse=True)
    with_errors = [compared for compared in ranked[:count] if number_of_errors(compared)]
    return [
        draw_errors(compared, evaluation.classes, truth.imgs[compared.image], root, score_thr)
        for compared in with_errors
    ]


def errors_in(compared: Compared, score_thr: float) -> tuple[np.ndarray, np.ndarray]:
    """Which detections with at least this score are wrong, and which objects they miss."""
    is_shown = compared.scores >= score_thr
    is_correct = compared.match >= 0
    missed = np.ones(len(compared.truth), bool)
    missed[compared.match[is_shown & is_correct]] = False
    return is_shown & ~is_correct, missed


def draw_errors(
    compared: Compared, classes: Sequence[str], record: dict, root: Path, score_thr: float
) -> tuple[Image.Image, str]:
    """A picture of an image's errors, with a caption; `record` is the image's in the data set."""
    name = record['file_name']
    image, problem = shown_or_blank(root / name, (record['height'], record['width']))
    image, factor = pages.reduced(image)

    types, _ = detection_errors.error_types(compared)
    correct = (compared.scores >= score_thr) & (types == CORRECT)
    picture = Image.fromarray(image)
    for box in corners(compared.boxes[correct]) * factor:
        ImageDraw.Draw(picture).rectangle(list(box), None, GREEN, 2)

    wrong, missed = errors_in(compared, score_thr)
    texts = []
    for i in np.flatnonzero(wrong):
        found = f'{classes[compared.labels[i]]} {compared.scores[i]:.2f}'
        texts.append(f'{found}, {ERRORS[types[i]]}')
    texts += [f'missed {classes[label]}' for label in compared.truth[missed]]
    kinds = np.repeat([0, 1], [wrong.sum(), missed.sum()])
    boxes = corners(np.concatenate([compared.boxes[wrong], compared.truth_boxes[missed]]))
    drawn = draw_boxes(
        np.array(picture),
        boxes * factor,
        kinds,
        None,
        ('wrong', 'missed'),
        (CRIMSON, ORANGE),
        names=texts,
    )
    return drawn, f'{name}: {wrong.sum()} wrong, {missed.sum()} missed{problem}'


def corners(boxes: np.ndarray) -> np.ndarray:
    """(..., 4) x1, y1, x2, y2 from x, y, width, height."""
    sides = np.maximum(boxes[..., 2:], 0)
    return np.concatenate([boxes[..., :2], boxes[..., :2] + sides], -1)
