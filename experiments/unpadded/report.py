"""Tables and the figure, from the runs in a JSON file alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

import numpy as np

from experiments import figures
from experiments.report import Table
from experiments.statistics import Estimate, estimate, holm, paired_difference, with_p

from .arms import ARMS, BATCHES, FOLDERS

Runs = Mapping[str, Sequence[dict]]  # of each arm, by seed, as `Result` in JSON
REGIONS = {True: 'valid region', False: 'without'}


def values(
    runs: Sequence[dict], folder: str, batch: int, region: Optional[bool], measure: str
) -> list[float]:
    """A measure of one test, of each seed."""
    wanted = dict(folder=folder, batch=batch, region=region)
    found = []
    for run in runs:
        (test,) = (test for test in run['tests'] if test.items() >= wanted.items())
        found.append(test[measure])
    return found


def rows_of(runs: Runs) -> dict[str, tuple[Sequence[dict], bool]]:
    """What the tables have a row for: the runs of an arm, and whether the region is known."""
    rows = {}
    for arm, of_seeds in runs.items():
        for region, name in REGIONS.items():
            if ARMS[arm].backbone == 'resnet':
                rows[arm] = of_seeds, False
            else:
                rows[f'{arm}, {name}'] = of_seeds, region
    return rows


def tables(runs: Runs) -> list[Table]:
    """All tables; p values are adjusted for the number of comparisons in their table (Holm)."""
    return [
        *(accuracy_table(runs, folder) for folder in FOLDERS),
        region_table(runs),
        changes_table(runs),
    ]


def accuracy_table(runs: Runs, folder: str) -> Table:
    """Accuracy alone, and how much it changes in a batch, paired by seed."""
    differences = {}
    for name, (of_seeds, region) in rows_of(runs).items():
        alone = values(of_seeds, folder, 1, None, 'accuracy')
        for batch in BATCHES:
            batched = values(of_seeds, folder, batch, region, 'accuracy')
            differences[name, batch] = paired_difference(batched, alone)
    shown = with_adjusted_p(differences)
    cells = []
    for name, (of_seeds, _) in rows_of(runs).items():
        alone = estimate(values(of_seeds, folder, 1, None, 'accuracy')).show()
        changes = [shown[name, batch] for batch in BATCHES]
        failed = sum(bool(run['failure']) for run in of_seeds)
        cells.append([name, alone, *changes, str(len(of_seeds)), str(failed)])
    title = (
        f'{FOLDERS[folder].title}: AP or mIoU alone, in %, and its change in a batch, in points, '
        'paired by seed (p)'
    )
    return Table(title, ['', 'alone', *batch_names(), 'seeds', 'failed'], cells)


def region_table(runs: Runs) -> Table:
    """What the valid region changes in a batch."""
    with_both = [arm for arm in runs if ARMS[arm].backbone != 'resnet']
    tests = [(folder, batch) for folder in FOLDERS for batch in BATCHES]
    differences = {}
    for arm in with_both:
        for folder, batch in tests:
            accuracy = {}
            for region in REGIONS:
                accuracy[region] = values(runs[arm], folder, batch, region, 'accuracy')
            found = paired_difference(accuracy[True], accuracy[False])
            differences[arm, folder, batch] = found
    shown = with_adjusted_p(differences)
    cells = [[arm, *(shown[arm, folder, batch] for folder, batch in tests)] for arm in with_both]
    title = 'AP or mIoU in a batch with the valid region less that without, in points (p)'
    return Table(title, ['', *test_names()], cells)


def changes_table(runs: Runs) -> Table:
    """How many boxes or pixels are not those of the image alone."""
    cells = []
    for name, (of_seeds, region) in rows_of(runs).items():
        shares = []
        for folder in FOLDERS:
            for batch in BATCHES:
                shares.append(estimate(values(of_seeds, folder, batch, region, 'changed')).show())
        cells.append([name, *shares])
    padding = []
    any_runs = next(iter(runs.values()))
    for folder in FOLDERS:
        for batch in BATCHES:
            share = np.mean(values(any_runs, folder, batch, False, 'padding'))
            padding.append(f'{100 * share:.0f}')
    cells.append(['share of padding', *padding])
    title = 'Boxes of a detector, or pixels of a segmentor, that are not those of the image alone'
    return Table(f'{title}, in %', ['', *test_names()], cells)


def with_adjusted_p(differences: Mapping[tuple, Estimate]) -> dict[tuple, str]:
    adjusted = holm([difference.p for difference in differences.values()])
    shown = {}
    for (key, difference), p in zip(differences.items(), adjusted):
        shown[key] = with_p(difference, p)
    return shown


def batch_names() -> list[str]:
    return [f'batch of {batch}' for batch in BATCHES]


def test_names() -> list[str]:
    return [f'{folder}, {name}' for folder in FOLDERS for name in batch_names()]


def draw(runs: Runs, path: Path, folder: str = 'mixed') -> None:
    """The change of AP and mIoU with the size of the batch: means and intervals."""
    panels = {'AP': 'detectors: change of AP, points', 'mIoU': 'segmentors: change of mIoU, points'}
    colors = dict(zip(ARMS, (figures.BLUE, figures.ACCENT, 'black', 'C2', 'C1', figures.GREY)))
    places = range(1 + len(BATCHES))
    with figures.figure(path, 1, len(panels), (9.2, 3.8)) as (fig, axes):
        lines = []
        for axis, (metric, title) in zip(axes.flat, panels.items()):
            shown = {}
            for name, (of_seeds, region) in rows_of(runs).items():
                arm = name if name in ARMS else name.rpartition(', ')[0]
                if ARMS[arm].metric == metric:
                    shown[name] = arm, of_seeds, region
            for i, (name, (arm, of_seeds, region)) in enumerate(shown.items()):
                alone = np.array(values(of_seeds, folder, 1, None, 'accuracy'))
                changes = [0 * alone]
                for batch in BATCHES:
                    batched = np.array(values(of_seeds, folder, batch, region, 'accuracy'))
                    changes.append(100 * (batched - alone))
                found = [estimate(change) for change in changes]
                aside = 0.05 * (i - (len(shown) - 1) / 2)  # or intervals would lie on each other
                lines.append(
                    axis.errorbar(
                        [place + aside for place in places],
                        [one.mean for one in found],
                        yerr=np.nan_to_num([one.half for one in found]),
                        color=colors[arm],
                        ls='-' if region else '--',
                        marker='o',
                        ms=4,
                        lw=1.4,
                        elinewidth=1,
                        label=name,
                    )
                )
            axis.axhline(0, color='black', lw=0.6)
            axis.set_xticks(places, ['alone', *batch_names()])
            axis.set_title(title)
        figures.legend_below(fig, lines, 4)
