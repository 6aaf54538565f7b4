"""Translations: whether features move with the picture, and answers stay."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from cpvt_pyramid.lab.probes import Subject, photographs, shift_drift
from experiments import figures
from experiments.report import LabAnswer, Table

from .groups import Group, as_dicts, cell_text, groups_of, origin_of, over_runs, over_seeds
from .laboratory import Lab
from .runs import Result, answer

SHIFTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # pixels
MOVED_CELLS = 2  # that a window on a larger picture moves by at most
STEADY = ('leftmost', 'topmost', 'above', 'pattern', 'control')  # answers that shifts keep
NOTES = (
    'Two crops of the same image, one lower and further right by the given number of pixels, '
    'compared where both see the same pixels. Border: within a quarter of the side of an edge of '
    'either crop. Where the shift is no multiple of the stride, the first map is interpolated, and '
    'the drift contains what sub-sampling loses.',
    'Answers: the same larger picture through two windows, both of which contain the digits; of '
    'the tasks whose answer a shift does not change. Published: Twins falls from 80.6 to 62.4 % '
    'under shifts of a few pixels (arXiv 2306.07470).',
)


def measure_shift(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    groups = groups_of(lab, models, side, gap=True)
    data = {}
    drift_rows = []
    answer_rows = []
    answer_header: list[str] = []
    panels = figures.Panels()
    for group in groups:
        marks = {'shift by half a token': group.step // 2, 'shift by one token': group.step}
        found = over_seeds(lab, group, partial(shift_group, group), 'shift')
        data[group.name] = {'drift': as_dicts(found)}
        for part in ('interior', 'border'):
            of_last_map = [[getattr(stages[-1], part) for stages in of_seed] for of_seed in found]
            by_shift = dict(zip(SHIFTS, np.transpose(of_last_map)))
            drift_rows.append([group.name, part, *map(cell_text, by_shift.values())])
            panels.add(f'drift of the last map, {part}, %', group.name, marked(by_shift, marks))
        if not group.runs:
            continue
        measure = partial(consistency, lab.preset.scaled_pictures)
        found = over_runs(lab, group, measure, 'answers')
        data[group.name]['consistency'] = found
        by_shift = {shift: np.array([of_seed[shift] for of_seed in found]) for shift in found[0]}
        answer_rows.append([group.name, *map(cell_text, by_shift.values())])
        answer_header = ['', *(f'{shift} px' for shift in by_shift)]
        panels.add('same answer after the shift, %', group.name, marked(by_shift, marks))
    header = ['', 'part', *(f'{shift} px' for shift in SHIFTS)]
    tables = [Table('Drift of the last map, % of its norm', header, drift_rows)]
    if answer_rows:
        title = 'Same answer after a shift, % of pictures and tasks'
        tables.append(Table(title, answer_header, answer_rows))
    panels.draw(lab.folder / 'shift.png', 'What a shift changes')
    return LabAnswer(
        'shift',
        'Do features move with the picture?',
        [origin_of(groups), *NOTES],
        tables,
        ['shift.png'],
        data,
    )


def marked(by_shift: dict[int, np.ndarray], marks: dict[str, int]) -> dict[str, np.ndarray]:
    """The values of the shifts that are drawn, as far as they were measured."""
    return {mark: by_shift[shift] for mark, shift in marks.items() if shift in by_shift}


def shift_group(group: Group, subject: Subject, seed: int) -> list:
    """The drift of each map for each shift."""
    images = photographs(group.images, group.side + max(SHIFTS), seed, 'test')
    return [shift_drift(subject, images, group.side, shift) for shift in SHIFTS]


def consistency(pictures: int, result: Result, seed: int) -> dict[int, float]:
    """The share of answers that stay the same after a shift down and right, for each shift that
    keeps the digits in view."""
    model = result.load()
    window = result.settings.grid
    grid = (window + MOVED_CELLS, window + MOVED_CELLS)
    scenes = result.settings.draw('test', pictures, 0, grid, inset=MOVED_CELLS)
    cell = model.cell
    side = window * cell
    most = MOVED_CELLS * cell
    by_cells = range(cell, most + 1, cell)
    shifts = sorted({*by_cells, *(shift for shift in SHIFTS if shift <= most)})
    before = answer(model, scenes.image[..., :side, :side])
    found = {}
    for shift in shifts:
        after = answer(model, scenes.image[..., shift : shift + side, shift : shift + side])
        same = []
        for task in STEADY:
            is_same = before.logits[task].argmax(1) == after.logits[task].argmax(1)
            same.append(is_same.double().mean())
        found[shift] = float(np.mean(same))
    return found
