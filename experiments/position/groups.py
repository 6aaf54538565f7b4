"""What the questions about a model's knowledge measure: the lab's trained models, or any others."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from cpvt_pyramid.lab.probes import Subject, stride_of
from experiments.statistics import estimate
from experiments.training import one_thread

from .laboratory import Lab, Variant
from .runs import Result

# The lab's models that read the mean of the map.
GAP = {
    'none, GAP': Variant('none', class_token=False),
    'learned, GAP': Variant('learned', class_token=False),
    'peg, GAP': Variant('peg', class_token=False),
}


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
        is_column = self.runs and self.runs[0].settings.model == 'column'
        kind = 'block' if is_column else 'map'
        return [f'{kind} {i}' for i in range(count)]


def groups_of(lab: Lab, models: Sequence[Subject], side: int, gap: bool = False) -> list[Group]:
    """The given models, or if there are none the lab's trained ones.

    Args:
        lab: trains what is missing.
        models: to measure instead.
        side: of their images, in pixels.
        gap: also the lab's models that read the mean of the map.
    """
    if models:
        return [given_group(lab, subject, side) for subject in models]
    return trained_groups(lab, gap)


def given_group(lab: Lab, subject: Subject, side: int) -> Group:
    subjects = [subject] * lab.seeds
    return Group(subject.name, subjects, [], side, step_of(subject, side), lab.preset.images)


def trained_groups(lab: Lab, gap: bool) -> list[Group]:
    groups = []
    for model in lab.preset.models:
        variants = lab.encodings(model)
        if gap and model == 'column':
            variants |= {name: v for name, v in GAP.items() if v.position in variants}
        for one in lab.train(variants, model):
            name = one.name if len(lab.preset.models) == 1 else f'{model} {one.name}'
            loaded = [run.load() for run in one.runs]
            subjects = [Subject(name, lab_model.backbone) for lab_model in loaded]
            cell = loaded[0].cell
            groups.append(Group(name, subjects, one.runs, 6 * cell, cell, lab.preset.images))
    return groups


def step_of(subject: Subject, side: int) -> int:
    """What images of a model may grow by: a multiple of its strides where they divide the side."""
    maps = subject.maps(torch.zeros(1, 3, side, side))
    step = math.lcm(*(stride_of(side, map_.shape[2]) for map_ in maps))
    return step if side % step == 0 else math.gcd(side, 32)


def over_seeds(
    lab: Lab, group: Group, measure: Callable[[Subject, int], Any], label: str
) -> list[Any]:
    """`measure(subject, seed)` of each seed."""
    return with_progress(lab, group, group.subjects, measure, label)


def over_runs(
    lab: Lab, group: Group, measure: Callable[[Result, int], Any], label: str
) -> list[Any]:
    """`measure(run, seed)` of each training of a group."""
    return with_progress(lab, group, group.runs, measure, label)


def with_progress(
    lab: Lab, group: Group, items: Sequence, measure: Callable[[Any, int], Any], label: str
) -> list[Any]:
    found = []
    with one_thread():
        for i, item in enumerate(tqdm(items, f'{label} {group.name}', disable=None)):
            found.append(measure(item, lab.seed + i))
    return found


def cell_text(values: Sequence[float], percent: bool = True, sign: bool = False) -> str:
    """A cell of a table; a dash where there is no value."""
    values = np.asarray(values, float)
    if not np.isfinite(values).all():
        return '-'
    return estimate(values).show(percent, sign)


def stage_cells(found: Sequence[Sequence], name: str, percent: bool = True) -> list[str]:
    """For each stage the cell of a measure, found for each seed and stage."""
    cells = []
    for of_seeds in zip(*found):
        cells.append(cell_text([getattr(one, name) for one in of_seeds], percent))
    return cells


def as_dicts(found: Any) -> Any:
    """For JSON: dicts in place of the named tuples in nested lists."""
    if hasattr(found, '_asdict'):
        return found._asdict()
    return [as_dicts(item) for item in found]


def origin_of(groups: Sequence[Group]) -> str:
    """Which models the groups are, as a note of an answer."""
    if groups[0].runs:
        return 'The trained models of the question "encodings", one for each seed.'
    origin = (
        f'Models that were given, {groups[0].side} x {groups[0].side} pixels; the intervals are '
        'over images, not over trainings.'
    )
    named = []
    for group in groups:
        count = zero_layers(group.subjects[0].model)
        if count:
            named.append(f'{group.name}: {count}')
    if named:
        origin += (
            f' Layers whose weights are all 0 ({", ".join(named)}) add nothing. At the end of '
            'residual branches, where many networks start with them, they hide what the branch '
            'does, so that features of an untrained model may not drift at all.'
        )
    return origin


def zero_layers(model: nn.Module) -> int:
    """The number of layers whose weights are all 0."""
    count = 0
    for module in model.modules():
        weight = getattr(module, 'weight', None)
        if isinstance(weight, Tensor) and weight.numel() > 1 and not weight.any():
            count += 1
    return count
