"""Which encoding: models trained in the same way, compared at the training size and at others."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments import figures
from experiments.report import Answer, Table
from experiments.statistics import Estimate, estimate, holm, paired_difference, show_p

from .answers import RunSettings, mean_accuracy
from .laboratory import NORMALIZED, REPLICATED, Lab, Trained, Variant
from .scenes import draw_scenes
from .sizes import NOTES, draw_sizes, sizes_of, sizes_table
from .tasks import POSITION_TASKS, TASKS, answers_of, ceilings, metric_of

# No position first, then what the paper compares (arXiv 2102.10882), then the others.
ENCODINGS = {
    'none': Variant('none', paper='68.2'),
    'learned': Variant('learned', paper='72.2'),
    'sincos': Variant('sincos', paper='72.3'),
    'relative': Variant('relative', paper='70.5'),
    'peg': Variant('peg', paper='72.4'),
    'rope': Variant('rope'),
    'alibi': Variant('alibi'),
    'lookhere': Variant('lookhere'),
    'peg, replicated border': Variant('peg', REPLICATED, paper='70.5'),
    'rope, normalized': Variant('rope', options=NORMALIZED),
    'rope+peg': Variant('rope+peg'),
    'learned+peg': Variant('learned+peg', paper='72.9'),
}
REFERENCE = 'peg'
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


def compare_encodings(lab: Lab) -> Answer:
    """Which encoding, and does it carry over to other sizes? All of them with the same size, data,
    budget and tuning."""
    preset = lab.preset
    settings = []
    for variant in ENCODINGS.values():
        settings.append(
            RunSettings(
                **variant.of_model,
                seed=lab.seed,
                steps=preset.steps,
                batch=preset.batch,
                pictures=preset.pictures,
                scales=preset.scales,
                scaled_pictures=preset.scaled_pictures,
            )
        )
    tuning = [replace(one, scales=()) for one in settings]
    trained = lab.train(ENCODINGS, settings, lab.tune(tuning, mean_accuracy))
    tables = [metrics_table(trained), differences_table(trained)]
    found = {one.name: [run.metrics['sizes'] for run in one.runs] for one in trained}
    for metric, what in MEASURES.items():
        title = f'{what} in %, at other sizes'
        tables.append(sizes_table(found, sizes_of(preset.scales), metric, title))
    draw_examples(lab.folder / 'encodings-pictures.png', lab.seed)
    draw_comparison(lab.folder / 'encodings.png', trained)
    draw_sizes(lab.folder / 'encodings-sizes.png', found, preset.scales)
    pictures = ['encodings-pictures.png', 'encodings.png', 'encodings-sizes.png']
    data = [one.data() for one in trained]
    return Answer('encodings', 'Which encoding?', notes_of(lab), tables, pictures, data)


def notes_of(lab: Lab) -> list[str]:
    """How the models are trained and tested."""
    pictures = lab.preset.pictures
    return [
        PROTOCOL.format(rates=len(lab.preset.rates)),
        CEILING.format(pictures=pictures, error=0.5 / math.sqrt(pictures)),
        *NOTES,
    ]


def bag_ceilings() -> dict[str, float]:
    """The best accuracies of an observer without position, also on average over the tasks."""
    return {'position': metric_of(ceilings(), 'position'), **ceilings()}


def metrics_table(trained: Sequence[Trained]) -> Table:
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
    return Table('Accuracy in %', header, rows)


def differences_table(trained: Sequence[Trained]) -> Table:
    """Differences from a PEG, paired by seed."""
    (base,) = [one for one in trained if one.name == REFERENCE]
    others = [one for one in trained if one is not base]
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
