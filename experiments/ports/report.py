"""Tables and the figure, from the runs in a JSON file alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments import figures
from experiments.report import Table
from experiments.statistics import Estimate, estimate, holm, paired_difference, with_p

from .settings import ARMS, BATCHES, CHANGES, COMPARED, METRICS, PADDING, REFERENCE, SVT

Runs = Mapping[str, Sequence[dict]]  # of each arm, by seed, as `Result` in JSON
Key = tuple[str, int, float]  # metric, images in a batch, factor of the image size


def values(runs: Sequence[dict], key: Key, seeds: Sequence[int] = ()) -> np.ndarray:
    """A metric of each seed, or of these."""
    name = '{}, batch {}, size {:g}'.format(*key)
    found = {run['settings']['seed']: run['metrics'][name] for run in runs}
    return np.array([found[seed] for seed in seeds or found])


def tables(runs: Runs) -> list[Table]:
    """All tables; p values are adjusted for the number of comparisons in their table (Holm)."""
    first_arm = next(iter(runs.values()))
    scales = first_arm[0]['settings']['scales']
    others = [scale for scale in scales if scale != 1]
    here = [(metric, batch, 1) for metric in METRICS for batch in BATCHES]
    found = [
        accuracy('Accuracy at the training size, in %', runs, here),
        differences('Differences at the training size', runs, here),
        batching(runs, scales),
        changed_boxes(runs),
    ]
    if not others:
        return found
    for metric in METRICS:
        keys = [(metric, batch, scale) for batch in BATCHES for scale in others]
        found.append(accuracy(f'{metric} at other sizes, in %', runs, keys))
        found.append(differences(f'{metric}, differences at other sizes', runs, keys))
    return found


def accuracy(title: str, runs: Runs, keys: Sequence[Key]) -> Table:
    rows = []
    for arm, of_seeds in runs.items():
        failed = sum(bool(run['failure']) for run in of_seeds)
        cells = [estimate(values(of_seeds, key)).show() for key in keys]
        rows.append([arm, *cells, str(len(of_seeds)), str(failed)])
    return Table(title, ['', *map(named, keys), 'seeds', 'failed'], rows)


def named(key: Key) -> str:
    metric, batch, scale = key
    name = f'{metric}, alone' if batch == 1 else f'{metric}, batch of {batch}'
    return name if scale == 1 else f'{name}, size {scale:g}'


def differences(title: str, runs: Runs, keys: Sequence[Key]) -> Table:
    """Of each model to that in `COMPARED`."""

    def seeds(arm: str) -> set[int]:
        return {run['settings']['seed'] for run in runs.get(arm, ())}

    def difference(arm: str, key: Key) -> Estimate:
        other = COMPARED[arm]
        both = sorted(seeds(arm) & seeds(other))
        return paired_difference(values(runs[arm], key, both), values(runs[other], key, both))

    arms = [arm for arm, other in COMPARED.items() if seeds(arm) & seeds(other)]
    pairs = f'of SVT to "{SVT}", of others to "{REFERENCE}"'
    return compared(
        f'{title}, in points, paired by seed (p): {pairs}', arms, keys, named, difference
    )


def batching(runs: Runs, scales: Sequence[float]) -> Table:
    """What a padded batch does to accuracy."""

    def difference(arm: str, key: tuple[str, float]) -> Estimate:
        metric, scale = key
        alone, batched = (values(runs[arm], (metric, batch, scale)) for batch in BATCHES)
        return paired_difference(batched, alone)

    keys = [(metric, scale) for metric in METRICS for scale in scales]
    title = f'A batch of {BATCHES[1]} minus each image alone, in points, paired by seed (p)'
    return compared(title, list(runs), keys, lambda k: f'{k[0]}, size {k[1]:g}', difference)


def compared(
    title: str, arms: Sequence[str], keys: Sequence, name: Callable, difference: Callable
) -> Table:
    """A table of differences with adjusted p values."""
    found = {(arm, key): difference(arm, key) for arm in arms for key in keys}
    adjusted = dict(zip(found, holm([one.p for one in found.values()])))
    rows = []
    for arm in arms:
        cells = [with_p(found[arm, key], adjusted[arm, key]) for key in keys]
        rows.append([arm, *cells])
    return Table(title, ['', *map(name, keys)], rows)


def changed_boxes(runs: Runs) -> Table:
    """By the share of padding, how many of 100 boxes differ in a batch; `changes` says how."""
    rows = []
    for arm, of_seeds in runs.items():
        for i, name in enumerate(padding_names()):
            bins = [run['changes'][i] for run in of_seeds]
            boxes = [bin_['boxes'] for bin_ in bins]
            if not min(boxes):
                continue
            changed = estimate(share(bins, CHANGES)).show()
            kinds = [estimate(share(bins, [kind])).show() for kind in CHANGES]
            move = max(bin_['largest_move'] for bin_ in bins)
            score = max(bin_['largest_score'] for bin_ in bins)
            largest = [f'{move:.1g}', f'{score:.1g}']
            rows.append([arm, name, str(sum(boxes)), changed, *kinds, *largest])
    header = ['', 'padding', 'boxes', 'changed', *CHANGES, 'largest move, pixels', 'largest score']
    return Table('Boxes that differ between a batch and the image alone, in %', header, rows)


def padding_names() -> list[str]:
    edges = [f'{100 * edge:.0f}' for edge in PADDING[1:-1]]
    between = [f'{low} to {high} %' for low, high in zip(edges, edges[1:])]
    return [f'below {edges[0]} %', *between, f'above {edges[-1]} %']


def share(bins: Sequence[dict], kinds: Sequence[str]) -> list[float]:
    """How many of the boxes of each bin changed in these ways; NaN where there is no box."""
    shares = []
    for bin_ in bins:
        changed = sum(bin_[kind] for kind in kinds)
        shares.append(changed / bin_['boxes'] if bin_['boxes'] else math.nan)
    return shares


def draw(runs: Runs, path: Path) -> None:
    """Changed boxes by padding, and AP alone and in a batch; a dot for each seed, and means."""
    colors = (figures.BLUE, figures.ACCENT, '#d98880', '#e6b0aa', '#7fb3d5', 'k', 'C2', 'C8')
    shades = dict(zip(ARMS, colors))
    bins = range(len(PADDING) - 1)
    with figures.figure(path, 1, 2, (9.2, 3.3)) as (fig, axes):
        left, right = axes.flat
        for row, (arm, of_seeds) in enumerate(runs.items()):
            dots = dict(color=shades[arm], ms=5, alpha=0.5, ls='')
            shares = [100 * np.array(share(run['changes'], CHANGES)) for run in of_seeds]
            for of_seed in shares:
                left.plot(bins, of_seed, 'o', **dots)
            left.plot(bins, np.mean(shares, axis=0), color=shades[arm], label=arm)
            for batch, mark, filled in zip(BATCHES, 'os', (shades[arm], 'white')):
                found = 100 * values(of_seeds, ('AP', batch, 1))
                place = row + (0.15 if batch > 1 else -0.15)
                right.plot(found, [place] * len(found), mark, mfc=filled, **dots)
                right.plot(found.mean(), place, '|', ms=13, mew=2, color=shades[arm])
        left.set_xticks(bins, padding_names())
        left.set_xlabel('share of the padded image that is padding')
        left.set_ylabel('% of the boxes')
        left.set_title(f'Boxes that differ in a batch of {BATCHES[1]}')
        figures.name_rows(right, list(runs))
        right.set_title(f'AP: filled alone, open in a batch of {BATCHES[1]}')
        figures.legend_below(fig, left.get_legend_handles_labels()[0], 3)
