#!/usr/bin/env python
"""Evaluates a detector or a segmentor on its test set at several sizes of image.

    python tools/benchmarks/resolution_sweep.py configs/retinanet_cpvt_s.py epoch_12.pth --sizes 480 640 800

A size is that of the shorter side, in pixels; the longer one's limit keeps the ratio that the
config's test pipeline has. Metrics, time and memory come as a table, a picture and JSON. After an
interruption the same command goes on with the sizes that are not done.
"""

# Imports wait until the arguments are read: --help is quick, and mm's take seconds.
from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmengine.config import Config
    from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

# Of all that evaluators report, what is shown; by the part after a prefix such as 'coco/'.
HEADLINES = {
    'bbox_mAP': 'box AP', 'bbox_mAP_50': 'box AP50', 'bbox_mAP_s': 'box AP small',
    'segm_mAP': 'mask AP', 'segm_mAP_50': 'mask AP50', 'mIoU': 'mIoU', 'mAcc': 'mAcc',
}  # fmt: skip


def resolution_sweep(
    config: str,
    checkpoint: str,
    sizes: Sequence[int],
    limit: int | None = None,
    work_dir: str | None = None,
    cfg_options: Sequence[str] = (),
) -> None:
    """Evaluate at each size, print the table, and write results.json and sweep.png.

    Args:
        config: the config file.
        checkpoint: path or address of the model's weights.
        sizes: of the shorter side of an image, in pixels.
        limit: the first so many images of the test set; None: all.
        work_dir: where a folder is made for this config, checkpoint and limit; by default
            work_dirs/NAME/resolution_sweep.
        cfg_options: `key=value` settings that override the config's.
    """
    from cpvt_pyramid.runner import launch

    sizes = sorted(set(sizes))
    if sizes[0] < 1 or (limit is not None and limit < 1):
        raise launch.UserError('--sizes and --limit take numbers from 1')
    cfg = launch.load_config(config, cfg_options)
    launch.check_data(cfg, 'test')
    weights = launch.read_checkpoint(checkpoint)
    if limit:
        for dataset in launch.leaves(cfg.test_dataloader.dataset):
            dataset.indices = limit
    parent = work_dir or launch.work_dir_of(cfg, config) / 'resolution_sweep'
    folder = launch.make_folder(Path(parent, identity(cfg, checkpoint)))
    done = Sweep(folder / 'results.json')
    at_sizes = {size: at_size(cfg, size) for size in sizes}  # before any of them runs
    for size, resized in at_sizes.items():
        if str(size) not in done.rows:
            resized.work_dir = str(folder / str(size))
            resized.experiment_name = f'{Path(config).stem}_{size}'
            if resized.get('visualizer'):  # mmengine keeps one for each name
                resized.visualizer.name = resized.experiment_name
            done.add(size, evaluate(resized, weights, checkpoint))
    rows = {size: done.rows[str(size)] for size in sizes}
    title = f'{Path(config).stem} on {rows[sizes[0]]["images"]} images'
    draw(rows, title, folder / 'sweep.png')
    print(f'\n{title}\n{table(rows)}\n{folder / "sweep.png"}\n{folder / "results.json"}')


class Sweep:
    """What is done of a sweep, kept in a JSON file: for each size its row of results."""

    def __init__(self, path: Path) -> None:
        from cpvt_pyramid.runner.launch import UserError

        self.path = path
        self.rows: dict[str, dict] = {}
        if path.exists():
            try:
                self.rows = json.loads(path.read_text())
            except ValueError as error:
                raise UserError(f'{path} is no JSON; remove it to begin anew') from error

    def add(self, size: int, row: dict) -> None:
        from cpvt_pyramid.runner.resume import appearing_whole

        self.rows = dict(sorted({**self.rows, str(size): row}.items(), key=lambda x: int(x[0])))
        with appearing_whole(self.path) as draft:
            draft.write_text(json.dumps(self.rows, indent=1) + '\n')


def identity(cfg: Config, checkpoint: str) -> str:
    """A name for what is evaluated: another config, limit or content of the checkpoint has
    another."""
    digest = hashlib.sha256(cfg.pretty_text.encode())
    if Path(checkpoint).is_file():
        with open(checkpoint, 'rb') as file:
            digest.update(hashlib.file_digest(file, 'sha256').digest())
    else:
        digest.update(checkpoint.encode())
    return digest.hexdigest()[:8]


def at_size(cfg: Config, size: int) -> Config:
    """The config with test images whose shorter side is of this size."""
    from copy import deepcopy

    from cpvt_pyramid.runner.launch import UserError, leaves

    cfg = deepcopy(cfg)
    for dataset in leaves(cfg.test_dataloader.dataset):
        steps = [step for step in dataset.pipeline if step['type'].endswith('Resize')]
        if len(steps) != 1 or not steps[0].get('scale'):
            raise UserError('the test pipeline has no Resize with a scale, or several')
        scale = steps[0].scale
        sides = [scale, scale] if isinstance(scale, int) else scale
        steps[0].scale = tuple(round(side * size / min(sides)) for side in sides)
    return cfg


def evaluate(cfg: Config, weights: dict, checkpoint: str) -> dict:
    """The metrics of a config's test, seconds per image (median) and peak memory in MiB."""
    from cpvt_pyramid.runner import launch

    cfg.load_from, cfg.resume = None, False
    cfg.launcher = 'none'
    runner = launch.QuietRunner.from_cfg(cfg)
    launch.load_weights(runner.model, weights, checkpoint)
    dataset = runner.test_dataloader.dataset
    for metric in runner.test_evaluator.metrics:
        if hasattr(metric, 'img_ids') and hasattr(dataset, 'get_data_info'):
            # COCO's metric would count the images beyond a limit as missed.
            metric.img_ids = [dataset.get_data_info(i)['img_id'] for i in range(len(dataset))]
    with stopwatch(runner.model) as laps, peak_memory() as peak:
        metrics = runner.test()
    laps = laps[1:] or laps  # the first batch warms up
    return {
        'metrics': {name: float(value) for name, value in metrics.items()},
        'images': len(dataset),
        'seconds': median(seconds / count for seconds, count in laps),
        'memory': peak(),
        'device': str(next(runner.model.parameters()).device),
    }


@contextmanager
def stopwatch(model: nn.Module) -> Iterator[list[tuple[float, int]]]:
    """Seconds and images of each step of the model, from its preprocessing to its predictions."""
    import torch

    laps = []
    step = model.test_step

    def timed(data: dict) -> list:
        begun = time.perf_counter()
        predictions = step(data)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        laps.append((time.perf_counter() - begun, len(predictions)))
        return predictions

    model.test_step = timed
    yield laps
    del model.test_step


@contextmanager
def peak_memory() -> Iterator[Any]:
    """A function that says what memory has been in use at most since here, in MiB: torch's on a
    GPU, else the whole process's, or None where the system does not tell."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield lambda: round(torch.cuda.max_memory_allocated() / 2**20)
    elif sys.platform == 'linux':
        from cpvt_pyramid.runner import memory

        memory.restart_peak()
        yield lambda: memory.peak() // 2**20
    else:
        yield lambda: None


def headlines(rows: dict[int, dict]) -> dict[str, str]:
    """The metrics to show, with their names; all of them if none is known."""
    names = [name for row in rows.values() for name in row['metrics']]
    known = {
        name: text
        for short, text in HEADLINES.items()
        for name in names
        if name.rpartition('/')[2] == short
    }
    return known or {name: name for name in names}


def table(rows: dict[int, dict]) -> str:
    """Markdown that is aligned to be read as it is."""
    shown = headlines(rows)
    head = ['size', *shown.values(), 'seconds per image', 'peak memory, MiB']
    lines = [
        [str(size), *(f'{row["metrics"].get(name, math.nan):.4g}' for name in shown)]
        + [f'{row["seconds"]:.3g}', str(row['memory'] or '')]
        for size, row in rows.items()
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    marks = ['-' * (width - 1) + ':' for width in widths]
    return '\n'.join(
        '| ' + ' | '.join(cell.rjust(width) for cell, width in zip(line, widths)) + ' |'
        for line in (head, marks, *lines)
    )


def draw(rows: dict[int, dict], title: str, out: Path) -> None:
    """The metrics over the size, and the time on an axis of its own."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    from cpvt_pyramid.runner.resume import appearing_whole

    sizes = list(rows)
    figure, ax = plt.subplots(figsize=(7.5, 4.5), layout='constrained')
    ax.set_title(title, fontweight='bold')
    for name, text in headlines(rows).items():
        values = [row['metrics'].get(name, math.nan) for row in rows.values()]
        ax.plot(sizes, values, marker='o', linewidth=2, label=text)
    ax.set_xlabel('shorter side of the image, pixels')
    ax.set_ylabel('metric')
    ax.set_xticks(sizes)
    ax.set_ylim(bottom=0)
    ax.grid(color='#e6e6e6')
    times = ax.twinx()
    seconds = [row['seconds'] for row in rows.values()]
    times.plot(sizes, seconds, color='#888888', linestyle='--', marker='.', label='time')
    times.set_ylabel(f'seconds per image, {next(iter(rows.values()))["device"]} (dashed)')
    times.set_ylim(bottom=0)
    for axis in (ax, times):
        axis.spines['top'].set_visible(False)
        axis.margins(y=0.1)
    ax.legend(frameon=False, loc='best')
    with appearing_whole(out) as draft:
        figure.savefig(draft, dpi=120, format='png')
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    from cpvt_pyramid.runner.options import add_cfg_options

    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser('resolution_sweep', description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add('config', metavar='CONFIG', help='config file, for example configs/retinanet_cpvt_s.py')
    add('checkpoint', metavar='CHECKPOINT', help='weights of the model, a path or an address')
    add('--sizes', type=int, nargs='+', required=True, metavar='PIXELS', help='of the shorter side')
    add('--limit', type=int, metavar='N', help='the first N images of the test set alone')
    add(
        '--work-dir',
        metavar='DIR',
        help='where a folder for this sweep is made (work_dirs/NAME/resolution_sweep)',
    )
    add_cfg_options(parser, 'test_dataloader.batch_size=8')
    arguments = vars(parser.parse_args(argv))

    from cpvt_pyramid.runner.launch import run_tool

    kept = 'the sizes that are done are kept; the same command goes on'
    return run_tool('resolution_sweep', resolution_sweep, arguments, kept)


if __name__ == '__main__':
    sys.exit(main())
