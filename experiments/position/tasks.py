"""Questions about pictures, and how well they can be answered without knowing what is where."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import permutations
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from .scenes import Scenes, arrangements, is_allowed, squared_distances

EXACT_CELLS = 64  # grids of up to this many cells are enumerated
SAMPLED = 200_000  # arrangements of larger grids


class PictureTask(NamedTuple):
    """A question with one answer for each picture.

    `label` takes rows, columns and digits (N, 3), and the grid, and returns (N,) integers.
    """

    classes: int
    question: str
    label: Callable[..., np.ndarray]


def pick(digits: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take_along_axis(digits, index[:, None], 1)[:, 0]


def quadrant(rows: np.ndarray, columns: np.ndarray, digits: np.ndarray, grid: tuple) -> np.ndarray:
    return 2 * (2 * rows[:, 0] >= grid[0]) + (2 * columns[:, 0] >= grid[1])


TASKS = {
    'leftmost': PictureTask(
        10, 'Which digit is leftmost?', lambda r, c, d, g: pick(d, c.argmin(1))
    ),
    'topmost': PictureTask(10, 'Which digit is topmost?', lambda r, c, d, g: pick(d, r.argmin(1))),
    'above': PictureTask(2, 'Is A above B?', lambda r, c, d, g: (r[:, 0] < r[:, 1]).astype(int)),
    # Kayhan and van Gemert (arXiv 2003.07064) ask for the location of an object in this way.
    'quadrant': PictureTask(4, 'In which quadrant is A?', quadrant),
    # After the Three-Cell Experiment of arXiv 2504.14386: three marked cells, and the answer is
    # in how they lie to each other. The rule is ours.
    'pattern': PictureTask(
        3, 'Which two digits are closest?', lambda r, c, d, g: squared_distances(r, c).argmin(1)
    ),
    'control': PictureTask(10, 'Which digit is the largest number?', lambda r, c, d, g: d.max(1)),
}
POSITION_TASKS = tuple(name for name in TASKS if name != 'control')


def labels_of(rows: np.ndarray, columns: np.ndarray, digits: np.ndarray, grid: tuple) -> dict:
    """The answers (N,) to every question."""
    return {name: task.label(rows, columns, digits, grid) for name, task in TASKS.items()}


def answers_of(scenes: Scenes) -> dict[str, np.ndarray]:
    """The answers (B,) to every question about pictures."""
    numbers = (x.numpy() for x in (scenes.rows, scenes.columns, scenes.digits))
    return labels_of(*numbers, scenes.grid)


def metric_of(metrics: dict[str, float], name: str) -> float:
    """A metric; 'position' is the mean accuracy of all tasks that need position."""
    if name == 'position':
        return float(np.mean([metrics[task] for task in POSITION_TASKS]))
    return metrics[name]


@lru_cache
def ceilings(grid: tuple[int, int] = (6, 6)) -> Mapping[str, float]:
    """The best accuracy of an observer who knows which digits there are, in which ink, and not
    where: for each bag of cells the share of its most frequent answer, averaged over the bags.

    No observer of the bag can do better, and a model whose tokens are single cells sees nothing
    else if it has no position. Crops and ink say nothing about places. The digits are drawn
    independently of the arrangement, and a relabelling of the digits relabels the answers, but
    for their order by size, so that the six orders of three digits stand for all bags.

    Args:
        grid: height and width in cells. Larger grids than 64 cells are sampled.
    """
    height, width = grid
    if height * width <= EXACT_CELLS:
        of_rows, of_columns = (
            np.array(list(permutations(range(side), 3))).reshape(-1, 3) for side in grid
        )
        rows = np.repeat(of_rows, len(of_columns), axis=0)
        columns = np.tile(of_columns, (len(of_rows), 1))
        keep = is_allowed(rows, columns, grid)
        rows, columns = rows[keep], columns[keep]
    else:
        rows, columns = arrangements(SAMPLED, grid, np.random.default_rng(0))
    best = {name: [] for name in TASKS}
    for order in permutations(range(3)):
        digits = np.tile(order, (len(rows), 1))
        for name, labels in labels_of(rows, columns, digits, grid).items():
            best[name].append(np.bincount(labels).max() / len(labels))
    found = {name: float(np.mean(values)) for name, values in best.items()}
    return MappingProxyType(found)  # it is kept, and must not be changed
