"""Which encoding, and where a PEG belongs: models trained in the same way, compared."""

import math
from collections.abc import Sequence
from pathlib import Path

from experiments import figures
from experiments.report import LabAnswer, Table
from experiments.statistics import Estimate, estimate, holm, paired_difference, show_p
from experiments.training import determined

from .laboratory import Lab, Trained, metric_of
from .scenes import draw_scenes
from .tasks import POSITION_TASKS, TASKS, answers_of, ceilings

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
    """How all models are trained, as notes of an answer."""
    pictures = lab.preset.pictures
    return [
        PROTOCOL.format(rates=len(lab.preset.rates)),
        CEILING.format(pictures=pictures, error=0.5 / math.sqrt(pictures)),
    ]


def compare_encodings(lab: Lab) -> LabAnswer:
    """Which encoding: all of them with the same size, data, budget and tuning."""
    example = 'encodings-pictures.png'
    draw_examples(lab.folder / example, lab.seed)
    tables = []
    data = {}
    pictures = [example]
    for model in lab.preset.models:
        trained = lab.train(lab.encodings(model), model)
        tables += comparison(trained, f'Accuracy in %, {model}', reference='peg')
        data[model] = runs_data(trained)
        name = f'encodings-{model}.png'
        draw_comparison(lab.folder / name, trained)
        pictures.append(name)
    return LabAnswer('encodings', 'Which encoding?', protocol(lab), tables, pictures, data)


def compare_placements(lab: Lab) -> LabAnswer:
    """Where a PEG belongs and what it is made of: CPVT's ablations."""
    trained = lab.train(lab.placements())
    picture = 'placement.png'
    draw_comparison(lab.folder / picture, trained)
    notes = [
        *protocol(lab),
        "Blocks 0 to 5 of the paper's 12 are the first half of the blocks here. The paper's "
        '27x27 kernel covers its map of 14x14 tokens; the one here, 11x11, covers 6x6.',
    ]
    tables = comparison(trained, 'Accuracy in %, columnar model', reference='after block 0')
    data = runs_data(trained)
    return LabAnswer('placement', 'Where does a PEG belong?', notes, tables, [picture], data)


def bag_ceilings() -> dict[str, float]:
    """The best accuracies of an observer without position, also on average over the tasks."""
    return {'position': metric_of(ceilings(), 'position'), **ceilings()}


def comparison(trained: Sequence[Trained], title: str, reference: str) -> list[Table]:
    """Every variant's metrics; and its paired difference from a reference, if there are seeds."""
    tables = [metrics_table(trained, title)]
    by_name = {one.name: one for one in trained}
    if reference in by_name and len(by_name[reference].runs) > 1:
        base = by_name.pop(reference)
        tables.append(differences_table(list(by_name.values()), base))
    return tables


def metrics_table(trained: Sequence[Trained], title: str) -> Table:
    columns = ('position', *TASKS, 'mIoU', 'AP')
    bag = bag_ceilings()
    of_bag = [f'{100 * bag[name]:.1f}' if name in bag else '' for name in columns]
    rows = [['bag of patches, ceiling', *of_bag, '', '', '', '']]
    for one in trained:
        metrics = [estimate(one.scores(name)).show() for name in columns]
        failed = sum(run.failed for run in one.runs)
        about = [str(len(one.runs)), str(failed), f'{one.lr:g}', one.variant.paper]
        rows.append([one.name, *metrics, *about])
    header = ['', *columns, 'seeds', 'failed', 'lr', 'paper, ImageNet']
    return Table(title, header, rows)


def differences_table(others: Sequence[Trained], base: Trained) -> Table:
    found = {}
    for metric in MEASURES:
        of_base = base.scores(metric)
        found[metric] = [paired_difference(one.scores(metric), of_base) for one in others]
    adjusted = holm([one.p for one in found['position']])
    rows = []
    for i, (one, p) in enumerate(zip(others, adjusted)):
        differences = [found[metric][i].show(sign=True) for metric in MEASURES]
        rows.append([one.name, *differences, show_p(p), verdict(found['position'][i], p)])
    title = (
        f'Difference from "{base.name}" in points, paired by seed; p for the tasks that need '
        f'position, adjusted for {len(others)} comparisons (Holm)'
    )
    return Table(title, ['', *MEASURES.values(), 'p, adjusted', 'position'], rows)


def verdict(found: Estimate, p: float) -> str:
    if math.isnan(p) or p >= SIGNIFICANT:
        return 'not significant'
    return 'better' if found.mean > 0 else 'worse'


def runs_data(trained: Sequence[Trained]) -> list[dict]:
    """Every run of the tables, for JSON; how long it took is in its own file."""
    data = []
    for one in trained:
        runs = []
        for run in one.runs:
            runs.append(
                {
                    'settings': determined(run.settings),
                    'metrics': run.metrics,
                    'losses': run.losses,
                    'failure': run.failure,
                }
            )
        data.append({'name': one.name, 'paper': one.variant.paper, 'runs': runs})
    return data


def draw_comparison(path: Path, trained: Sequence[Trained]) -> None:
    bag = bag_ceilings()
    names = ['position', *POSITION_TASKS, 'control', 'mIoU']
    titles = {'position': 'position (mean of five)', 'mIoU': 'segmentor, mIoU'}
    height = 0.26 * len(trained) + 0.8
    shades = [shade_of(one.variant.position) for one in trained]
    with figures.figure(path, 2, 4, (13, 2 * height), sharey=True) as (fig, axes):
        for axis, name in zip(axes.flat, names):
            values = {one.name: 100 * one.scores(name) for one in trained}
            ceiling = 100 * bag[name] if name in bag else None
            figures.dots(axis, values, shades, ceiling)
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
