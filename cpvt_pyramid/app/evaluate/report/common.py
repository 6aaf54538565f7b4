"""What the pages about detectors and segmentors share."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...data.images import shown_image
from ...images.rasters import ReadError
from ...tooling import charts, pages

LISTED = 20  # confusions in a table
WORST = 12  # images with the most errors, which are shown


class Analysis(NamedTuple):
    """The results of a test, analysed."""

    numbers: dict[str, Any]  # as JSON values
    sections: list[pages.Markup]  # of an HTML page


def confusion_section(
    title: str, matrix: np.ndarray, names: Sequence[str], note: str
) -> pages.Markup:
    """A confusion matrix, rows are true, and its largest entries."""
    confused: Counter[tuple[int, ...]] = Counter()
    for (true, predicted), number in np.ndenumerate(matrix):
        if number and true != predicted:
            confused[true, predicted] = int(number)
    rows = [
        (names[i], names[j], number, f'{number / matrix[i].sum():.1%}')
        for (i, j), number in confused.most_common(LISTED)
    ]
    table = pages.html_table(['true', 'predicted', 'number', 'share of true'], rows)
    heat_map = charts.heat_map(matrix, names, names, 'true', 'predicted')
    return pages.html_section(title, note, pages.side_by_side(heat_map, table))


def shown_or_blank(path: Path, size: tuple[int, int]) -> tuple[np.ndarray, str]:
    """An image to draw on, or a black one of a size and why the image cannot be read."""
    try:
        return shown_image(path), ''
    except ReadError as error:
        return np.zeros((*size, 3), np.uint8), f'; {error}'
