#!/usr/bin/env python
"""Evaluates a detector or a segmentor on its test set at several image sizes.

    python tools/benchmarks/resolution_sweep.py CONFIG CHECKPOINT --sizes 480 640 800

A size is that of the shorter side, in pixels; the limit of the longer side keeps the ratio that it
has in the config's test pipeline. The results (metrics, time and memory) are a table, a picture and
a JSON file. After an interruption, the same command continues with the sizes that are missing.
"""

# torch and mm are imported inside the functions, so that --help is quick.
from __future__ import annotations

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


def resolution_sweep(
    config: str,
    checkpoint: str,
    *,
    sizes: Sequence[int],
    limit: int | None = None,
    work_dir: str | None = None,
    cfg_options: Sequence[str] = (),
) -> None:
    """Evaluate at each size, print the table, and write results.json and sweep.png.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py
        checkpoint: weights of the model, a path or an address
        sizes (PIXELS): of the shorter side of the images
        limit (N): evaluate only the first N images of the test set
        work_dir (DIR): where to create a folder for this config, checkpoint and limit; by default
            work_dirs/NAME/resolution_sweep
        cfg_options (KEY=VALUE): override settings of the config, for example
            test_dataloader.batch_size=8
    """
    from cpvt_pyramid.runner.checks import check_data
    from cpvt_pyramid.runner.configs import leaves, load_config, work_dir_of
    from cpvt_pyramid.runner.models import fetch_checkpoint
    from cpvt_pyramid.tooling.command import UserError
    from cpvt_pyramid.tooling.files import make_folder

    sizes = sorted(set(sizes))
    if sizes[0] < 1 or (limit is not None and limit < 1):
        raise UserError('--sizes and --limit must be at least 1')
    cfg = load_config(config, cfg_options)
    check_data(cfg, 'test')
    weights = fetch_checkpoint(checkpoint)
    if limit:
        for dataset in leaves(cfg.test_dataloader.dataset):
            dataset.indices = limit
    parent = work_dir or work_dir_of(cfg, config) / 'resolution_sweep'
    folder = make_folder(Path(parent, identity(cfg, checkpoint)))
    done = Sweep(folder / 'results.json')
    at_sizes = {size: at_size(cfg, size) for size in sizes}  # reports an unsuitable pipeline first
    for size, resized in at_sizes.items():
        if str(size) not in done.rows:
            resized.work_dir = str(folder / str(size))
            resized.experiment_name = f'{Path(config).stem}_{size}'
            if resized.get('visualizer'):  # mmengine caches one per name
                resized.visualizer.name = resized.experiment_name
            done.add(size, evaluate(resized, weights, checkpoint))
    rows = {size: done.rows[str(size)] for size in sizes}
    title = f'{Path(config).stem} on {rows[sizes[0]]["images"]} images'
    draw(rows, title, folder / 'sweep.png')
    print(f'\n{title}\n{table(rows)}\n{folder / "sweep.png"}\n{folder / "results.json"}')


class Sweep:
    """The finished part of a sweep, kept in a JSON file: a row of results for each size."""

    def __init__(self, path: Path) -> None:
        from cpvt_pyramid.tooling.command import UserError

        self.path = path
        self.rows: dict[str, dict] = {}
        if path.exists():
            try:
                self.rows = json.loads(path.read_text())
            except ValueError as error:
                raise UserError(f'{path} is damaged; remove it to start over') from error

    def add(self, size: int, row: dict) -> None:
        from cpvt_pyramid.tooling.files import atomic_write

        self.rows = dict(sorted({**self.rows, str(size): row}.items(), key=lambda x: int(x[0])))
        with atomic_write(self.path) as draft:
            draft.write_text(json.dumps(self.rows, indent=1) + '\n')


def identity(cfg: Config, checkpoint: str) -> str:
    """A folder name that depends on the config, the limit and the content of the checkpoint."""
    digest = hashlib.sha256(cfg.pretty_text.encode())
    if Path(checkpoint).is_file():
        with open(checkpoint, 'rb') as file:
            digest.update(hashlib.file_digest(file, 'sha256').digest())
    else:
        digest.update(checkpoint.encode())
    return digest.hexdigest()[:8]


def at_size(cfg: Config, size: int) -> Config:
    """The config with this size for the shorter side of test images."""
    from copy import deepcopy

    from cpvt_pyramid.runner.configs import leaves
    from cpvt_pyramid.tooling.command import UserError

    cfg = deepcopy(cfg)
    for dataset in leaves(cfg.test_dataloader.dataset):
        steps = [step for step in dataset.pipeline if step['type'].endswith('Resize')]
        if len(steps) != 1 or not steps[0].get('scale'):
            raise UserError('the test pipeline must have exactly one Resize with a scale')
        scale = steps[0].scale
        sides = [scale, scale] if isinstance(scale, int) else scale
        steps[0].scale = tuple(round(side * size / min(sides)) for side in sides)
    return cfg


def evaluate(cfg: Config, weights: dict, checkpoint: str) -> dict:
    """Metrics on the config's test set, median seconds per image, and peak memory in MiB."""
    from cpvt_pyramid.runner.models import load_whole_model
    from cpvt_pyramid.runner.tool_runner import ToolRunner

    cfg.load_from, cfg.resume = None, False
    cfg.launcher = 'none'
    runner = ToolRunner.from_cfg(cfg)
    load_whole_model(runner.model, weights, checkpoint)
    dataset = runner.test_dataloader.dataset
    for metric in runner.test_evaluator.metrics:
        if hasattr(metric, 'img_ids') and hasattr(dataset, 'get_data_info'):
            # COCO's metric would count objects of images beyond the limit as missed.
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
    """Seconds and number of images of each `test_step`, from preprocessing to predictions."""
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
    """A function that returns the peak memory since entry, in MiB: torch's on a GPU, otherwise the
    process's; None if the system does not report it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield lambda: round(torch.cuda.max_memory_allocated() / 2**20)
    elif sys.platform == 'linux':
        from cpvt_pyramid.tooling import memory

        memory.restart_peak()
        yield lambda: memory.peak() // 2**20
    else:
        yield lambda: None


def metrics_of(rows: dict[int, dict]) -> dict[str, str]:
    """The metrics to show, and their names in print."""
    from cpvt_pyramid.tooling.report import headlines

    return headlines(dict.fromkeys(name for row in rows.values() for name in row['metrics']))


def table(rows: dict[int, dict]) -> str:
    from cpvt_pyramid.tooling.report import markdown_table

    shown = metrics_of(rows)
    head = ['size', *shown.values(), 'seconds per image', 'peak memory, MiB']
    lines = [
        [str(size), *(f'{row["metrics"].get(name, math.nan):.4g}' for name in shown)]
        + [f'{row["seconds"]:.3g}', str(row['memory'] or '')]
        for size, row in rows.items()
    ]
    return markdown_table(head, lines, numbers=True)


def draw(rows: dict[int, dict], title: str, out: Path) -> None:
    """Draw the metrics over the image size, and the time on a second axis."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    from cpvt_pyramid.tooling.files import atomic_write

    sizes = list(rows)
    figure, ax = plt.subplots(figsize=(7.5, 4.5), layout='constrained')
    ax.set_title(title, fontweight='bold')
    for name, text in metrics_of(rows).items():
        values = [row['metrics'].get(name, math.nan) for row in rows.values()]
        ax.plot(sizes, values, marker='o', linewidth=2, label=text)
    ax.set_xlabel('shorter side of the image in pixels')
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
    with atomic_write(out) as draft:
        figure.savefig(draft, dpi=120, format='png')
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    from cpvt_pyramid.tooling.command import run_command

    kept = 'finished sizes are kept; continue with the same command'
    return run_command(resolution_sweep, argv, kept)


if __name__ == '__main__':
    sys.exit(main())
