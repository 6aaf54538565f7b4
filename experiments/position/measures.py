"""The questions about what a model knows, for the lab's trained models and for any other."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from cpvt_pyramid.lab.probes import (
    HIGH_NORM,
    KINDS,
    RINGS,
    Subject,
    attention_weights,
    canvas_size,
    fit_probe,
    has_padded_convolutions,
    images_of,
    padding_drift,
    padding_pattern,
    photographs,
    position_similarity,
    probe_position,
    shift_drift,
    stride_of,
    token_norms,
    with_replicated_borders,
)  # fmt: skip
from experiments import figures
from experiments.report import LabAnswer, Table, make_table
from experiments.statistics import estimate
from experiments.training import one_thread

from .laboratory import Lab, Variant, metric_of
from .runs import Result, answer, evaluate_answers

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # of a padded picture's area
SHIFTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # pixels
MOVED_CELLS = 2  # that a window on a larger picture moves by at most
SIGNAL_IMAGES = 16  # times as many images of the lab's models for the position signal
RING_SIDE = 6  # tokens of a map on which distances from the border are shown
STEADY = ('leftmost', 'topmost', 'above', 'pattern', 'control')  # answers that shifts keep
GAP = {
    'none, GAP': Variant('none', class_token=False),
    'learned, GAP': Variant('learned', class_token=False),
    'peg, GAP': Variant('peg', class_token=False),
}
RANDOM_INPUT = 'Input: noise, images of one color, and crops of photographs in random orientation.'


class Group(NamedTuple):
    """A row of a table: the same model with several seeds, or one model for several images."""

    name: str
    subjects: list[Subject]  # one for each seed
    runs: list[Result]  # their trainings; none for a model from elsewhere
    side: int  # of the images, in pixels
    step: int  # that sides of images may grow by, in pixels
    images: int  # per seed

    def stages(self) -> list[str]:
        count = len(self.subjects[0].maps(torch.zeros(2, 3, self.side, self.side)))
        kind = 'block' if self.runs and self.runs[0].settings.model == 'column' else 'map'
        return [f'{kind} {i}' for i in range(count)]


def groups_of(lab: Lab, models: Sequence[Subject], side: int, gap: bool = False) -> list[Group]:
    """The given models, or if there are none the lab's trained ones.

    Args:
        lab: trains what is missing.
        models: to measure instead.
        side: of their images, in pixels.
        gap: also the lab's models that read the mean of the map.
    """
    images = lab.preset.images
    if models:
        return [Group(s.name, [s] * lab.seeds, [], side, step_of(s, side), images) for s in models]
    groups = []
    for model in lab.preset.models:
        variants = lab.encodings(model)
        if gap and model == 'column':
            variants |= {name: v for name, v in GAP.items() if v.position in variants}
        for one in lab.train(variants, model):
            name = one.name if len(lab.preset.models) == 1 else f'{model} {one.name}'
            loaded = [run.load() for run in one.runs]
            subjects = [Subject(name, m.backbone) for m in loaded]
            cell = loaded[0].cell
            groups.append(Group(name, subjects, one.runs, 6 * cell, cell, images))
    return groups


def step_of(subject: Subject, side: int) -> int:
    """What images of a model may grow by: a multiple of its strides where they divide the side."""
    maps = subject.maps(torch.zeros(1, 3, side, side))
    step = math.lcm(*(stride_of(side, map_.shape[2]) for map_ in maps))
    return step if side % step == 0 else math.gcd(side, 32)


def over_seeds(lab: Lab, group: Group, measure: Callable, label: str) -> list:
    """`measure(subject, seed)` of each seed, with one thread."""
    with one_thread():
        seeds = range(lab.seed, lab.seed + lab.seeds)
        pairs = list(zip(group.subjects, seeds))
        return [measure(s, seed) for s, seed in tqdm(pairs, f'{label} {group.name}', disable=None)]


def cell_text(values: Sequence[float], percent: bool = True, sign: bool = False) -> str:
    """A cell of a table; a dash where there is no value."""
    values = np.asarray(values, float)
    finite = np.isfinite(values)
    return estimate(values).show(percent, sign) if finite.all() else '-'


def stage_cells(found: Sequence[Sequence], name: str, percent: bool = True) -> list[str]:
    """For each stage the cell of a measure, found for each seed and stage."""
    return [cell_text([getattr(f, name) for f in seeds], percent) for seeds in zip(*found)]


def origin_of(groups: Sequence[Group]) -> str:
    if groups[0].runs:
        return 'The trained models of the question "encodings", one for each seed.'
    origin = (
        f'Models that were given, {groups[0].side} x {groups[0].side} pixels; the intervals are '
        'over images, not over trainings.'
    )
    zero = {g.name: zero_layers(g.subjects[0].model) for g in groups}
    if named := ', '.join(f'{name}: {count}' for name, count in zero.items() if count):
        origin += (
            f' Layers whose weights are all 0 ({named}) add nothing. At the end of residual '
            'branches, where many networks start with them, they hide what the branch does, so '
            'that features of an untrained model may not drift at all.'
        )
    return origin


def zero_layers(model: nn.Module) -> int:
    """The number of layers whose weights are all 0."""
    weights = (getattr(module, 'weight', None) for module in model.modules())
    return sum(isinstance(w, Tensor) and w.numel() > 1 and not w.any() for w in weights)


# probe


def measure_probe(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    """Where position lives: what can be read from features, and what padding puts there."""
    groups = groups_of(lab, models, side)
    r2, ppp, data = [], [], {}
    header: list[str] = []
    rows_of_figure = []
    for group in groups:
        stages = group.stages()
        header = header if len(header) > len(stages) else stages
        arms = {group.name: lambda s: s}
        if has_padded_convolutions(group.subjects[0].model):
            arms[f'{group.name}, border replaced'] = lambda s: Subject(
                s.name, with_replicated_borders(s.model)
            )
        for name, change in arms.items():
            found = over_seeds(lab, group, partial(probe_group, group, change), 'probe')
            for kind in KINDS:
                r2.append([name, kind, *stage_cells([f[kind] for f in found], 'r2', False)])
            for metric, title in (('mae', 'MAE'), ('chance', 'MAE by chance'), ('snr', 'SNR')):
                cells = stage_cells([f['ppp'] for f in found], metric, percent=False)
                ppp.append([name, title, *cells])
            data[name] = [
                {**{kind: [{'r2': r.r2, 'rings': r.rings, 'penalty': r.probe.penalty}
                           for r in f[kind]] for kind in KINDS},
                 'ppp': [{**p._asdict(), 'map': p.map.tolist()} for p in f['ppp']]}
                for f in found
            ]  # fmt: skip
            rows_of_figure.append((name, found))
    tables = [
        make_table('R squared of row and column, held-out images', ['', 'images', *header], r2),
        make_table('Position-information pattern from padding (PPP), photographs',
                   ['', 'metric', *header], ppp),
    ]  # fmt: skip
    draw_probe(lab.folder / 'probe.png', rows_of_figure)
    notes = [
        origin_of(groups),
        RANDOM_INPUT,
        'Ridge regression from standardized features to row and column, fitted on half of the '
        'images and measured on the others; the penalty is chosen on a third of the first half. '
        'R squared can be negative: worse than a constant guess.',
        'Border replaced: the same weights, but every padded convolution repeats the border '
        'instead of adding zeros.',
        'PPP (arXiv 2206.01202): the mean over images of the difference between features with the '
        "model's own padding and with real pixels in place of the padding. MAE is in standard "
        'deviations of the features; by chance, so few images give the second line without any '
        'pattern. SNR is the energy of that mean, less what is due to chance, over the variance '
        'of the difference across images. How we read the paper is in '
        'experiments/position/findings/protocol.md.',
    ]
    return LabAnswer('probe', 'Where does position live?', notes, tables, ['probe.png'], data)


def probe_group(group: Group, change: Callable, subject: Subject, seed: int) -> dict[str, list]:
    """What `change(subject)` knows of position: from each kind of images, and from padding."""
    subject = change(subject)
    step = math.lcm(32, group.step)
    margin = -(-group.side // 4 // step) * step
    large = photographs(group.images, group.side + 2 * margin, seed, 'test')
    images = {kind: images_of(kind, group.images, group.side, seed) for kind in KINDS}
    found = {kind: probe_position(subject, images[kind], seed) for kind in KINDS}
    return {**found, 'ppp': padding_pattern(subject, large, margin)}


def draw_probe(path: Path, rows: Sequence[tuple[str, list]]) -> None:
    """For each model R squared by stage and by distance from the border, and its pattern."""
    most = max(len(found[0]['ppp']) for _, found in rows)
    shade = {'noise': '#2c7fb8', 'constant': figures.GREY, 'natural': figures.ACCENT}
    size = (5.6 + 1.4 * most, 1.35 * len(rows) + 0.9)
    ratios = {'width_ratios': [1.7, 1.7, *[1] * most]}
    with figures.figure(path, len(rows), 2 + most, size, gridspec_kw=ratios) as (fig, axes):
        top = [
            max(
                np.mean([f['ppp'][i].map.max() for f in found])
                for _, found in rows
                if i < len(found[0]['ppp'])
            )
            for i in range(most)
        ]
        for row, ((name, found), line) in enumerate(zip(rows, axes), 1):
            sides = [min(pattern.map.shape) for pattern in found[0]['ppp']]
            stages = len(sides)
            deepest = max((i for i in range(stages) if sides[i] >= RING_SIDE), default=0)
            for kind in KINDS:
                values = np.array([[r.r2 for r in f[kind]] for f in found])
                line[0].plot(values.mean(0).clip(-0.1), 'o-', ms=3, color=shade[kind], label=kind)
                rings = np.array([f[kind][deepest].rings for f in found])
                middle = (np.arange(RINGS) + 0.5) / RINGS
                mean = rings.mean(0).clip(-0.1)
                known = np.isfinite(mean)  # a small map has no token at some distances
                line[1].plot(middle[known], mean[known], 'o-', ms=3, color=shade[kind])
            for axis in line[:2]:
                axis.set_ylim(-0.16, 1.06)
                axis.set_yticks((0, 0.5, 1))
                axis.tick_params(labelbottom=row == len(rows))
            line[1].set_xlim(0, 1)
            line[1].text(0.97, 0.85, f'stage {deepest}', ha='right', transform=line[1].transAxes)
            line[0].set_xlim(-0.2, most - 0.8)
            line[0].set_xticks(range(most))
            figures.name_row(line[0], name)
            for i, axis in enumerate(line[2:]):
                figures.without_axes(axis)
                if i < stages:
                    pattern = torch.stack([f['ppp'][i].map for f in found]).mean(0)
                    axis.imshow(pattern, vmin=0, vmax=max(top[i], 1e-6), cmap='magma')
        axes[0, 0].legend(fontsize=7.5)
        axes[0, 0].set_title('R² by stage')
        axes[0, 1].set_title('R² from the border')
        axes[-1, 0].set_xlabel('stage')
        axes[-1, 1].set_xlabel('0: border, 1: center')
        for i, axis in enumerate(axes[0, 2:]):
            axis.set_title(f'PPP, stage {i}\n0 to {top[i]:.2g}')
        fig.suptitle('Where position can be read (R² below -0.1 is drawn there), and what padding '
                     'adds to features')  # fmt: skip


# padding


def measure_padding(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    """Batch padding as a false position signal, with and without the mask."""
    groups = groups_of(lab, models, side)
    data, drift_rows, moved_rows, metric_rows = {}, [], [], []
    panels = figures.Panels()
    for group in groups:
        sizes = padded_sizes(group)
        for masked in (False, True) if group.subjects[0].masks else (False,):
            arm = 'masked' if masked else 'unmasked'
            name = f'{group.name}, {arm}'
            found = over_seeds(lab, group, partial(pad_group, group, sizes, masked), 'padding')
            last = [[of_share[-1] for of_share in f] for f in found]
            drift_rows.append([name, *stage_cells(last, 'features')])
            moved_rows.append([name, *stage_cells(last, 'displacement')])
            for measure, title in (('features', 'drift of the features, %'),
                                   ('displacement', 'displacement, % of the side')):  # fmt: skip
                panels.add(title, group.name, {arm: [getattr(f[-1], measure) for f in last]})
            data[name] = {'drift': [[[stage._asdict() for stage in s] for s in f] for f in found]}
            if group.runs:
                changes = over_seeds(
                    lab, group._replace(subjects=group.runs),
                    lambda run, seed, sizes=sizes, masked=masked: padded_metrics(
                        run, sizes, masked, lab.preset.scaled_pictures), 'padded answers',
                )  # fmt: skip
                data[name]['metrics'] = changes
                for metric in ('position', 'mIoU', 'AP'):
                    values = [[metric_of(c, metric) - metric_of(f[0], metric) for c in f]
                              for f in changes]  # fmt: skip
                    panels.add(f'{metric}, points', group.name, {arm: [v[-1] for v in values]})
                    cells = [cell_text(column, sign=True) for column in zip(*values)]
                    metric_rows.append([name, metric, *cells])
    shares = [1 - groups[0].side ** 2 / math.prod(size) for size in padded_sizes(groups[0])]
    header = [f'{share:.0%}' for share in shares]
    tables = [
        Table('Drift of the last map inside the images, % of its norm', ['', *header], drift_rows),
        Table('Displacement of the probed position, % of the side', ['', *header], moved_rows),
    ]
    if metric_rows:
        tables.append(Table('Change of the answers, in points', ['', 'metric', *header],
                            metric_rows))  # fmt: skip
    panels.draw(lab.folder / 'padding.png', f'What padding of {header[-1]} of the area changes')
    notes = [
        origin_of(groups),
        'Photographs alone, and with zeros at the right and bottom until the given share of the '
        'area is padding. Masked: the model is told the true sizes (`valid`). A masked model that '
        'is exact drifts by rounding only.',
    ]
    return LabAnswer(
        'padding', 'Does batch padding look like a position?', notes, tables, ['padding.png'], data
    )


def pad_group(
    group: Group, sizes: Sequence[tuple[int, int]], masked: bool, subject: Subject, seed: int
) -> list:
    """The drift of each map at each size of a padded batch."""
    images = photographs(group.images, group.side, seed, 'test')
    probes = [fit_probe(m, seed) for m in subject.maps(images)]
    return [padding_drift(subject, images, size, masked, probes) for size in sizes]


def padded_sizes(group: Group) -> list[tuple[int, int]]:
    """Heights and widths of padded images, one for each share that can be had."""
    side = group.side
    return list(dict.fromkeys(canvas_size((side, side), share, group.step) for share in SHARES))


def padded_metrics(
    result: Result, sizes: Sequence[tuple[int, int]], masked: bool, pictures: int
) -> list[dict[str, float]]:
    """The metrics of a trained model in batches of these sizes."""
    model = result.load()
    scenes = result.settings.draw('test', pictures, stream=0)
    return [evaluate_answers(model, scenes, pad=size, masked=masked) for size in sizes]


# shift


def measure_shift(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    """Translations: whether features move with the picture, and answers stay."""
    groups = groups_of(lab, models, side, gap=True)
    data, rows, answers = {}, [], []
    panels = figures.Panels()
    for group in groups:
        marks = {'shift by half a token': group.step // 2, 'shift by one token': group.step}
        found = over_seeds(lab, group, partial(shift_group, group), 'shift')
        data[group.name] = {'drift': [[[s._asdict() for s in one] for one in f] for f in found]}
        for part in ('interior', 'border'):
            values = np.array([[getattr(one[-1], part) for one in f] for f in found]).T
            rows.append([group.name, part, *map(cell_text, values)])
            drift = dict(zip(SHIFTS, values))
            panels.add(f'drift of the last map, {part}, %', group.name, {
                mark: drift[shift] for mark, shift in marks.items() if shift in drift
            })  # fmt: skip
        if group.runs:
            same = over_seeds(
                lab, group._replace(subjects=group.runs),
                lambda run, seed: consistency(run, lab.preset.scaled_pictures), 'answers',
            )  # fmt: skip
            data[group.name]['consistency'] = same
            kept = {move: np.array([s[move] for s in same]) for move in same[0]}
            answers.append([group.name, *map(cell_text, kept.values())])
            panels.add('same answer after the shift, %', group.name, {
                mark: kept[shift] for mark, shift in marks.items() if shift in kept
            })  # fmt: skip
    pixels = [f'{s} px' for s in SHIFTS]
    tables = [Table('Drift of the last map, % of its norm', ['', 'part', *pixels], rows)]
    if answers:
        tables.append(Table('Same answer after a shift, % of pictures and tasks',
                            ['', *(f'{m} px' for m in kept)], answers))  # fmt: skip
    panels.draw(lab.folder / 'shift.png', 'What a shift changes')
    notes = [
        origin_of(groups),
        'Two crops of the same image, one lower and further right by the given number of pixels, '
        'compared where both see the same pixels. Border: within a quarter of the side of an edge '
        'of either crop. Where the shift is no multiple of the stride, the first map is '
        'interpolated, and the drift contains what sub-sampling loses.',
        'Answers: the same larger picture through two windows, both of which contain the digits; '
        'of the tasks whose answer a shift does not change. Published: Twins falls from 80.6 to '
        '62.4 % under shifts of a few pixels (arXiv 2306.07470).',
    ]
    return LabAnswer(
        'shift', 'Do features move with the picture?', notes, tables, ['shift.png'], data
    )


def shift_group(group: Group, subject: Subject, seed: int) -> list:
    """The drift of each map for each shift."""
    images = photographs(group.images, group.side + max(SHIFTS), seed, 'test')
    return [shift_drift(subject, images, group.side, shift) for shift in SHIFTS]


def consistency(result: Result, pictures: int) -> dict[int, float]:
    """The share of answers that stay the same after a shift down and right, for each shift that
    keeps the digits in view."""
    model, settings = result.load(), result.settings
    window, most = settings.grid, MOVED_CELLS
    scenes = settings.draw('test', pictures, 0, (window + most, window + most), inset=most)
    side, cell = window * model.cell, model.cell
    first = answer(model, scenes.image[..., :side, :side])
    found = {}
    for s in sorted(
        {*(x for x in SHIFTS if x <= most * cell), *range(cell, most * cell + 1, cell)}
    ):
        second = answer(model, scenes.image[..., s : s + side, s : s + side])
        same = [
            (first.logits[t].argmax(1) == second.logits[t].argmax(1)).double().mean()
            for t in STEADY
        ]
        found[s] = float(np.mean(same))
    return found


# attention


def measure_attention(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    """What chosen queries attend to, and where the position signal is similar."""
    groups = groups_of(lab, models, side)
    data, pictures, rows = {}, [], []
    with one_thread():
        for number, group in enumerate(groups):
            subject = group.subjects[0]
            # Few images hide a weak signal, and the lab's models are cheap.
            count = group.images * (SIGNAL_IMAGES if group.runs else 1)
            images = images_of('natural', count, group.side, lab.seed)
            weights = attention_weights(subject, images[:1])
            maps = subject.maps(images)
            similar = [position_similarity(m) for m in maps]
            spread = [near_and_far(s) for s in similar]
            rows.append([group.name, *(f'{near:.2f} / {far:.2f}' for near, far in spread)])
            data[group.name] = {'similarity': [dict(near=n, far=f) for n, f in spread],
                                'attentions': len(weights)}  # fmt: skip
            name = f'attention-{number}.png'
            draw_attention(lab.folder / name, group.name, images[0], weights, maps, similar)
            pictures.append(name)
    header = ['', *(f'map {i}' for i in range(max(map(len, rows)) - 1))]
    title = 'Cosine similarity of the position signal: neighbours / opposite ends of the map'
    table = make_table(title, header, rows)
    notes = [
        origin_of(groups) + ' Pictures show the first seed.',
        'Attention: the weights of three queries, averaged over the heads, on a photograph; '
        'attentions within windows are left out. Similarity: of the position signal (the mean '
        f'over {count} photographs at a place, less the mean over places) of five places with all '
        'others, from -1 (blue) to 1 (red).',
    ]
    return LabAnswer('attention', 'What is attended to?', notes, [table], pictures, data)


def near_and_far(similarity: Tensor) -> tuple[float, float]:
    """The mean similarity of horizontal and vertical neighbours, and of opposite places."""
    h, w = similarity.shape[:2]
    places = list(product(range(h), range(w)))
    near = [similarity[i, j, i + 1, j] for i, j in places if i + 1 < h]
    near += [similarity[i, j, i, j + 1] for i, j in places if j + 1 < w]
    ends = [(place, (h - 1 - place[0], w - 1 - place[1])) for place in places]
    far = [similarity[a + b] for a, b in ends if a != b]
    return float(torch.stack(near).mean()), float(torch.stack(far).mean())


def draw_attention(
    path: Path, name: str, image: Tensor, weights: Sequence[Tensor], maps: Sequence[Tensor],
    similar: Sequence[Tensor],
) -> None:  # fmt: skip
    layers = np.linspace(0, len(weights) - 1, min(len(weights), 8)).astype(int)
    spots = ((0.1, 0.1), (0.5, 0.5), (0.85, 0.7)) if weights else ()
    places = ((0, 0), (0, 1), (0.5, 0.5), (1, 0), (1, 1))
    attended = [[query_map(weights[i], spot) for i in layers] for spot in spots]
    most = max((float(m.max()) for row in attended for m in row if m is not None), default=1.0)
    columns = max(len(maps), len(layers), 1)
    rows = len(spots) + len(places)
    size = (1.6 * (columns + 1) + 0.9, 1.65 * rows)
    right = 1 - 0.95 / size[0]
    space = dict(wspace=0.06, hspace=0.2, left=0.01, right=right, bottom=0.01,
                 top=1 - 0.8 / size[1])  # fmt: skip
    with figures.figure(path, rows, columns + 1, size, 'none', gridspec_kw=space) as (fig, axes):
        for axis in axes.flat:
            figures.without_axes(axis)
        for (y, x), line, grids in zip(spots, axes, attended):
            figures.show_picture(line[0], image)
            side = image.shape[1]
            line[0].plot(x * side, y * side, 'o', ms=7, mfc='none', mec='red', mew=2)
            for axis, grid in zip(line[1:], grids):
                if grid is not None:
                    drawn = axis.imshow(grid, cmap='viridis', vmin=0, vmax=most)
        if spots:
            figures.scale_beside(axes[: len(spots)], drawn, right, 'attention')
            figures.name_columns(axes[0], ['query', *(f'attention {i}' for i in layers)])
        for place, line in zip(places, axes[len(spots) :]):
            blank = np.zeros((9, 9))
            blank[tuple(round(8 * p) for p in place)] = 1
            line[0].imshow(blank, cmap='Greys', vmin=-0.15)
            for axis, of_map in zip(line[1:], similar):
                at = tuple(round(p * (n - 1)) for p, n in zip(place, of_map.shape))
                drawn = axis.imshow(of_map[at], cmap='RdBu_r', vmin=-1, vmax=1)
        figures.scale_beside(axes[len(spots) :], drawn, right, 'cosine similarity')
        titles = ['similarity to', *(f'map {i}' for i in range(len(maps)))]
        figures.name_columns(axes[len(spots)], titles)
        fig.suptitle(f'{name}: attention of three queries, similarity of the position signal')


def query_map(weights: Tensor, spot: tuple[float, float]) -> Optional[Tensor]:
    """(h, w), the attention of the query at a spot, averaged over heads; None if the keys are no
    square map. A class token, if there is one, is left out."""
    mean = weights.mean(0)
    sides = [math.isqrt(n) for n in mean.shape]
    first = [n - side**2 for n, side in zip(mean.shape, sides)]
    if not all(extra in (0, 1) for extra in first) or sides[1] < 2:
        return None
    mean = mean[first[0] :, first[1] :]
    at = [min(sides[0] - 1, int(s * sides[0])) for s in spot]
    return mean[at[0] * sides[0] + at[1]].view(sides[1], sides[1])


# registers


def measure_registers(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    """High-norm tokens by stage and input size."""
    groups = groups_of(lab, models, side)
    scales = (1, 2)
    data, rows, grids = {}, [], {}
    for group in groups:
        for scale in scales:
            size = group.side * scale
            found = over_seeds(
                lab, group, lambda subject, seed, group=group, size=size: token_norms(
                    subject, photographs(group.images, size, seed, 'test')), 'registers',
            )  # fmt: skip
            name = f'{group.name}, {size} px'
            rows.append([name, 'largest / median', *stage_cells(found, 'largest', percent=False)])
            rows.append([name, '% above 4 medians', *stage_cells(found, 'share')])
            data[name] = [[{'largest': n.largest, 'share': n.share} for n in f] for f in found]
            grids[group.name, scale] = [n.norms[0] / n.norms.median() for n in found[0]]
    most = max(map(len, rows)) - 2
    table = make_table('High-norm tokens', ['', '', *(f'map {i}' for i in range(most))], rows)
    draw_registers(lab.folder / 'registers.png', [g.name for g in groups], scales, most, grids)
    notes = [
        origin_of(groups),
        'Norms of the tokens on photographs, in medians of their map. arXiv 2309.16588 finds '
        'outliers in large models after long training; tiny models need not have any.',
    ]
    return LabAnswer(
        'registers', 'Are there high-norm tokens?', notes, [table], ['registers.png'], data
    )


def draw_registers(
    path: Path,
    names: Sequence[str],
    scales: Sequence[int],
    most: int,
    grids: dict[tuple[str, int], list[Tensor]],
) -> None:
    """A row for each model: the norms of each map for one image, at each size."""
    columns = most * len(scales)
    size = (1.15 * columns + 2.4, 1.35 * len(names) + 0.8)
    with figures.figure(path, len(names), columns, size, 'compressed') as (fig, axes):
        for axis in axes.flat:
            figures.without_axes(axis)
        for name, line in zip(names, axes):
            for j, scale in enumerate(scales):
                for i, grid in enumerate(grids[name, scale]):
                    axis = line[j * most + i]
                    picture = axis.imshow(grid, vmin=0, vmax=HIGH_NORM, cmap='inferno')
                    where = f'map {i}, size x {scale}\n' if name == names[0] else ''
                    axis.set_title(f'{where}up to {float(grid.max()):.1f}', fontsize=8)
            figures.name_row(line[0], name)
        fig.colorbar(picture, ax=axes, shrink=0.6, aspect=40, label='norm / median')
        fig.suptitle('Norms of the tokens of one photograph')


MEASURED = {
    'probe': measure_probe,
    'padding': measure_padding,
    'shift': measure_shift,
    'attention': measure_attention,
    'registers': measure_registers,
}
