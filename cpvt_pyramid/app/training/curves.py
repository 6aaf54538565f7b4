"""The losses and validation metrics of a training, as a picture.

They are read from mmengine's logs of all runs in the work dir, TIME/vis_data/scalars.json. A
training that was stopped and resumed is one curve: from its first iteration, a run replaces what
earlier runs logged. Local time, by which the folders are named, can go back: TIME/number.txt has
the order of the runs.
"""

import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..tooling.files import atomic_write, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUMBER = 'number.txt'
WITHOUT_OBJECTS = -1.0  # COCO's AP of small objects, for example, where the data have none
NO_METRICS = {'step', 'iter', 'epoch', 'lr', 'base_lr', 'time', 'data_time', 'memory', 'grad_norm'}
# The metrics worth showing, of all that evaluators report, and their names in print.
HEADLINES = {
    'bbox_mAP': 'box AP',
    'bbox_mAP_50': 'box AP50',
    'bbox_mAP_s': 'box AP small',
    'segm_mAP': 'mask AP',
    'segm_mAP_50': 'mask AP50',
    'mIoU': 'mIoU',
    'mAcc': 'mAcc',
    'aAcc': 'aAcc',
}
STYLE: dict[Any, Any] = {
    'font.size': 10,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.edgecolor': '#888888',
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.color': '#e6e6e6',
    'legend.frameon': False,
}


@dataclass
class Curves:
    """What was logged.

    losses: by name, the value at each iteration; 'loss' is the total. metrics: the same, of the
    validation. epoch_length: iterations per epoch; None if the training does not count epochs.
    resumed: iterations at which a run continued an earlier one.
    """

    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    epoch_length: Optional[int] = None
    resumed: list[int] = field(default_factory=list)


def read_curves(work_dir: Path) -> Curves:
    """The runs of a work directory, in chronological order, as one."""
    if not work_dir.is_dir():
        raise FileNotFoundError(f'no folder at {work_dir}')
    runs = runs_of(work_dir)
    if not runs:
        raise ValueError(f'no loss was logged in {work_dir} yet')
    curves = Curves(epoch_length=epoch_length(runs[-1]))
    for run in runs:
        first = next(record['step'] for record in run if 'loss' in record)
        forget_from(first, curves)
        add_run(run, first, curves)
    losses = curves.losses['loss']
    curves.resumed = [step for step in curves.resumed if step in losses]
    curves.losses = {name: points for name, points in curves.losses.items() if points}
    curves.metrics = {
        name: points
        for name, points in curves.metrics.items()
        if set(points.values()) - {WITHOUT_OBJECTS}
    }
    return curves


def forget_from(first: int, curves: Curves) -> None:
    """Forget what earlier runs logged from an iteration on, with which a run begins."""
    if any(step < first for step in curves.losses.get('loss', ())):
        curves.resumed.append(first)
    for points in (*curves.losses.values(), *curves.metrics.values()):
        for step in list(points):
            if step >= first:
                del points[step]


def add_run(records: list[dict], first: int, curves: Curves) -> None:
    """Add what a run logged, which begins with the iteration `first`."""
    latest = first
    for record in records:
        if 'loss' in record:
            latest = record['step']
            losses = {name: value for name, value in record.items() if 'loss' in name}
            add_values(losses, latest, curves.losses)
        else:
            step = validated_at(record['step'], latest, curves)
            metrics = {name: value for name, value in record.items() if name not in NO_METRICS}
            add_values(metrics, step, curves.metrics)


def add_values(values: dict[str, Any], step: int, into: dict[str, dict[int, float]]) -> None:
    for name, value in values.items():
        if isinstance(value, (int, float)):
            into.setdefault(name, {})[step] = float(value)


def runs_of(work_dir: Path) -> list[list[dict]]:
    """The records of each run that logged a loss, in the order of the runs."""
    logs = [read_log(path) for path in sorted(work_dir.glob('*/vis_data/scalars.json'), key=order)]
    return [records for records in logs if any('loss' in record for record in records)]


def order(log: Path) -> tuple[int, int, str]:
    """Sorts the logs of runs: by their numbers, then by when they were written."""
    folder = log.parents[1]
    return number_of(folder), log.stat().st_mtime_ns, folder.name


def number_of(folder: Path) -> int:
    """The number of the run with a folder of logs; 0 if it has none."""
    try:
        return int((folder / NUMBER).read_text())
    except (OSError, ValueError):
        return 0


def number_run(folder: Path) -> None:
    """Give the run with a folder of logs the next number."""
    last = max((number_of(path.parent) for path in folder.parent.glob(f'*/{NUMBER}')), default=0)
    write_text(folder / NUMBER, f'{last + 1}\n')


def read_log(path: Path) -> list[dict]:
    """The records of a log, without truncated lines and lines that are not records."""
    records = []
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get('step'), int):
            records.append(record)
    return records


def epoch_length(records: list[dict]) -> Optional[int]:
    """Iterations per epoch, from records that have both numbers.

    The first records of two epochs are equally far into them, so that their distance is exact. But
    a run that resumes within an epoch begins in its middle: the distance is then a lower bound, as
    is what the last record of an epoch gives. The largest is taken.
    """
    first: dict[int, int] = {}
    lengths = []
    for record in records:
        if 'loss' in record and 'epoch' in record:
            epoch, step = record['epoch'], record['step']
            first[epoch] = min(step, first.get(epoch, step))
            lengths.append(math.ceil(step / epoch))
    lengths += [first[epoch + 1] - first[epoch] for epoch in first if epoch + 1 in first]
    return max(lengths, default=None)


def validated_at(step: int, latest: int, curves: Curves) -> int:
    """The iteration of a validation, whose `step` mmengine counts in epochs or in iterations.

    It is the one closer to `latest`, the training record before it; a step of 0 is an epoch that
    was not counted.
    """
    if step == 0:
        return latest
    return min((step, step * (curves.epoch_length or 1)), key=lambda x: abs(x - latest))


def smoothed(values: list[float], half: int) -> list[float]:
    """The moving average over `half` values on both sides, ignoring NaN."""
    averages = []
    for place in range(len(values)):
        window = values[max(place - half, 0) : place + half + 1]
        finite = [value for value in window if math.isfinite(value)]
        averages.append(sum(finite) / len(finite) if finite else math.nan)
    return averages


def write_curves(work_dir: Path, out: Path) -> None:
    """Draw the logs of a work dir into a picture at `out`.

    Raises:
        OSError: the work dir does not exist, or the picture cannot be written.
        ValueError: nothing was logged yet, or there is no such format of pictures.
    """
    curves = read_curves(work_dir)
    title = work_dir.resolve().name
    with atomic_write(out) as partial:
        draw_curves(curves, title, partial, out.suffix[1:] or 'png')


def draw_curves(curves: Curves, title: str, out: Path, file_format: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter('ignore')  # about letters of a name that the font does not have
        rows = 2 if curves.metrics else 1
        figure = Figure((8.5, 3.3 * rows + 0.6), layout='constrained')
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
        figure.suptitle(title, fontweight='bold', parse_math=False)
        draw_losses(axes[0, 0], curves)
        if curves.metrics:
            draw_metrics(axes[1, 0], curves)
        for ax in axes[:, 0]:
            for step in curves.resumed:
                ax.axvline(step, color='#999999', linestyle=':', linewidth=1)
            ax.set_xlim(left=0)
        axes[-1, 0].set_xlabel('iteration (dotted: resumed)' if curves.resumed else 'iteration')
        if length := curves.epoch_length:
            scales = (lambda x: x / length, lambda x: x * length)
            over = axes[0, 0].secondary_xaxis('top', functions=scales)
            over.set_xlabel('epoch')
            over.spines['top'].set_visible(False)
        figure.savefig(out, dpi=150, format=file_format)


def draw_losses(ax: 'Axes', curves: Curves) -> None:
    parts = sorted(set(curves.losses) - {'loss'})
    colors = ['#e07b39', '#3a9d6e', '#9467bd', '#c2a01e', '#d6619f', '#5aa7c7']
    top = 0.0
    if len(parts) == 1:
        parts = []  # it is the total
    for name, color in [('loss', '#1f4e9c'), *zip(parts, colors * len(parts))]:
        steps = sorted(curves.losses[name])
        raw = [curves.losses[name][step] for step in steps]
        line = smoothed(raw, len(raw) // 25)
        is_total = name == 'loss'
        ax.plot(steps, raw, color=color, alpha=0.25 if is_total else 0.1, linewidth=0.9)
        ax.plot(
            steps,
            line,
            color=color,
            label=f'{"total loss" if is_total else name}: {line[-1]:.3g}',
            marker='o' if len(raw) < 3 else None,
            markersize=4,
            linewidth=2.2 if is_total else 1.2,
            alpha=1 if is_total else 0.6,
        )
        top = max([top, *(v for v in line if math.isfinite(v))])
    ax.set_ylabel('training loss')
    if top > 0:
        ax.set_ylim(0, top * 1.15)  # of the smoothed lines: a spike must not flatten them
    ax.legend(loc='best', title='smoothed (pale: as logged)', alignment='left')


def draw_metrics(ax: 'Axes', curves: Curves) -> None:
    metrics = sorted(curves.metrics)  # some have a prefix such as coco/
    shown = {
        metric: name
        for short, name in HEADLINES.items()
        for metric in metrics
        if metric.rpartition('/')[2] == short
    }
    shown = shown or dict(zip(metrics, metrics))
    colors = ['#c0392b', '#2c6fbb', '#2e8b57', '#8e6bbf', '#c2861e', '#4aa3a3', '#777777']
    for (name, text), color in zip(shown.items(), colors * len(shown)):
        steps = sorted(curves.metrics[name])
        values = [curves.metrics[name][step] for step in steps]
        label = f'{text}: {values[-1]:.3g}'
        if max(values) > values[-1]:
            label += f' (best {max(values):.3g})'
        ax.plot(steps, values, color=color, label=label, marker='o', markersize=4, linewidth=2)
    in_percent = any(name.endswith(('mIoU', 'Acc')) for name in shown)
    ax.set_ylabel('validation (%)' if in_percent else 'validation')
    ax.set_ylim(bottom=0)
    ax.margins(y=0.1)
    ax.legend(loc='best')
