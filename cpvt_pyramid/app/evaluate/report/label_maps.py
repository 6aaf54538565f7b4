"""The analysis of label maps: IoU and accuracy, confusion, the worst images."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
from PIL import Image

from ...images.label_maps import IGNORED, ious_of_classes, nearest_at, pixel_confusion
from ...predictions.drawing import draw_legend, draw_segmentation, painted_classes
from ...tooling import charts, pages
from ...tooling.command import UserError
from .common import Analysis, confusion_section, shown_or_blank

CRIMSON = (230, 57, 70)
HEAD = ['class', 'IoU', 'Acc', 'precision', 'true pixels', 'predicted pixels']


class ComparedImage(NamedTuple):
    """A predicted label map and the true one, (H, W)."""

    path: Path
    labels: np.ndarray
    truth: np.ndarray
    confusion: np.ndarray  # pixels by true class (row) and predicted class (column)

    @property
    def error(self) -> float:
        """The share of wrong pixels."""
        return 1 - accuracy(self.confusion)


def analyse_label_maps(
    images: Iterable[ComparedImage],
    count: int,
    classes: Sequence[str],
    palette: Sequence[tuple[int, int, int]],
    worst: int,
    known: Optional[Sequence[int]] = None,
) -> Analysis:
    """Analyse the label maps of a semantic segmentor.

    Args:
        images: predicted and true ones.
        count: of the images in the data set.
        classes: names.
        palette: their colours.
        worst: how many images are shown.
        known: labels of the classes that the data have; None: all.
    """
    matrix = np.zeros((len(classes), len(classes)), np.int64)
    ranked: list[ComparedImage] = []
    seen = set()
    for image in images:
        matrix += image.confusion
        seen.add(image.path)
        ranked = sorted([*ranked, image], key=lambda image: -image.error)[:worst]

    overall, by_class = metrics_of_classes(matrix, classes, known)
    shown = {name: f'{100 * value:.2f}' for name, value in overall.items()}
    about = f'images of the data set with a result: {len(seen)} of {count}'
    note = 'IoU and accuracy (the share of true pixels that is found) as mmseg computes them.'
    table = pages.html_table(HEAD, [list(row.values()) for row in by_class])
    sections = [
        pages.html_section('Segmentation masks', about, pages.cards(shown)),
        pages.html_section('Classes', note, pages.side_by_side(table, iou_chart(by_class))),
        confusion_section('Confusion', matrix, classes, 'Pixels of each class.'),
    ]
    if ranked:
        sections.append(worst_section(ranked, classes, palette))
    numbers = {**overall, 'classes': by_class, 'confusion': matrix.tolist()}
    return Analysis({'labels': numbers}, sections)


def compared_label_map(
    path: Path, labels: np.ndarray, truth: np.ndarray, classes: int
) -> ComparedImage:
    """A predicted label map (H, W) next to the true one.

    Raises:
        UserError: they differ in size.
    """
    if labels.shape != truth.shape:
        height, width = labels.shape
        raise UserError(
            f'the prediction for {path.name} has {height} x {width} pixels, but its '
            f'segmentation mask has {truth.shape[0]} x {truth.shape[1]}'
        )
    confusion = pixel_confusion(truth, labels, classes)
    return ComparedImage(path, labels.astype(np.uint16), truth, confusion)


def metrics_of_classes(
    matrix: np.ndarray, classes: Sequence[str], known: Optional[Sequence[int]] = None
) -> tuple[dict[str, float], list[dict]]:
    """mIoU, mAcc and aAcc of a confusion matrix, and a row for each class; nan for classes that do
    not occur, and for those that are not known."""
    hits = matrix.diagonal()
    true_pixels = matrix.sum(1)
    predicted_pixels = matrix.sum(0)
    iou = ious_of_classes(matrix)
    with np.errstate(invalid='ignore'):
        recall = hits / true_pixels
        precision = hits / predicted_pixels
    if known is not None:
        iou[[label for label in range(len(classes)) if label not in known]] = math.nan
    overall = {'mIoU': nan_mean(iou), 'mAcc': nan_mean(recall), 'aAcc': accuracy(matrix)}
    columns = [x.tolist() for x in (iou, recall, precision, true_pixels, predicted_pixels)]
    return overall, [dict(zip(HEAD, row)) for row in zip(classes, *columns)]


def iou_chart(by_class: Sequence[dict]) -> pages.Markup:
    """The IoU of each class, best first."""
    bars = {row['class']: 100 * float(np.nan_to_num(row['IoU'])) for row in by_class}
    best_first = dict(sorted(bars.items(), key=lambda bar: -bar[1]))
    return charts.bar_chart(best_first, 'IoU', '{:.1f}'.format)


def accuracy(matrix: np.ndarray) -> float:
    return float(matrix.trace() / matrix.sum()) if matrix.sum() else math.nan


def nan_mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def worst_section(
    images: Sequence[ComparedImage],
    classes: Sequence[str],
    palette: Sequence[tuple[int, int, int]],
) -> pages.Markup:
    """Pictures of images, with a legend of the classes that were found in them."""
    used = set()
    for image in images:
        used.update(painted_classes(image.labels, classes))
    labels = sorted(used)
    legend = draw_legend([classes[i] for i in labels], [palette[i] for i in labels], 1000, 14)
    pictures = [worst_label_map(image, classes, palette) for image in images]
    return pages.html_section(
        'The worst images',
        'Image, truth, prediction, and wrong pixels in red.',
        pages.wide_picture(legend),
        pages.contact_sheet(pictures),
    )


def worst_label_map(
    compared: ComparedImage, classes: Sequence[str], palette: Sequence[tuple[int, int, int]]
) -> tuple[Image.Image, str]:
    """Four pictures in one, with a caption."""
    image, problem = shown_or_blank(compared.path, compared.truth.shape)
    image, _ = pages.reduced(image)
    truth = nearest_at(compared.truth, image.shape[:2])
    labels = nearest_at(compared.labels, image.shape[:2])
    wrong = (truth != labels) & (truth != IGNORED)
    errors = np.where(wrong[..., None], CRIMSON, image * 0.4 + 140).astype(np.uint8)

    def painted(values: np.ndarray) -> np.ndarray:
        return np.asarray(draw_segmentation(image, values, classes, palette, legend=False, scale=1))

    above = np.hstack([image, painted(truth)])
    below = np.hstack([painted(labels), errors])
    caption = f'{compared.path.name}: {compared.error:.1%} of the pixels are wrong{problem}'
    return Image.fromarray(np.concatenate([above, below])), caption
