"""Whether encodings carry over to other sizes: models trained at one size, tested at others."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from cpvt_pyramid.tooling.files import write_text
from experiments import figures
from experiments.report import LabAnswer, Table
from experiments.statistics import estimate, holm, paired_difference, show_p
from experiments.training import one_thread

from .encodings import MEASURES, protocol, runs_data
from .laboratory import CANVASES, Lab, Trained, metric_of
from .runs import Result, evaluate_answers
from .tasks import ceilings

SIDE = 6  # cells of the training pictures
SQUARE = (SIDE, SIDE)
ASPECTS = {'1:2': (4, 8), '1:4': (4, 16)}  # grids of pictures, in cells


class SizeTest(NamedTuple):
    """Pictures of other sizes."""

    grid: tuple[int, int]  # in cells
    size: Optional[tuple[int, int]] = None  # height and width that they are resized to, in pixels
    inset: int = 0  # cells between every edge and the digits
    normalized: Optional[bool] = None  # the `coordinates` of a model that has both kinds


Tests = dict[str, SizeTest]
Found = dict[str, list[dict[str, dict[str, float]]]]  # by variant, seed, test and metric


def compare_sizes(lab: Lab) -> LabAnswer:
    """Whether an encoding carries over: trained at one size, tested at others."""
    tables = []
    data = {}
    pictures = []
    for model in lab.preset.models:
        trained = lab.train(lab.encodings(model), model)
        cell = trained[0].runs[0].settings.build().cell
        tests = tests_of(lab.preset.scales, cell)
        found = tested(lab, trained, tests, 'resolution')
        data[model] = found
        tables += [resolution_table(found, tests, metric, model) for metric in MEASURES]
        pictures.append(f'resolution-{model}.png')
        draw_sizes(lab.folder / pictures[-1], found, lab.preset.scales)
    notes = [
        'Models trained at 6x6 cells, without any further training. Canvas: more or fewer cells of '
        'the same size, so that objects keep their size in pixels. Zoom: the same picture, '
        'resized. Aspect ratios: canvases of 6x6, 4x8 and 4x16 cells, and the 6x6 picture '
        'stretched to the same ratio at the same area. Zoom also changes what a digit looks like '
        'to a token: the control task, which needs no position, says how much of a loss is that.',
        f'{lab.preset.scaled_pictures} test pictures for each size; 95% intervals over seeds.',
        'The paper, top-1 on ImageNet, trained at 224, zoomed to 384 / 448 / 512: DeiT-tiny with '
        'its learned embedding 72.2 to 71.2 / 68.8 / 65.9, CPVT-Ti (0 to 5) 73.4 to 74.2 / 72.6 / '
        '70.8. RoPE-ViT (arXiv 2403.13298), DeiT-III-S, 224 to 384: absolute 80.4 to 79.4, axial '
        '80.9 to 80.0, mixed 80.9 to 81.8.',
    ]
    title = 'Does an encoding carry over to other sizes?'
    return LabAnswer('resolution', title, notes, tables, pictures, data)


def compare_canvases(lab: Lab) -> LabAnswer:
    """Whether a PEG can keep its position on larger canvases."""
    scales = lab.preset.scales
    trained = lab.train(lab.canvases())
    largest = max(sides_of(scales))
    tests = canvases(scales)
    tests['middle'] = SizeTest((largest, largest), inset=(largest - SIDE) // 2)
    found = tested(lab, trained, tests, 'canvas')
    tables = [resolution_table(found, tests, name, 'column') for name in ('position', 'control')]
    if len(found) > 1 and lab.seeds > 1:
        tables.append(differences_table(found, tests))
    picture = 'canvas.png'
    draw_canvases(lab.folder / picture, found, scales)
    notes = [
        *protocol(lab),
        'Trained at 6x6 cells, tested on canvases of more cells of the same size. "Random canvas": '
        'each training step has pictures of 3 to 9 cells a side. "Middle": the largest canvas, '
        'with the digits in the 6x6 cells in its middle, far from the border that a PEG sees.',
    ]
    title = 'Can a PEG keep its position on larger canvases?'
    data = {'runs': runs_data(trained), 'tests': found}
    return LabAnswer('canvas', title, notes, tables, [picture], data)


# The tests


def tests_of(scales: Sequence[float], cell: int) -> Tests:
    """Canvases of other sizes, pictures resized to the same sizes, and both in other shapes."""
    tests = {**canvases(scales), **zooms(scales, cell)}
    for name, grid in ASPECTS.items():
        tests[f'canvas {name}'] = SizeTest(grid)
        ratio = grid[1] / grid[0]
        height = round(SIDE * cell * ratio**-0.5)
        width = round(SIDE * cell * ratio**0.5)
        tests[f'stretch {name}'] = SizeTest(SQUARE, (height, width))
    return tests


def canvases(scales: Sequence[float]) -> Tests:
    return {f'canvas {s:g}': SizeTest((n, n)) for s, n in zip(scales, sides_of(scales))}


def zooms(scales: Sequence[float], cell: int) -> Tests:
    tests = {}
    for scale in scales:
        side = round(SIDE * cell * scale)
        tests[f'zoom {scale:g}'] = SizeTest(SQUARE, (side, side))
    return tests


def sides_of(scales: Sequence[float]) -> list[int]:
    """Sides of the canvases, in cells."""
    return [max(3, round(SIDE * scale)) for scale in scales]


def tested(lab: Lab, trained: Sequence[Trained], tests: Tests, label: str) -> Found:
    """The metrics of each variant and seed in each test."""
    return lab.measure(trained, label, at_all_sizes, tests, lab.preset.scaled_pictures)


def at_all_sizes(result: Result, tests: Tests, pictures: int) -> dict[str, dict[str, float]]:
    """The metrics of a trained model in each test; kept in a file next to the run's."""
    path = result.path.with_name(f'{result.path.stem}-scaled-{pictures}.json')
    known = json.loads(path.read_text()) if path.exists() else {}
    todo = {name: test for name, test in tests.items() if name not in known}
    if todo:
        with one_thread():
            model = result.load()
            for name, test in todo.items():
                scenes = result.settings.draw('test', pictures, 0, test.grid, test.inset)
                if test.normalized is not None:
                    model.coordinates.normalized = test.normalized
                known[name] = evaluate_answers(model, scenes, test.size)
        write_text(path, json.dumps(known))
    return {name: known[name] for name in tests}


# Tables and figures


def resolution_table(found: Found, tests: Tests, metric: str, model: str) -> Table:
    rows = []
    if metric in ('position', 'control'):
        bag = [f'{100 * bag_ceiling(test, metric):.1f}' for test in tests.values()]
        rows.append(['bag of patches, ceiling', *bag, ''])
    for name, of_seeds in found.items():
        cells = [estimate(values_of(of_seeds, test, metric)).show() for test in tests]
        rows.append([name, *cells, str(len(of_seeds))])
    return Table(f'{MEASURES[metric]} in %, {model}', ['', *tests, 'seeds'], rows)


def values_of(of_seeds: Sequence[dict], test: str, metric: str) -> list[float]:
    return [metric_of(of_seed[test], metric) for of_seed in of_seeds]


def bag_ceiling(test: SizeTest, metric: str) -> float:
    """Of an observer who does not know what is where."""
    # Digits in the middle of a canvas lie as in one of the training size.
    grid = SQUARE if test.inset else test.grid
    return metric_of(ceilings(grid), metric)


def differences_table(found: Found, tests: Tests) -> Table:
    """Of the position tasks, from the first variant."""
    base, *others = found
    pairs = {}
    for name in others:
        for test in tests:
            values = values_of(found[name], test, 'position')
            reference = values_of(found[base], test, 'position')
            pairs[name, test] = paired_difference(values, reference)
    adjusted = dict(zip(pairs, holm([one.p for one in pairs.values()])))
    rows = []
    for name in others:
        cells = []
        for test in tests:
            difference = pairs[name, test].show(sign=True)
            cells.append(f'{difference} ({show_p(adjusted[name, test])})')
        rows.append([name, *cells])
    title = (
        f'Difference from "{base}" in points, paired by seed; in brackets p, adjusted for '
        f'{len(pairs)} comparisons (Holm)'
    )
    return Table(title, ['', *tests], rows)


def percents_by_scale(
    of_seeds: Sequence[dict], kind: str, metric: str, scales: Sequence[float]
) -> np.ndarray:
    """(seeds, scales), a metric on canvases or zoomed pictures."""
    columns = [values_of(of_seeds, f'{kind} {scale:g}', metric) for scale in scales]
    return 100 * np.transpose(columns)


def bag_percents(scales: Sequence[float]) -> list[float]:
    """Of the position tasks on canvases."""
    return [100 * metric_of(ceilings((side, side)), 'position') for side in sides_of(scales)]


def draw_canvases(path: Path, found: Found, scales: Sequence[float]) -> None:
    """PEGs on the left, the others on the right."""
    with figures.figure(path, 1, 2, (12, 4.6), sharey=True) as (fig, axes):
        left, right = axes.flat
        for i, (name, of_seeds) in enumerate(found.items()):
            axis = left if CANVASES[name].position == 'peg' else right
            values = percents_by_scale(of_seeds, 'canvas', 'position', scales)
            figures.curve(axis, scales, values, marker='o', color=f'C{i}', label=name)
        bag = bag_percents(scales)
        for axis in (left, right):
            axis.plot(scales, bag, '--', color='black', lw=1, label='ceiling of a bag of patches')
            figures.of_sizes(axis, scales)
            axis.legend(fontsize=8, loc='lower left')
            axis.set_ylim(0, 100)
        left.set_ylabel('accuracy on the position tasks, %')
        fig.suptitle(
            'Trained at 6x6 cells, or at 3x3 to 9x9 ("random canvas"), tested on other canvases '
            '(1 = 6x6): mean and 95% interval'
        )


def draw_sizes(path: Path, found: Found, scales: Sequence[float]) -> None:
    """An axis for each encoding: canvas and zoom, in front of the canvases of all others."""
    columns = 4
    rows = math.ceil(len(found) / columns)
    size = (3.1 * columns, 2.5 * rows + 0.7)
    others = [
        percents_by_scale(of_seeds, 'canvas', 'position', scales).mean(0)
        for of_seeds in found.values()
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
                values = percents_by_scale(of_seeds, kind, 'position', scales)
                label = f'position tasks, {kind}'
                lines += figures.curve(axis, scales, values, label=label, **look)
            for kind, color in {'canvas': figures.BLUE, 'zoom': figures.ACCENT}.items():
                mean = percents_by_scale(of_seeds, kind, 'control', scales).mean(0)
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
