"""The questions about trained models: which encoding, where a PEG belongs, how sizes carry over."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from cpvt_pyramid.tooling.files import write_text
from experiments import figures
from experiments.parallel import in_parallel
from experiments.report import LabAnswer, Table
from experiments.statistics import Estimate, estimate, holm, paired_difference, show_p
from experiments.training import one_thread

from .laboratory import CANVASES, Lab, Trained, metric_of
from .runs import Result, evaluate_answers
from .scenes import draw_scenes
from .tasks import POSITION_TASKS, TASKS, answers_of, ceilings

ASPECTS = {'1:1': (6, 6), '1:2': (4, 8), '1:4': (4, 16)}  # grids of pictures, in cells
MEASURES = {
    'position': 'tasks that need position',
    'control': 'control task',
    'mIoU': 'segmentor, mIoU',
    'AP': 'detector, AP50',
}
SIGNIFICANT = 0.05

PROTOCOL = (
    'One model answers all questions at once: a linear classifier for each task, a detector '
    '(which digit is where; it needs no position, because a token knows its place in the output) '
    'and a segmentor (ink of the leftmost digit, other ink, rest; it needs position). Every '
    'variant is tuned and trained in the same way: {rates} peak learning rates, one run each with '
    'a seed and pictures that appear in no table; the rate with the best mean accuracy over the '
    "tasks is used for all seeds. Intervals are 95% of Student's t over seeds (weights, training "
    'pictures and test pictures all change with the seed). "Position" is the mean of the tasks '
    'that need position, chosen before the first run. Failed runs are counted and stay in the '
    'means.'
)
CEILING = (
    'A bag of patches knows which digits there are and not where. Its best possible accuracy is '
    'computed by going through all arrangements, and is the first row. A model without position '
    'cannot exceed it but for chance; with {pictures} test pictures a share of one half has a '
    'standard error of {error:.1%}.'
)


def protocol(lab: Lab) -> list[str]:
    pictures = lab.preset.pictures
    return [
        PROTOCOL.format(rates=len(lab.preset.rates)),
        CEILING.format(pictures=pictures, error=0.5 / math.sqrt(pictures)),
    ]


def compare_encodings(lab: Lab) -> LabAnswer:
    """Which encoding: all of them with the same size, data, budget and tuning."""
    tables, data, pictures = [], {}, []
    for model in lab.preset.models:
        trained = lab.train(lab.encodings(model), model)
        tables += comparison(trained, f'Accuracy in %, {model}', reference='peg')
        data[model] = runs_data(trained)
        name = f'encodings-{model}.png'
        draw_comparison(lab.folder / name, trained)
        pictures.append(name)
    example = 'encodings-pictures.png'
    draw_examples(lab.folder / example, lab.seed)
    return LabAnswer(
        'encodings', 'Which encoding?', protocol(lab), tables, [example, *pictures], data
    )


def compare_placements(lab: Lab) -> LabAnswer:
    """Where a PEG belongs and what it is made of: CPVT's ablations."""
    trained = lab.train(lab.placements())
    name = 'placement.png'
    draw_comparison(lab.folder / name, trained)
    notes = [
        *protocol(lab),
        "Blocks 0 to 5 of the paper's 12 are the first half of the blocks here. The paper's "
        '27x27 kernel covers its map of 14x14 tokens; the one here, 11x11, covers 6x6.',
    ]
    tables = comparison(trained, 'Accuracy in %, columnar model', reference='after block 0')
    return LabAnswer(
        'placement', 'Where does a PEG belong?', notes, tables, [name], runs_data(trained)
    )


def comparison(trained: Sequence[Trained], title: str, reference: str) -> list[Table]:
    """Every variant's metrics; and its paired difference from a reference."""
    bag = {'position': metric_of(ceilings(), 'position'), **ceilings()}
    columns = ('position', *TASKS, 'mIoU', 'AP')
    rows = [['bag of patches, ceiling',
             *(f'{100 * bag[name]:.1f}' if name in bag else '' for name in columns),
             '', '', '', '']]  # fmt: skip
    for one in trained:
        failed = sum(run.failed for run in one.runs)
        rows.append(
            [one.name, *(estimate(one.scores(name)).show() for name in columns),
             str(len(one.runs)), str(failed), f'{one.lr:g}', one.variant.paper]
        )  # fmt: skip
    header = ['', *columns, 'seeds', 'failed', 'lr', 'paper, ImageNet']
    tables = [Table(title, header, rows)]
    base = next((one for one in trained if one.name == reference), None)
    if base is None or len(base.runs) < 2:
        return tables
    others = [one for one in trained if one is not base]
    found = {
        metric: [paired_difference(one.scores(metric), base.scores(metric)) for one in others]
        for metric in MEASURES
    }
    adjusted = holm([d.p for d in found['position']])
    rows = [
        [one.name, *(found[metric][i].show(sign=True) for metric in MEASURES),
         show_p(adjusted[i]), verdict(found['position'][i], adjusted[i])]
        for i, one in enumerate(others)
    ]  # fmt: skip
    header = ['', *MEASURES.values(), 'p, adjusted', 'position']
    tables.append(Table(
        f'Difference from "{reference}" in points, paired by seed; p for the tasks that need '
        f'position, adjusted for {len(others)} comparisons (Holm)', header, rows,
    ))  # fmt: skip
    return tables


def verdict(found: Estimate, p: float) -> str:
    if not p < SIGNIFICANT:
        return 'cannot tell'
    return 'better' if found.mean > 0 else 'worse'


def runs_data(trained: Sequence[Trained]) -> list[dict]:
    """Every run of the tables, for JSON; how long it took is in its own file."""
    return [
        {'name': one.name, 'paper': one.variant.paper,
         'runs': [{'settings': asdict(run.settings), 'metrics': run.metrics, 'losses': run.losses,
                   'failure': run.failure} for run in one.runs]}
        for one in trained
    ]  # fmt: skip


def draw_comparison(path: Path, trained: Sequence[Trained]) -> None:
    bag = {'position': metric_of(ceilings(), 'position'), **ceilings()}
    names = ['position', *POSITION_TASKS, 'control', 'mIoU']
    titles = {'position': 'position (mean of five)', 'mIoU': 'segmentor, mIoU'}
    height = 0.26 * len(trained) + 0.8
    shades = [shade_of(one.variant.position) for one in trained]
    with figures.figure(path, 2, 4, (13, 2 * height), sharey=True) as (fig, axes):
        for axis, name in zip(axes.flat, names):
            values = {one.name: 100 * one.scores(name) for one in trained}
            figures.dots(axis, values, shades, 100 * bag[name] if name in bag else None)
            axis.set_title(titles.get(name, name))
        fig.suptitle(
            'Accuracy in %: seeds (dots), mean and 95% interval; dashed: ceiling of a bag of '
            'patches; red: with a PEG, grey: without position'
        )


def shade_of(position: str) -> str:
    if position == 'none':
        return figures.GREY
    return figures.ACCENT if 'peg' in position else figures.BLUE


def draw_examples(path: Path, seed: int) -> None:
    """Four test pictures with their answers."""
    scenes = draw_scenes('test', 4, seed, cell=16)
    labels = answers_of(scenes)
    corners = ('top left', 'top right', 'bottom left', 'bottom right')
    pairs = ('A and B', 'B and C', 'C and A')
    with figures.figure(path, 1, 4, (11.5, 4.15), 'compressed') as (fig, axes):
        for i, axis in enumerate(axes.flat):
            text = (
                f'leftmost {labels["leftmost"][i]}, topmost {labels["topmost"][i]}\n'
                f'A above B: {"yes" if labels["above"][i] else "no"}\n'
                f'A: {corners[labels["quadrant"][i]]}\n'
                f'closest: {pairs[labels["pattern"][i]]}\nlargest: {labels["control"][i]}'
            )
            figures.show_picture(axis, scenes.image[i], text)
        fig.suptitle('Test pictures and their answers: A is red, B green, C blue')


# Resolution


def compare_sizes(lab: Lab) -> LabAnswer:
    """Whether an encoding carries over: trained at one size, tested at others."""
    tables, data, pictures = [], {}, []
    for model in lab.preset.models:
        trained = lab.train(lab.encodings(model), model)
        cell = trained[0].runs[0].settings.build().cell
        tests = tests_of(lab.preset.scales, cell)
        of_variant = tested(lab, trained, tests, 'resolution')
        data[model] = of_variant
        tables += [resolution_table(of_variant, tests, name, model) for name in MEASURES]
        pictures.append(f'resolution-{model}.png')
        draw_sizes(lab.folder / pictures[-1], of_variant, lab.preset.scales)
    notes = [
        'Models trained at 6x6 cells, without any further training. Canvas: more or fewer cells of '
        'the same size, so that objects keep their size in pixels. Zoom: the same picture, '
        'resized. Aspect ratios: canvases of 6x6, 4x8 and 4x16 cells, and the 6x6 picture '
        'stretched to the same ratio at the same area. Zoom also changes what a digit looks like '
        'to a token: the control task, which needs no position, says how much of a loss is that.',
        f'{lab.preset.scaled_pictures} test pictures for each size; 95% intervals over seeds.',
        'The paper, top-1 on ImageNet, trained at 224, zoomed to 384 / 448 / 512: DeiT-tiny with '
        'its learned table 72.2 to 71.2 / 68.8 / 65.9, CPVT-Ti (0 to 5) 73.4 to 74.2 / 72.6 / '
        '70.8. RoPE-ViT (arXiv 2403.13298), DeiT-III-S, 224 to 384: absolute 80.4 to 79.4, axial '
        '80.9 to 80.0, mixed 80.9 to 81.8.',
    ]
    return LabAnswer(
        'resolution', 'Does an encoding carry over to other sizes?', notes, tables, pictures, data
    )


def tested(
    lab: Lab, trained: Sequence[Trained], tests: dict[str, tuple], label: str
) -> dict[str, list[dict]]:
    """For each variant the metrics of each seed, in each test."""
    runs = [run for one in trained for run in one.runs]
    jobs = [(at_all_sizes, (run, tests, lab.preset.scaled_pictures)) for run in runs]
    found = iter(in_parallel(jobs, lab.workers, label))
    return {one.name: [next(found) for _ in one.runs] for one in trained}


def compare_canvases(lab: Lab) -> LabAnswer:
    """Whether a PEG can keep its position on larger canvases."""
    scales = lab.preset.scales
    trained = lab.train(lab.canvases())
    tests = canvases(scales)
    largest = max(sides_of(scales))
    tests['middle'] = ((largest, largest), None, (largest - 6) // 2)
    found = tested(lab, trained, tests, 'canvas')
    tables = [resolution_table(found, tests, name, 'column') for name in ('position', 'control')]
    base, *others = found
    scores = {
        name: {test: [metric_of(seed[test], 'position') for seed in seeds] for test in tests}
        for name, seeds in found.items()
    }
    if others and lab.seeds > 1:
        pairs = {
            name: [paired_difference(scores[name][test], scores[base][test]) for test in tests]
            for name in others
        }
        adjusted = iter(holm([d.p for of_tests in pairs.values() for d in of_tests]))
        rows = [
            [name, *(f'{d.show(sign=True)} ({show_p(next(adjusted))})' for d in of_tests)]
            for name, of_tests in pairs.items()
        ]
        tables.append(Table(
            f'Difference from "{base}" in points, paired by seed; in brackets p, adjusted for '
            f'{len(others) * len(tests)} comparisons (Holm)', ['', *tests], rows,
        ))  # fmt: skip
    picture = 'canvas.png'
    with figures.figure(lab.folder / picture, 1, 2, (12, 4.6), sharey=True) as (fig, axes):
        for i, (name, of_test) in enumerate(scores.items()):
            axis = axes.flat[int(CANVASES[name].position != 'peg')]
            values = 100 * np.array([of_test[f'canvas {s:g}'] for s in scales]).T
            figures.curve(axis, scales, values, marker='o', color=f'C{i}', label=name)
        bag = [100 * metric_of(ceilings((side, side)), 'position') for side in sides_of(scales)]
        for axis in axes.flat:
            axis.plot(scales, bag, '--', color='black', lw=1, label='ceiling of a bag of patches')
            figures.of_sizes(axis, scales)
            axis.legend(fontsize=8, loc='lower left')
            axis.set_ylim(0, 100)
        axes.flat[0].set_ylabel('accuracy on the position tasks, %')
        fig.suptitle('Trained at 6x6 cells, or at 3x3 to 9x9 ("random canvas"), tested on other '
                     'canvases (1 = 6x6): mean and 95% interval')  # fmt: skip
    notes = [
        *protocol(lab),
        'Trained at 6x6 cells, tested on canvases of more cells of the same size. "Random canvas": '
        'each training step has pictures of 3 to 9 cells a side. "Middle": the largest canvas, '
        'with the digits in the 6x6 cells in its middle, far from the border that a PEG sees.',
    ]
    title = 'Can a PEG keep its position on larger canvases?'
    return LabAnswer(
        'canvas', title, notes, tables, [picture], {'runs': runs_data(trained), 'tests': found}
    )


def canvases(scales: Sequence[float]) -> dict[str, tuple]:
    return {f'canvas {s:g}': ((n, n), None) for s, n in zip(scales, sides_of(scales))}


def tests_of(scales: Sequence[float], cell: int) -> dict[str, tuple]:
    """For each test the grid of its pictures, the size they are resized to, or None, and perhaps
    the number of cells between every edge and the digits."""
    tests = canvases(scales)
    for scale in scales:
        side = round(6 * cell * scale)
        tests[f'zoom {scale:g}'] = ((6, 6), (side, side))
    for name, grid in list(ASPECTS.items())[1:]:
        tests[f'canvas {name}'] = (grid, None)
        ratio = grid[1] / grid[0]
        size = tuple(round(6 * cell * f) for f in (ratio**-0.5, ratio**0.5))
        tests[f'stretch {name}'] = ((6, 6), size)
    return tests


def sides_of(scales: Sequence[float]) -> list[int]:
    """Sides of the canvases, in cells."""
    return [max(3, round(6 * scale)) for scale in scales]


def at_all_sizes(
    result: Result, tests: dict[str, tuple], pictures: int
) -> dict[str, dict[str, float]]:
    """The metrics of a trained model in each test; kept in a file next to the run's."""
    path = result.path.with_name(f'{result.path.stem}-scaled-{pictures}.json')
    known = json.loads(path.read_text()) if path.exists() else {}
    todo = {name: test for name, test in tests.items() if name not in known}
    if todo:
        with one_thread():
            model = result.load()
            for name, (grid, size, *inset) in todo.items():
                scenes = result.settings.draw('test', pictures, 0, grid, *inset)
                known[name] = evaluate_answers(model, scenes, size)
        write_text(path, json.dumps(known))
    return {name: known[name] for name in tests}


def resolution_table(
    found: dict[str, list[dict]], tests: dict[str, tuple], metric: str, model: str
) -> Table:
    rows = [
        [name, *(estimate([metric_of(of_seed[test], metric) for of_seed in of_seeds]).show()
                 for test in tests), str(len(of_seeds))]
        for name, of_seeds in found.items()
    ]  # fmt: skip
    if metric in ('position', 'control'):
        # Digits in the middle of a canvas lie as in one of the training size.
        grids = [ASPECTS['1:1'] if inset else grid for grid, _, *inset in tests.values()]
        bag = [f'{100 * metric_of(ceilings(grid), metric):.1f}' for grid in grids]
        rows.insert(0, ['bag of patches, ceiling', *bag, ''])
    return Table(f'{MEASURES[metric]} in %, {model}', ['', *tests, 'seeds'], rows)


def draw_sizes(path: Path, found: dict[str, list[dict]], scales: Sequence[float]) -> None:
    """An axis for each encoding: canvas and zoom, in front of the canvases of all others."""
    columns = 4
    rows = math.ceil(len(found) / columns)
    bag = [100 * metric_of(ceilings((side, side)), 'position') for side in sides_of(scales)]

    def values(name: str, kind: str, metric: str) -> np.ndarray:
        return np.array([[100 * metric_of(seed[f'{kind} {s:g}'], metric) for s in scales]
                         for seed in found[name]])  # fmt: skip

    means = [values(name, 'canvas', 'position').mean(0) for name in found]
    size = (3.1 * columns, 2.5 * rows + 0.7)
    with figures.figure(path, rows, columns, size, sharey=True, sharex=True) as (fig, axes):
        for axis in axes.flat[len(found) :]:
            axis.set_visible(False)
        for axis, name in zip(axes.flat, found):
            axis.plot(scales, np.transpose(means), color='#c9ccd1', lw=0.8, zorder=0)
            lines = [
                *figures.curve(axis, scales, values(name, 'canvas', 'position'), marker='o',
                               color=figures.BLUE, lw=2.2, label='position tasks, canvas'),
                *figures.curve(axis, scales, values(name, 'zoom', 'position'), marker='s',
                               color=figures.ACCENT, label='position tasks, zoom'),
                *axis.plot(scales, values(name, 'canvas', 'control').mean(0), ':', lw=1.5,
                           color=figures.BLUE, label='control task, canvas'),
                *axis.plot(scales, values(name, 'zoom', 'control').mean(0), ':', lw=1.5,
                           color=figures.ACCENT, label='control task, zoom'),
                *axis.plot(scales, bag, '--', color='black', lw=1,
                           label='ceiling of a bag of patches, canvas'),
            ]  # fmt: skip
            figures.of_sizes(axis, scales)
            axis.set_title(name)
            axis.set_ylim(0, 100)
        for axis in axes.flat[max(len(found) - columns, 0) : len(found)]:
            axis.tick_params(labelbottom=True)  # the lowest of its column
        for axis in axes[:, 0]:
            axis.set_ylabel('accuracy, %')
        figures.legend_below(fig, lines, 5)
        fig.suptitle('Trained at 6x6 cells, tested at other sizes (1 = 6x6): mean and 95% '
                     'interval; grey: the other encodings, canvas')  # fmt: skip


TRAINED = {
    'encodings': compare_encodings,
    'placement': compare_placements,
    'resolution': compare_sizes,
    'canvas': compare_canvases,
}
