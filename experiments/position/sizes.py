"""Whether encodings carry over to other sizes: models trained at one size, tested at others."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from experiments import figures
from experiments.report import Table
from experiments.statistics import estimate

from .models import CELL
from .tasks import ceilings, metric_of

SIDE = 6  # cells of the training pictures
SQUARE = (SIDE, SIDE)
ASPECTS = {'1:2': (4, 8), '1:4': (4, 16)}  # grids of pictures, in cells
NOTES = (
    'Trained at 6x6 cells, tested at other sizes without any further training. Canvas: more or '
    'fewer cells of the same size, so that objects keep their size in pixels. Zoom: the same '
    'picture, resized. Aspect ratios: canvases of 6x6, 4x8 and 4x16 cells, and the 6x6 picture '
    'stretched to the same ratio at the same area. Zoom also changes what a digit looks like '
    'to a token: the control task, which needs no position, says how much of a loss is that.',
    'The paper, top-1 on ImageNet, trained at 224, zoomed to 384 / 448 / 512: DeiT-tiny with '
    'its learned embedding 72.2 to 71.2 / 68.8 / 65.9, CPVT-Ti (0 to 5) 73.4 to 74.2 / 72.6 / '
    '70.8. RoPE-ViT (arXiv 2403.13298), DeiT-III-S, 224 to 384: absolute 80.4 to 79.4, axial '
    '80.9 to 80.0, mixed 80.9 to 81.8.',
)


class SizeTest(NamedTuple):
    """Pictures of another size."""

    grid: tuple[int, int]  # in cells
    size: Optional[tuple[int, int]] = None  # height and width that they are resized to, in pixels


Found = dict[str, list[dict[str, dict[str, float]]]]  # by variant, seed, test and metric


def sizes_of(scales: Sequence[float]) -> dict[str, SizeTest]:
    """Canvases of other sizes, pictures resized to the same sizes, and both in other shapes; none
    without scales."""
    tests = {}
    for scale, side in zip(scales, sides_of(scales)):
        tests[f'canvas {scale:g}'] = SizeTest((side, side))
    for scale in scales:
        side = round(SIDE * CELL * scale)
        tests[f'zoom {scale:g}'] = SizeTest(SQUARE, (side, side))
    for name, grid in ASPECTS.items() if scales else ():
        tests[f'canvas {name}'] = SizeTest(grid)
        ratio = grid[1] / grid[0]
        height = round(SIDE * CELL * ratio**-0.5)
        width = round(SIDE * CELL * ratio**0.5)
        tests[f'stretch {name}'] = SizeTest(SQUARE, (height, width))
    return tests


def sides_of(scales: Sequence[float]) -> list[int]:
    """Sides of the canvases, in cells."""
    return [max(3, round(SIDE * scale)) for scale in scales]


def sizes_table(found: Found, tests: dict[str, SizeTest], metric: str, title: str) -> Table:
    """A metric of each variant in each test."""
    rows = []
    if metric in ('position', 'control'):
        bag = [f'{100 * metric_of(ceilings(test.grid), metric):.1f}' for test in tests.values()]
        rows.append(['bag of patches, ceiling', *bag, ''])
    for name, of_seeds in found.items():
        cells = [estimate(values_of(of_seeds, test, metric)).show() for test in tests]
        rows.append([name, *cells, str(len(of_seeds))])
    return Table(title, ['', *tests, 'seeds'], rows)


def values_of(of_seeds: Sequence[dict], test: str, metric: str) -> list[float]:
    return [metric_of(of_seed[test], metric) for of_seed in of_seeds]


def by_scale(
    of_seeds: Sequence[dict], kind: str, metric: str, scales: Sequence[float]
) -> np.ndarray:
    """(seeds, scales), a metric in % on canvases or zoomed pictures."""
    columns = [values_of(of_seeds, f'{kind} {scale:g}', metric) for scale in scales]
    return 100 * np.transpose(columns)


def bag_percents(scales: Sequence[float]) -> list[float]:
    """Of the position tasks on canvases."""
    return [100 * metric_of(ceilings((side, side)), 'position') for side in sides_of(scales)]


def draw_sizes(path: Path, found: Found, scales: Sequence[float]) -> None:
    """An axis for each encoding: canvas and zoom, in front of the canvases of all others."""
    columns = 4
    rows = math.ceil(len(found) / columns)
    size = (3.1 * columns, 2.5 * rows + 0.7)
    others = [
        by_scale(of_seeds, 'canvas', 'position', scales).mean(0) for of_seeds in found.values()
    ]
    bag = bag_percents(scales)
    with figures.figure(path, rows, columns, size, sharey=True, sharex=True) as (fig, axes):
        for axis in axes.flat[len(found) :]:
            axis.set_visible(False)
        for axis, (name, of_seeds) in zip(axes.flat, found.items()):
            axis.plot(scales, np.transpose(others), color='#c9ccd1', lw=0.8, zorder=0)
            lines = []
            for kind, look in {
                'canvas': dict(marker='o', color=figures.BLUE, lw=2.2),
                'zoom': dict(marker='s', color=figures.ACCENT),
            }.items():
                values = by_scale(of_seeds, kind, 'position', scales)
                label = f'position tasks, {kind}'
                lines += figures.curve(axis, scales, values, label=label, **look)
            for kind, color in {'canvas': figures.BLUE, 'zoom': figures.ACCENT}.items():
                mean = by_scale(of_seeds, kind, 'control', scales).mean(0)
                label = f'control task, {kind}'
                lines += axis.plot(scales, mean, ':', lw=1.5, color=color, label=label)
            label = 'ceiling of a bag of patches, canvas'
            lines += axis.plot(scales, bag, '--', color='black', lw=1, label=label)
            figures.of_sizes(axis, scales)
            axis.set_title(name)
            axis.set_ylim(0, 100)
        last_of_columns = axes.flat[max(len(found) - columns, 0) : len(found)]
        for axis in last_of_columns:
            axis.tick_params(labelbottom=True)
        for axis in axes[:, 0]:
            axis.set_ylabel('accuracy, %')
        figures.legend_below(fig, lines, 5)
        fig.suptitle(
            'Trained at 6x6 cells, tested at other sizes (1 = 6x6): mean and 95% interval; grey: '
            'the other encodings, canvas'
        )
