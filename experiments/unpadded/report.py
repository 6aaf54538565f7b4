"""Tables and the figure, from the runs in a JSON file alone."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from experiments import figures
from experiments.report import Table
from experiments.statistics import Estimate, estimate, holm, paired_difference, with_p

from .arms import ARMS, BATCHES, FOLDERS

Runs = Mapping[str, Sequence[dict]]  # of each arm, by seed, as `Result` in JSON
DRAWN = 'mixed'  # the folder of the figure


class Row(NamedTuple):
    """What the tables have a row for.

    Attributes:
        name: in the tables.
        arm: of `ARMS`.
        region: whether the backbone is told the region of each image in a padded batch.
        runs: of the arm.
    """

    name: str
    arm: str
    region: bool
    runs: Sequence[dict]

    def values(self, measure: str, folder: str, batch: int) -> np.ndarray:
        """A measure of each seed; a batch of 1 has no padding, whatever the region is."""
        region: Optional[bool] = None if batch == 1 else self.region
        wanted = dict(folder=folder, batch=batch, region=region)
        found = []
        for run in self.runs:
            (test,) = (test for test in run['metrics']['tests'] if test.items() >= wanted.items())
            found.append(test[measure])
        return np.array(found)

    def change(self, folder: str, batch: int) -> np.ndarray:
        """How much a batch changes the accuracy of each seed."""
        return self.values('accuracy', folder, batch) - self.values('accuracy', folder, 1)


def rows_of(runs: Runs) -> list[Row]:
    """A ResNet does not know the region."""
    rows = []
    for arm, of_arm in runs.items():
        if ARMS[arm].backbone == 'resnet':
            rows.append(Row(arm, arm, False, of_arm))
        else:
            rows.append(Row(f'{arm}, valid region', arm, True, of_arm))
            rows.append(Row(f'{arm}, without', arm, False, of_arm))
    return rows


def batch_name(batch: int) -> str:
    return f'batch of {batch}'


TESTS = {f'{folder}, {batch_name(n)}': (folder, n) for folder in FOLDERS for n in BATCHES}


# Tables


def tables(runs: Runs) -> list[Table]:
    """All tables; p values are adjusted for the number of comparisons in their table (Holm)."""
    rows = rows_of(runs)
    found = [*(accuracy_table(rows, folder) for folder in FOLDERS)]
    if any(row.region for row in rows):
        found.append(region_table(rows))
    return [*found, changes_table(rows)]


def accuracy_table(rows: Sequence[Row], folder: str) -> Table:
    """Accuracy alone, and how much it changes in a batch, paired by seed."""
    changes = {}
    for row in rows:
        for batch in BATCHES:
            changes[row.name, batch] = estimate(row.change(folder, batch))
    shown = with_adjusted_p(changes)
    cells = []
    for row in rows:
        alone = estimate(row.values('accuracy', folder, 1)).show()
        failed = sum(bool(run['failure']) for run in row.runs)
        of_batches = [shown[row.name, batch] for batch in BATCHES]
        cells.append([row.name, alone, *of_batches, str(len(row.runs)), str(failed)])
    title = (
        f'{FOLDERS[folder].title}: AP or mIoU alone, in %, and its change in a batch, in points, '
        'paired by seed (p)'
    )
    return Table(title, ['', 'alone', *map(batch_name, BATCHES), 'seeds', 'failed'], cells)


def region_table(rows: Sequence[Row]) -> Table:
    """What the valid region changes in a batch."""
    with_region = {row.arm: row for row in rows if row.region}
    differences = {}
    for row in rows:
        if row.region or row.arm not in with_region:
            continue
        for test, (folder, batch) in TESTS.items():
            known = with_region[row.arm].values('accuracy', folder, batch)
            unknown = row.values('accuracy', folder, batch)
            differences[row.arm, test] = paired_difference(known, unknown)
    shown = with_adjusted_p(differences)
    cells = [[arm, *(shown[arm, test] for test in TESTS)] for arm in with_region]
    title = 'AP or mIoU in a batch with the valid region less that without, in points (p)'
    return Table(title, ['', *TESTS], cells)


def changes_table(rows: Sequence[Row]) -> Table:
    """How many boxes or pixels are not those of the image alone."""
    cells = []
    for row in rows:
        shares = [estimate(row.values('changed', *test)).show() for test in TESTS.values()]
        cells.append([row.name, *shares])
    padding = [rows[-1].values('padding', *test).mean() for test in TESTS.values()]
    cells.append(['share of padding', *(f'{100 * share:.0f}' for share in padding)])
    title = 'Boxes of a detector, or pixels of a segmentor, that are not those of the image alone'
    return Table(f'{title}, in %', ['', *TESTS], cells)


def with_adjusted_p(differences: Mapping[Hashable, Estimate]) -> dict[Hashable, str]:
    """The differences, as in '+2.4 ± 1.1 (0.012)'."""
    adjusted = holm([difference.p for difference in differences.values()])
    return {key: with_p(one, p) for (key, one), p in zip(differences.items(), adjusted)}


# Figure

TITLES = {'AP': 'Detectors: change of AP', 'mIoU': 'Segmentors: change of mIoU'}
NAMES = {True: 'the backbone masks the padding', False: 'it does not'}
COLORS = {True: figures.BLUE, False: figures.ACCENT}


def draw(runs: Runs, path: Path) -> None:
    """How much AP and mIoU change in the largest batch: means and intervals, in points."""
    batch = BATCHES[-1]
    with figures.figure(path, 1, len(TITLES), (9.2, 2.9)) as (fig, axes):
        for axis, (metric, title) in zip(axes.flat, TITLES.items()):
            rows = [row for row in rows_of(runs) if ARMS[row.arm].metric == metric]
            arms = list(dict.fromkeys(row.arm for row in rows))
            for row in rows:
                found = estimate(100 * row.change(DRAWN, batch))
                axis.errorbar(
                    found.mean,
                    arms.index(row.arm) + (-0.13 if row.region else 0.13),
                    xerr=np.nan_to_num(found.half),
                    color=COLORS[row.region],
                    marker='o',
                    ms=6,
                    elinewidth=1.6,
                )
            axis.axvline(0, color='black', lw=0.8)
            figures.name_rows(axis, arms)
            axis.grid(axis='y', visible=False)
            axis.set_xlabel(f'points, in a padded {batch_name(batch)} instead of alone')
            axis.set_title(title)
        lines = []
        for region, name in NAMES.items():
            lines += axes.flat[0].plot([], [], 'o', color=COLORS[region], label=name)
        figures.legend_below(fig, lines)
        fig.suptitle('Trained without padding on synthetic scenes: mean and 95% interval')
