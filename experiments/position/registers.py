"""High-norm tokens by stage and input size."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from cpvt_pyramid.lab.probes import HIGH_NORM, Norms, Subject, photographs, token_norms
from experiments import figures
from experiments.report import LabAnswer, make_table

from .groups import groups_of, origin_of, over_seeds, stage_cells
from .laboratory import Lab

SCALES = (1, 2)  # of the images
NOTE = (
    'Norms of the tokens on photographs, in medians of their map. arXiv 2309.16588 finds outliers '
    'in large models after long training; tiny models need not have any.'
)

Grids = dict[tuple[str, int], list[Tensor]]  # by model and scale, the norms of each map


def measure_registers(lab: Lab, models: Sequence[Subject], side: int) -> LabAnswer:
    groups = groups_of(lab, models, side)
    data = {}
    rows = []
    grids: Grids = {}
    for group in groups:
        for scale in SCALES:
            size = group.side * scale
            found = over_seeds(lab, group, partial(norms_of, group.images, size), 'registers')
            name = f'{group.name}, {size} px'
            rows.append([name, 'largest / median', *stage_cells(found, 'largest', percent=False)])
            rows.append([name, '% above 4 medians', *stage_cells(found, 'share')])
            data[name] = [[shown(norms) for norms in of_seed] for of_seed in found]
            grids[group.name, scale] = [n.norms[0] / n.norms.median() for n in found[0]]
    most = max(map(len, rows)) - 2
    table = make_table('High-norm tokens', ['', '', *(f'map {i}' for i in range(most))], rows)
    draw_registers(lab.folder / 'registers.png', [group.name for group in groups], most, grids)
    return LabAnswer(
        'registers',
        'Are there high-norm tokens?',
        [origin_of(groups), NOTE],
        [table],
        ['registers.png'],
        data,
    )


def shown(norms: Norms) -> dict[str, float]:
    """For JSON."""
    return {'largest': norms.largest, 'share': norms.share}


def norms_of(images: int, size: int, subject: Subject, seed: int) -> list[Norms]:
    """The norms of the tokens of each map on photographs."""
    return token_norms(subject, photographs(images, size, seed, 'test'))


def draw_registers(path: Path, names: Sequence[str], most: int, grids: Grids) -> None:
    """A row for each model: the norms of each map for one image, at each size."""
    columns = most * len(SCALES)
    size = (1.15 * columns + 2.4, 1.35 * len(names) + 0.8)
    with figures.figure(path, len(names), columns, size, 'compressed') as (fig, axes):
        for axis in axes.flat:
            figures.without_axes(axis)
        for name, line in zip(names, axes):
            for j, scale in enumerate(SCALES):
                for i, grid in enumerate(grids[name, scale]):
                    axis = line[j * most + i]
                    picture = axis.imshow(grid, vmin=0, vmax=HIGH_NORM, cmap='inferno')
                    where = f'map {i}, size x {scale}\n' if name == names[0] else ''
                    axis.set_title(f'{where}up to {float(grid.max()):.1f}', fontsize=8)
            figures.name_row(line[0], name)
        fig.colorbar(picture, ax=axes, shrink=0.6, aspect=40, label='norm / median')
        fig.suptitle('Norms of the tokens of one photograph')
