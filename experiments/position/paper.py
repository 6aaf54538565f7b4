"""The CPVT paper's own experiment, at desk scale: classifiers of photographs, trained at one size,
tested on the same photographs resized, and the paper's ablations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import figures
from experiments.report import Answer, Table
from experiments.statistics import Estimate, estimate, holm, paired_difference, show_p, with_p

from .classifiers import ARCH, SIDE, ClassifierSettings, size_name
from .encodings import SIGNIFICANT
from .laboratory import NORMALIZED, REPLICATED, Lab, Trained, Variant

NONE = 'no position'
LEARNED = 'learned table'
SINCOS = 'sines and cosines'
RELATIVE = 'relative position'
PEG = 'PEG after block 0'
FIRST_HALF = 'PEG after each of blocks 0 to 2'
LEARNED_PEG = 'learned table and PEG'
ROPE = 'RoPE'
ROPE_NORMALIZED = 'RoPE, normalized coordinates'
BEFORE = 'PEG before block 0'
AFTER_1 = 'PEG after block 1'
AFTER_3 = 'PEG after block 3'
AFTER_4 = 'PEG after block 4'
COVERS = 'PEG of 27x27 before block 0'
QUERIES = 'PEG for queries and keys alone'
FROZEN = 'random, fixed PEG'
POINTWISE = '1x1 convolution after every block'
BORDER = 'PEG, replicated border'
GAP = ', GAP'


def paper_block(i: int) -> int:
    """The block here for block i of the paper's 12, or -1: before the first. With a class token,
    nothing reads the map of the last block."""
    return min(i * ARCH.depth // 12, ARCH.depth - 2)


def after(*blocks: int) -> tuple:
    """PEGs after these blocks of the paper's 12."""
    return (('after', tuple(dict.fromkeys(map(paper_block, blocks)))),)


# Tested at all sizes, with a class token and with GAP. `paper` is top-1 on ImageNet.
ENCODINGS = {
    NONE: Variant('none', paper='68.2'),
    LEARNED: Variant('learned', paper='72.2'),
    SINCOS: Variant('sincos', paper='72.3'),
    RELATIVE: Variant('relative', options=(('reach', 8),), paper='70.5'),
    PEG: Variant('peg', paper='72.4'),
    FIRST_HALF: Variant('peg', after(*range(6)), paper='73.4'),
    LEARNED_PEG: Variant('learned+peg', paper='72.9'),
    ROPE: Variant('rope'),
    ROPE_NORMALIZED: Variant('rope', options=NORMALIZED),
}
PAPER_GAP = {FIRST_HALF: '74.9'}
# Tested at the size of the training, with a class token.
ABLATIONS = {
    BEFORE: Variant('peg', after(-1), paper='70.6'),
    AFTER_1: Variant('peg', after(3), paper='about 72.4'),
    AFTER_3: Variant('peg', after(6)),
    AFTER_4: Variant('peg', after(10)),
    COVERS: Variant('peg', (*after(-1), ('kernel_size', 27)), paper='72.5'),
    QUERIES: Variant('peg', (('qk_only', True),), paper='71.3'),
    FROZEN: Variant('peg', (('frozen', True),), paper='71.3'),
    POINTWISE: Variant(
        'peg', (('after', 'all'), ('conv', 'dense'), ('kernel_size', 1)), paper='68.6'
    ),
    BORDER: Variant('peg', REPLICATED, paper='70.5'),
}


Rows = Mapping[str, Trained]


class Claim(NamedTuple):
    """A difference that the paper reports: the first (row, metric) less the second."""

    text: str
    value: tuple[str, str]
    base: tuple[str, str]
    paper: float  # points on ImageNet; NaN if the paper's text only says which is better
    sign: int  # of what it claims; 0: about the same


NEGLIGIBLE = 0.5  # points; with less the paper claims no difference
MARGIN = 1.0  # points of our accuracy that are about the same
SAME_SIZE = 3  # factor by which our difference may be larger or smaller than the paper's
LEAST_SEEDS = 3  # of a verdict: two runs can be equal by chance


def between(row: str, base: str, paper: float, metric: str = 'accuracy') -> Claim:
    """A claim about two rows in the same test."""
    where = '' if metric == 'accuracy' else f', at {metric}'
    return Claim(
        f'{row}, against {base}{where}', (row, metric), (base, metric), paper, sign_of(paper)
    )


def resizing(row: str, side: int, paper: float) -> Claim:
    """A claim about what resizing changes."""
    at, base = size_name(side), size_name(SIDE)
    return Claim(f'{row}: {at}, against {base}', (row, at), (row, base), paper, sign_of(paper))


def sign_of(points: float) -> int:
    """The sign of a claimed difference; 0 if it is negligible."""
    return 0 if abs(points) < NEGLIGIBLE else int(math.copysign(1, points))


# CPVT (arXiv 2102.10882); 384, 448 and 512 pixels are 48, 56 and 64 here.
OF_SIZES = (
    resizing(LEARNED, 48, 71.2 - 72.2),
    resizing(LEARNED, 56, 68.8 - 72.2),
    resizing(LEARNED, 64, 65.9 - 72.2),
    resizing(SINCOS, 48, 70.8 - 72.3),
    resizing(PEG, 48, 73.2 - 72.4),
    resizing(PEG, 56, 71.8 - 72.4),
    resizing(PEG, 64, 70.3 - 72.4),
    resizing(FIRST_HALF, 48, 74.2 - 73.4),
    resizing(FIRST_HALF, 56, 72.6 - 73.4),
    resizing(FIRST_HALF, 64, 70.8 - 73.4),
    between(FIRST_HALF, LEARNED, 74.2 - 71.2, size_name(48)),
    between(FIRST_HALF, LEARNED, 72.6 - 68.8, size_name(56)),
    between(FIRST_HALF, LEARNED, 70.8 - 65.9, size_name(64)),
)
OF_TRAINING_SIZE = (
    between(NONE, LEARNED, 68.2 - 72.2),
    between(SINCOS, LEARNED, 72.3 - 72.2),
    between(RELATIVE, LEARNED, 70.5 - 72.2),
    between(PEG, LEARNED, 72.4 - 72.2),
    between(FIRST_HALF, LEARNED, 73.4 - 72.2),
    between(FIRST_HALF, PEG, 73.4 - 72.4),
    between(LEARNED_PEG, PEG, 72.9 - 72.4),
    between(FIRST_HALF + GAP, FIRST_HALF, 74.9 - 73.4),
    between(BEFORE, PEG, 70.6 - 72.4),
    between(AFTER_1, PEG, 0.0),
    between(AFTER_3, PEG, math.nan)._replace(sign=-1),
    between(AFTER_4, PEG, math.nan)._replace(sign=-1),
    between(COVERS, BEFORE, 72.5 - 70.6),
    between(COVERS, PEG, 72.5 - 72.4),
    between(QUERIES, NONE, 71.3 - 68.2),
    between(QUERIES, PEG, 71.3 - 72.4),
    between(FROZEN, NONE, 71.3 - 68.2),
    between(FROZEN, PEG, 71.3 - 72.4),
    between(POINTWISE, NONE, 68.6 - 68.2),
    between(BORDER, PEG, 70.5 - 72.4),
)

NOTES = (
    'The data is Fashion-MNIST: 55,000 photographs of products to train with, 5,000 to choose the '
    'learning rate, and 10,000 to test. A photograph has 28 x 28 pixels, which a patch of 2 makes '
    '14 x 14 tokens, as many as the paper has. Models: CPVT with {depth} blocks of {dim} channels. '
    'Training photographs are random crops of {area:.0%} to 100% of the area, resized to 28 pixels '
    'and mirrored at random; in the paper, whose training is that of DeiT, they begin at 8%. Muon '
    'trains the matrices of the blocks, AdamW the other parameters; in the paper AdamW trains all.',
    'All rows take one learning rate, as in the paper. It is the best of {rates} for the learned '
    'table, with a seed and photographs that no table has: if it favors a row, it is that one.',
    "Blocks -1, 0, 3, 6 and 10 of the paper's 12 are -1, 0, 1, 3 and 4 of the {depth} here, and 0 "
    'to 5 are 0 to 2. The kernel of 27x27 covers the map here as there. "1x1 after every block" '
    'leaves out the last, whose map nothing reads.',
    '"px" are photographs resized by bicubic interpolation, {resized} for each seed. A larger '
    'picture shows nothing that the small one does not: in ImageNet, it does.',
    "± is the 95% interval of Student's t over seeds (weights, training photographs and the choice "
    'of resized photographs change with the seed; the 10,000 of the test do not). p is paired by '
    'seed and adjusted for the directed claims of its table (Holm).',
    f'Verdicts: "cannot tell" if p is {SIGNIFICANT} or more, or with fewer than {LEAST_SEEDS} '
    'seeds; "contradicts" if our difference has the other sign; "agrees" if it has the same sign '
    f"and differs from the paper's by at most a factor of {SAME_SIZE}, or the paper's is in our "
    'interval; "same direction" if it has the same sign and another size, or the paper gives no '
    f'size. Where the paper has less than {NEGLIGIBLE} points, it claims no difference: ours '
    f'"agrees" if the interval is within ±{MARGIN:g} point, "contradicts" if the interval is '
    'outside, and else "cannot tell". Failed runs are counted and stay in the means.',
    'Blocks 6 and 10: the paper says that 0 and 3 are the best; we have no figures of the others.',
)


def compare_with_paper(lab: Lab) -> Answer:
    """Does a small model agree with the CPVT paper, row by row?"""
    trained = train_rows(lab)
    rows = {one.name: one for one in trained}
    tables = [
        claims_table(rows, OF_SIZES, "The paper's claims about larger pictures"),
        claims_table(rows, OF_TRAINING_SIZE, "The paper's claims at the size of the training"),
        sizes_table(rows, sides_of(lab)),
        changes_table(rows, sides_of(lab)),
        rows_table(rows),
        against_learned_table(rows, sides_of(lab)),
    ]
    picture = 'paper.png'
    draw_sizes(lab.folder / picture, rows, sides_of(lab))
    notes = [
        note.format(
            depth=ARCH.depth,
            dim=ARCH.dim,
            area=ClassifierSettings.least_area,
            rates=len(lab.preset.rates),
            resized=lab.preset.scaled_pictures,
        )
        for note in NOTES
    ]
    title = "The CPVT paper's own experiment, on Fashion-MNIST"
    data = [one.data() for one in trained]
    return Answer('paper', title, notes, tables, [picture], data)


# Training


def all_rows() -> dict[str, Variant]:
    """Every row, in the order in which a seed's models are trained: encodings, then ablations."""
    gap = {}
    for name, variant in ENCODINGS.items():
        paper = PAPER_GAP.get(name, '')
        gap[name + GAP] = variant._replace(class_token=False, paper=paper)
    return {**ENCODINGS, **gap, **ABLATIONS}


def sides_of(lab: Lab) -> list[int]:
    """Sides of the test photographs in pixels, of which the first is that of the training."""
    return [round(SIDE * scale) for scale in lab.preset.scales]


def settings_of(lab: Lab, name: str, variant: Variant) -> ClassifierSettings:
    """The settings of a row's training, but for seed and learning rate."""
    preset = lab.preset
    return ClassifierSettings(
        **variant.of_model,
        steps=preset.steps,
        batch=preset.batch,
        pictures=preset.pictures,
        sizes=() if name in ABLATIONS else tuple(sides_of(lab)),
        resized=preset.scaled_pictures,
        data=lab.data,
    )


def train_rows(lab: Lab) -> list[Trained]:
    """Train the models of every row, seed by seed."""
    rows = all_rows()
    settings = [settings_of(lab, name, variant) for name, variant in rows.items()]
    compared = replace(settings[list(rows).index(LEARNED)], seed=lab.seed, sizes=())
    (lr,) = lab.tune([compared], accuracy_of)
    return lab.train(rows, settings, [lr] * len(rows))


def accuracy_of(metrics: dict[str, float]) -> float:
    """What the learning rate is chosen by."""
    return metrics['accuracy']


# Tables


def difference(rows: Rows, value: tuple[str, str], base: tuple[str, str]) -> Estimate:
    """The mean difference of two (row, metric), paired by seed."""
    values, bases = (rows[name].scores(metric) for name, metric in (value, base))
    return paired_difference(values, bases)


def claims_table(rows: Rows, claims: Sequence[Claim], title: str) -> Table:
    """The paper's figure, ours and its interval, and whether they agree, for each claim."""
    found = []
    for claim in claims:
        tested = [metric in rows[name].runs[0].metrics for name, metric in claim[1:3]]
        if all(tested):  # a preset may have fewer sizes
            found.append((claim, difference(rows, claim.value, claim.base)))
    p_values = [math.nan if claim.sign == 0 else one.p for claim, one in found]
    cells = []
    for (claim, one), p in zip(found, holm(p_values)):
        paper = 'worse' if math.isnan(claim.paper) else f'{claim.paper:+.1f}'
        low, high = interval_of(one)
        interval = '' if math.isnan(one.half) else f'{low:+.1f} to {high:+.1f}'
        shown_p = '' if math.isnan(p) else show_p(p)
        ours = f'{100 * one.mean:+.1f}'
        cells.append(
            [claim.text, paper, ours, interval, shown_p, verdict(claim, one, p), str(one.count)]
        )
    header = ['', 'paper', 'ours', '95% interval', 'p, adjusted', 'verdict', 'seeds']
    return Table(f'{title}: differences in points of accuracy', header, cells)


def verdict(claim: Claim, found: Estimate, p: float) -> str:
    """How our difference compares with the claimed one, by sign and by size."""
    if found.count < LEAST_SEEDS:
        return 'cannot tell'
    if claim.sign == 0:
        return verdict_on_no_difference(found)
    if math.isnan(p) or p >= SIGNIFICANT:
        return 'cannot tell'
    if found.mean * claim.sign < 0:
        return 'contradicts'
    return 'agrees' if has_size_of(claim.paper, found) else 'same direction'


def verdict_on_no_difference(found: Estimate) -> str:
    """The paper claims that there is no difference."""
    low, high = interval_of(found)
    if -MARGIN < low and high < MARGIN:
        return 'agrees'
    return 'contradicts' if low > MARGIN or high < -MARGIN else 'cannot tell'


def has_size_of(paper: float, found: Estimate) -> bool:
    """Whether a difference of the paper's sign has about its size; False if that is unknown."""
    if math.isnan(paper):
        return False
    low, high = interval_of(found)
    if low <= paper <= high:
        return True
    ratio = 100 * found.mean / paper
    return 1 / SAME_SIZE <= ratio <= SAME_SIZE


def interval_of(found: Estimate) -> tuple[float, float]:
    """The 95% interval in points."""
    return 100 * (found.mean - found.half), 100 * (found.mean + found.half)


def resized_rows(rows: Rows) -> dict[str, Trained]:
    """The rows that are tested at several sizes."""
    return {name: row for name, row in rows.items() if name not in ABLATIONS}


def sizes_table(rows: Rows, sides: Sequence[int]) -> Table:
    cells = []
    for name, row in resized_rows(rows).items():
        metrics = [estimate(row.scores(size_name(side))).show() for side in sides]
        cells.append([name, *metrics, str(len(row.runs))])
    return Table('Accuracy in %, by size', ['', *map(size_name, sides), 'seeds'], cells)


def changes_table(rows: Rows, sides: Sequence[int]) -> Table:
    """What resizing changes, in points, on the same photographs."""
    first, *others = map(size_name, sides)
    cells = []
    for name in resized_rows(rows):
        changes = []
        for size in others:
            changes.append(difference(rows, (name, size), (name, first)).show(sign=True))
        cells.append([name, *changes])
    title = f'Change of the accuracy from {first}, in points'
    return Table(title, ['', *others], cells)


def against_learned_table(rows: Rows, sides: Sequence[int]) -> Table:
    """How much more resizing changes than in the learned table, with a class token or GAP as it."""
    first, *others = map(size_name, sides)
    found = {}
    for name, row in resized_rows(rows).items():
        base = rows[LEARNED + GAP if name.endswith(GAP) else LEARNED]
        if base is row:
            continue
        for size in others:
            own = row.scores(size) - row.scores(first)
            found[name, size] = paired_difference(own, base.scores(size) - base.scores(first))
    adjusted = dict(zip(found, holm([one.p for one in found.values()])))
    cells = []
    for name in dict.fromkeys(name for name, _ in found):
        shown = [with_p(found[name, size], adjusted[name, size]) for size in others]
        cells.append([name, *shown])
    title = (
        f'Change of the accuracy from {first} less that of the learned table, in points (p, '
        f'adjusted for {len(found)} comparisons, Holm)'
    )
    return Table(title, ['', *others], cells)


def rows_table(rows: Rows) -> Table:
    """Accuracy at the size of the training and parameters; differences from one PEG."""
    none = parameters_of(ENCODINGS[NONE])
    cells = []
    for name, row in rows.items():
        found = difference(rows, (name, 'accuracy'), (PEG, 'accuracy'))
        against = '' if name == PEG else found.show(sign=True)
        added = parameters_of(row.variant) - none
        if not row.variant.class_token:
            added += ARCH.dim  # of the class token, which is no part of an encoding
        failed = sum(run.failed for run in row.runs)
        cells.append(
            [
                name,
                estimate(row.scores('accuracy')).show(),
                against,
                row.variant.paper,
                f'{added:,}',
                str(len(row.runs)),
                str(failed),
                f'{row.lr:g}',
            ]
        )
    header = [
        '',
        'accuracy',
        f'against {PEG}',
        'paper, ImageNet',
        'parameters of the position',
        'seeds',
        'failed',
        'lr',
    ]
    return Table(f'Accuracy in % at {size_name(SIDE)}', header, cells)


def parameters_of(variant: Variant) -> int:
    """The number of parameters of a row's model."""
    settings = ClassifierSettings(**variant.of_model)
    return sum(parameter.numel() for parameter in settings.build().parameters())


def draw_sizes(path: Path, rows: Rows, sides: Sequence[int]) -> None:
    """Accuracy by size, with a class token on the left, with GAP on the right."""
    lines = []
    with figures.figure(path, 1, 2, (11.5, 5.4), sharey=True) as (fig, axes):
        for axis, suffix in zip(axes.flat, ('', GAP)):
            for i, name in enumerate(ENCODINGS):
                columns = [rows[name + suffix].scores(size_name(side)) for side in sides]
                values = 100 * np.transpose(columns)
                drawn = figures.curve(axis, sides, values, marker='o', color=f'C{i}', label=name)
                if name not in {line.get_label() for line in lines}:
                    lines += drawn
            figures.of_sizes(axis, sides)
            axis.set_title('GAP' if suffix else 'class token')
            axis.set_xlabel('side of the test photographs, pixels')
        axes.flat[0].set_ylabel('accuracy, %')
        figures.legend_below(fig, lines, 5)
        fig.suptitle(f'Trained at {SIDE} pixels, tested resized: mean and 95% interval')
