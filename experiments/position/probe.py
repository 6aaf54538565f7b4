"""Where position lives: what can be read from features, and what padding puts there."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cpvt_pyramid.lab.probes import (
    KINDS,
    RINGS,
    Subject,
    has_padded_convolutions,
    images_of,
    padding_pattern,
    photographs,
    probe_position,
    with_replicated_borders,
)
from experiments import figures
from experiments.report import LabAnswer, make_table

from .groups import Group, groups_of, origin_of, over_seeds, stage_cells
from .laboratory import Lab

RING_SIDE = 6  # tokens of a map on which distances from the border are shown
LEAST_SHOWN = -0.1  # R squared in the figure
SHADES = {'noise': '#2c7fb8', 'constant': figures.GREY, 'natural': figures.ACCENT}
METRICS = {'mae': 'MAE', 'chance': 'MAE by chance', 'snr': 'SNR'}  # of the pattern from padding
NOTES = (
    'Input: noise, images of one color, and crops of photographs in random orientation.',
    'Ridge regression from standardized features to row and column, fitted on half of the images '
    'and measured on the others; the penalty is chosen on a third of the first half. R squared can '
    'be negative: worse than a constant guess.',
    'Border replaced: the same weights, but every padded convolution repeats the border instead of '
    'adding zeros.',
    'PPP (arXiv 2206.01202): the mean over images of the difference between features with the '
    "model's own padding and with real pixels in place of the padding. MAE is in standard "
    'deviations of the features; by chance, so few images give the second line without any '
    'pattern. SNR is the energy of that mean, less what is due to chance, over the variance of the '
    'difference across images. How we read the paper is in '
    'experiments/position/findings/protocol.md.',
)

Change = Callable[[Subject], Subject]


class Arm(NamedTuple):
    """A model, or one with its border replaced."""

    name: str
    found: list[dict[str, list]]  # of each seed, by kind of images, and 'ppp': for each stage


def unchanged(subject: Subject) -> Subject:
    return subject


def border_replaced(subject: Subject) -> Subject:
    return Subject(subject.name, with_replicated_borders(subject.model))


def measure_probe(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    groups = groups_of(lab, models, side)
    arms = []
    header: list[str] = []  # of the model with the most stages
    for group in groups:
        stages = group.stages()
        if len(stages) >= len(header):
            header = stages
        changes: dict[str, Change] = {group.name: unchanged}
        if has_padded_convolutions(group.subjects[0].model):
            changes[f'{group.name}, border replaced'] = border_replaced
        for name, change in changes.items():
            found = over_seeds(lab, group, partial(probe_group, group, change), 'probe')
            arms.append(Arm(name, found))
    readings = []
    patterns = []
    for name, found in arms:
        for kind in KINDS:
            cells = stage_cells([of_seed[kind] for of_seed in found], 'r2', percent=False)
            readings.append([name, kind, *cells])
        for metric, title in METRICS.items():
            cells = stage_cells([of_seed['ppp'] for of_seed in found], metric, percent=False)
            patterns.append([name, title, *cells])
    tables = [
        make_table(
            'R squared of row and column, held-out images', ['', 'images', *header], readings
        ),
        make_table(
            'Position-information pattern from padding (PPP), photographs',
            ['', 'metric', *header],
            patterns,
        ),
    ]
    draw_probe(lab.folder / 'probe.png', arms)
    data = {arm.name: [data_of(of_seed) for of_seed in arm.found] for arm in arms}
    notes = [origin_of(groups), *NOTES]
    return LabAnswer('probe', 'Where does position live?', notes, tables, ['probe.png'], data)


def probe_group(group: Group, change: Change, subject: Subject, seed: int) -> dict[str, list]:
    """What `change(subject)` knows of position: from each kind of images, and from padding."""
    subject = change(subject)
    found = {}
    for kind in KINDS:
        images = images_of(kind, group.images, group.side, seed)
        found[kind] = probe_position(subject, images, seed)
    step = math.lcm(32, group.step)
    margin = math.ceil(group.side / 4 / step) * step
    large = photographs(group.images, group.side + 2 * margin, seed, 'test')
    found['ppp'] = padding_pattern(subject, large, margin)
    return found


def data_of(of_seed: dict[str, list]) -> dict[str, list[dict]]:
    """For JSON."""
    data = {}
    for kind in KINDS:
        readings = of_seed[kind]
        data[kind] = [
            {'r2': one.r2, 'rings': one.rings, 'penalty': one.probe.penalty} for one in readings
        ]
    data['ppp'] = [{**one._asdict(), 'map': one.map.tolist()} for one in of_seed['ppp']]
    return data


# The figure: a row for each arm, with R squared by stage and by distance, and its patterns


def draw_probe(path: Path, arms: Sequence[Arm]) -> None:
    most = max(len(arm.found[0]['ppp']) for arm in arms)
    strongest = [strongest_pattern(arms, stage) for stage in range(most)]
    size = (5.6 + 1.4 * most, 1.35 * len(arms) + 0.9)
    widths = [1.7, 1.7, *[1] * most]
    grid = {'width_ratios': widths}
    with figures.figure(path, len(arms), 2 + most, size, gridspec_kw=grid) as (fig, axes):
        for row, (arm, (by_stage, by_distance, *of_patterns)) in enumerate(zip(arms, axes)):
            draw_by_stage(by_stage, arm, most)
            draw_by_distance(by_distance, arm)
            draw_patterns(of_patterns, arm, strongest)
            for axis in (by_stage, by_distance):
                axis.set_ylim(-0.16, 1.06)
                axis.set_yticks((0, 0.5, 1))
                axis.tick_params(labelbottom=row == len(arms) - 1)
        axes[0, 0].legend(fontsize=7.5)
        axes[0, 0].set_title('R² by stage')
        axes[0, 1].set_title('R² from the border')
        axes[-1, 0].set_xlabel('stage')
        axes[-1, 1].set_xlabel('0: border, 1: center')
        for stage, axis in enumerate(axes[0, 2:]):
            axis.set_title(f'PPP, stage {stage}\n0 to {strongest[stage]:.2g}')
        fig.suptitle(
            f'Where position can be read (R² below {LEAST_SHOWN} is drawn there), and what padding '
            'adds to features'
        )


def strongest_pattern(arms: Sequence[Arm], stage: int) -> float:
    """The largest value of a stage's pattern, averaged over the seeds, in any arm that has it."""
    values = []
    for arm in arms:
        if stage < len(arm.found[0]['ppp']):
            values.append(np.mean([of_seed['ppp'][stage].map.max() for of_seed in arm.found]))
    return max(values)


def draw_by_stage(axis: Any, arm: Arm, most: int) -> None:
    for kind in KINDS:
        values = np.array([[one.r2 for one in of_seed[kind]] for of_seed in arm.found])
        mean = values.mean(0).clip(LEAST_SHOWN)
        axis.plot(mean, 'o-', ms=3, color=SHADES[kind], label=kind)
    axis.set_xlim(-0.2, most - 0.8)
    axis.set_xticks(range(most))
    figures.name_row(axis, arm.name)


def draw_by_distance(axis: Any, arm: Arm) -> None:
    """Of the last stage whose map is large enough."""
    sides = [min(pattern.map.shape) for pattern in arm.found[0]['ppp']]
    stage = max((i for i, side in enumerate(sides) if side >= RING_SIDE), default=0)
    middle = (np.arange(RINGS) + 0.5) / RINGS
    for kind in KINDS:
        rings = np.array([of_seed[kind][stage].rings for of_seed in arm.found])
        mean = rings.mean(0).clip(LEAST_SHOWN)
        known = np.isfinite(mean)  # a small map has no token at some distances
        axis.plot(middle[known], mean[known], 'o-', ms=3, color=SHADES[kind])
    axis.set_xlim(0, 1)
    axis.text(0.97, 0.85, f'stage {stage}', ha='right', transform=axis.transAxes)


def draw_patterns(axes: Sequence, arm: Arm, strongest: Sequence[float]) -> None:
    for axis in axes:
        figures.without_axes(axis)
    for stage in range(len(arm.found[0]['ppp'])):
        pattern = torch.stack([of_seed['ppp'][stage].map for of_seed in arm.found]).mean(0)
        axes[stage].imshow(pattern, vmin=0, vmax=max(strongest[stage], 1e-6), cmap='magma')
