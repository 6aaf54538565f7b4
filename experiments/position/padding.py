"""Batch padding as a false position signal, with and without the mask."""

import math
from collections.abc import Sequence
from functools import partial

from cpvt_pyramid.lab.probes import (
    Subject,
    canvas_size,
    fit_probe,
    padding_drift,
    photographs,
)
from experiments import figures
from experiments.report import LabAnswer, Table

from .groups import (
    Group,
    as_dicts,
    cell_text,
    groups_of,
    origin_of,
    over_runs,
    over_seeds,
    stage_cells,
)
from .laboratory import Lab, metric_of
from .runs import Result, evaluate_answers

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # of a padded picture's area
MEASURES = {  # of the last map's drift
    'features': 'drift of the features, %',
    'displacement': 'displacement, % of the side',
}
NOTE = (
    'Photographs alone, and with zeros at the right and bottom until the given share of the area '
    'is padding. Masked: the model is told the true sizes (`valid`). A masked model that is exact '
    'drifts by rounding only.'
)

Size = tuple[int, int]  # height and width in pixels


def measure_padding(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    groups = groups_of(lab, models, side)
    data = {}
    rows: dict[str, list] = {measure: [] for measure in MEASURES}
    metric_rows = []
    panels = figures.Panels()
    for group in groups:
        sizes = padded_sizes(group)
        arms = (False, True) if group.subjects[0].masks else (False,)
        for masked in arms:
            arm = 'masked' if masked else 'unmasked'
            name = f'{group.name}, {arm}'
            found = over_seeds(lab, group, partial(pad_group, group, sizes, masked), 'padding')
            data[name] = {'drift': as_dicts(found)}
            of_last_map = [[of_share[-1] for of_share in of_seed] for of_seed in found]
            for measure, title in MEASURES.items():
                rows[measure].append([name, *stage_cells(of_last_map, measure)])
                at_most_padding = [getattr(of_seed[-1], measure) for of_seed in of_last_map]
                panels.add(title, group.name, {arm: at_most_padding})
            if not group.runs:
                continue
            answers = partial(padded_metrics, sizes, masked, lab.preset.scaled_pictures)
            found = over_runs(lab, group, answers, 'padded answers')
            data[name]['metrics'] = found
            for metric in ('position', 'mIoU', 'AP'):
                changes = [changes_of(metric, of_seed) for of_seed in found]
                panels.add(f'{metric}, points', group.name, {arm: [c[-1] for c in changes]})
                cells = [cell_text(of_seeds, sign=True) for of_seeds in zip(*changes)]
                metric_rows.append([name, metric, *cells])
    header = [f'{padding_of(groups[0], size):.0%}' for size in padded_sizes(groups[0])]
    tables = [
        Table(
            'Drift of the last map inside the images, % of its norm',
            ['', *header],
            rows['features'],
        ),
        Table(
            'Displacement of the probed position, % of the side',
            ['', *header],
            rows['displacement'],
        ),
    ]
    if metric_rows:
        title = 'Change of the answers, in points'
        tables.append(Table(title, ['', 'metric', *header], metric_rows))
    panels.draw(lab.folder / 'padding.png', f'What padding of {header[-1]} of the area changes')
    return LabAnswer(
        'padding',
        'Does batch padding look like a position?',
        [origin_of(groups), NOTE],
        tables,
        ['padding.png'],
        data,
    )


def pad_group(
    group: Group, sizes: Sequence[Size], masked: bool, subject: Subject, seed: int
) -> list:
    """The drift of each map at each size of a padded batch."""
    images = photographs(group.images, group.side, seed, 'test')
    probes = [fit_probe(map_, seed) for map_ in subject.maps(images)]
    return [padding_drift(subject, images, size, masked, probes) for size in sizes]


def padded_sizes(group: Group) -> list[Size]:
    """Sizes of padded images, one for each share that can be had."""
    sizes = [canvas_size((group.side, group.side), share, group.step) for share in SHARES]
    return list(dict.fromkeys(sizes))


def padding_of(group: Group, size: Size) -> float:
    """The share of a padded image's area that is padding."""
    return 1 - group.side**2 / math.prod(size)


def padded_metrics(
    sizes: Sequence[Size], masked: bool, pictures: int, result: Result, seed: int
) -> list[dict[str, float]]:
    """The metrics of a trained model in batches of these sizes."""
    model = result.load()
    scenes = result.settings.draw('test', pictures, stream=0)
    return [evaluate_answers(model, scenes, pad=size, masked=masked) for size in sizes]


def changes_of(metric: str, of_sizes: Sequence[dict[str, float]]) -> list[float]:
    """How a metric at each size differs from that at the first."""
    first = metric_of(of_sizes[0], metric)
    return [metric_of(metrics, metric) - first for metrics in of_sizes]
