"""Measures RetinaNet's latency on a CPU with our backbones, ResNet-50 and Swin-T, next to the
published COCO AP.

    python -m benchmarks.latency
    python -m benchmarks.latency --models retinanet_pvt_v2_b0 ResNet-50 --size 512 --rounds 1
    python -m benchmarks.latency --again benchmarks/detectors.json

The folder `--out` gets latency.json (all times, and the machine), latency.md (the table, which is
also printed) and latency.png. A row is a detector of our configs or of MMDetection's, for one
image: backbone, neck and head. Boxes are not selected: how long that takes depends on the scores,
and the weights here are random.

    accelerated  in float32, as `cpvt infer` runs the detector, after `accelerate`
    bfloat16     accelerated, as `cpvt infer --dtype bfloat16` runs it, with its last layers in
                 float32
    plain        in float32, as it is, of MMDetection's detectors
    x ResNet-50  accelerated, relative to ResNet-50, also accelerated

PyTorch has one thread, and its processor time counts, not the clock: what else runs on the machine
does not. On an idle core both are the same. The detectors take turns (A B C, A B C, ...), each with
two passes, and the least time is shown. Files and table are written after each round.

benchmarks/detectors.json has the times of docs/performance.md; `--again` draws their figure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from json import dumps, loads
from pathlib import Path
from typing import NamedTuple, Optional

from cpvt_pyramid.app.tooling.command import (
    UserError,
    check_at_least,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.app.tooling.files import atomic_write, make_folder, write_text
from cpvt_pyramid.app.tooling.report import markdown_table
from cpvt_pyramid.app.tooling.sizes import Size

prepare_for_torch()  # before torch is imported

with imports_of('latency'):
    import matplotlib.pyplot as plt
    import mmdet
    import torch
    from matplotlib.patheffects import withStroke
    from torch import Tensor, nn

    from benchmarks import ROOT
    from benchmarks.costs import count_parameters
    from benchmarks.machine import machine
    from benchmarks.published import BACKBONES, COMPARED, RETINANET_1X, family_of, published_by
    from benchmarks.timing import Time, show_progress, time_call, torch_threads
    from cpvt_pyramid import accelerate
    from cpvt_pyramid.app.config.load import load_config
    from cpvt_pyramid.app.predict.openmmlab.loading import build_model
    from cpvt_pyramid.mm.amp import bfloat16


# Of the lines in the figure, by the names of families.
COLORS = {'PVT': '#7a7f87', 'PVTv2': '#2c6fbb', 'PCPVT': '#c0392b', 'SVT': '#2e8b57'}
OTHER = '#000000'  # color
BASE = 'ResNet-50'
SIZE = Size(800, 1344)  # of the image, as in training
PASSES = 2  # of a turn; the first one also prepares memory and oneDNN's kernels


class Detector(NamedTuple):
    """A row of the table."""

    name: str  # in --models
    backbone: str
    family: str  # '' for those of other packages
    config: Path
    box_ap: float
    source: str


def detectors() -> Iterator[Detector]:
    """RetinaNet with all backbones that have a published result of its 1x schedule."""
    for arch, (box_ap,) in RETINANET_1X.results.items():
        family = family_of(arch)
        config = RETINANET_1X.config.format(BACKBONES[arch].short)
        backbone, *_ = BACKBONES[arch].name.split(', ')
        path = ROOT / 'configs' / f'{config}.py'
        yield Detector(
            config, backbone, family.name, path, box_ap, published_by(RETINANET_1X, arch)
        )
    configs = Path(mmdet.__file__).parent / '.mim' / 'configs'
    for other in COMPARED:
        path = configs / other.config
        yield Detector(other.backbone, other.backbone, '', path, other.box_ap, other.source)


DETECTORS = {detector.name: detector for detector in detectors()}


def latency(
    *,
    models: Sequence[str] = (),
    size: Size = SIZE,
    rounds: int = 3,
    again: Optional[str] = None,
    out: str = 'work_dirs/latency',
) -> None:
    """Print the table, and write it, the times and the figure.

    Args:
        models: names of our configs, ResNet-50 or Swin-T; by default all
        size: of the image, in pixels
        rounds: turns of each detector
        again: a latency.json, whose table and figure are written again; nothing is measured
        out: folder for latency.json, latency.md and latency.png
    """
    for name in models:
        if name not in DETECTORS:
            raise UserError(f'unknown model {name!r}; one of {", ".join(DETECTORS)}')
    check_at_least('size', min(size), 32)
    check_at_least('rounds', rounds, 1)
    folder = Path(out)
    if again:
        results = loads(Path(again).read_text(encoding='utf-8'))
        write(results, make_folder(folder))
        show(results)
        return
    make_folder(folder)
    torch.manual_seed(0)
    image = torch.randn(1, 3, *size)
    rows = [new_row(DETECTORS[name]) for name in models or DETECTORS]
    results = {'machine': machine('cpu'), 'size': size, 'rows': rows}
    with torch_threads(1):
        for i in range(rounds):
            for row in rows:
                show_progress(f'round {i + 1} of {rounds}: {row["name"]}')
                measure(row, image)
            write_text(folder / 'latency.json', dumps(results, indent=1) + '\n')
            write(results, folder)
    show(results)


def write(results: dict, folder: Path) -> None:
    """Write the table and the figure."""
    write_text(folder / 'latency.md', latency_table(results['rows']))
    draw(results, folder / 'latency.png')


def show(results: dict) -> None:
    """Print what was measured where, and the table."""
    height, width = results['size']
    print(f'{results["machine"]["processor"]}, {height} x {width} pixels, one thread\n')
    print(latency_table(results['rows']), end='')


# Measurement


def new_row(detector: Detector) -> dict:
    """A row without times: those of the processor in float32 and in bfloat16, of the clock in
    float32 and, of other packages' detectors, of the processor before `accelerate`."""
    row = dict(
        name=detector.name,
        backbone=detector.backbone,
        family=detector.family,
        box_ap=detector.box_ap,
        source=detector.source,
        seconds=[],
        clock_seconds=[],
        bfloat16_seconds=[],
    )
    if not detector.family:
        row['plain_seconds'] = []
    return row


def measure(row: dict, image: Tensor) -> None:
    """Build the detector of a row, and add the times of its passes."""
    model = build(DETECTORS[row['name']])
    row['parameters'] = count_parameters(model)
    if 'plain_seconds' in row:
        for _ in range(PASSES):
            row['plain_seconds'].append(time_pass(model, image).processor)
    accelerate(model)
    for _ in range(PASSES):
        seconds = time_pass(model, image)
        row['seconds'].append(seconds.processor)
        row['clock_seconds'].append(seconds.clock)
    with bfloat16(model):
        for _ in range(PASSES):
            row['bfloat16_seconds'].append(time_pass(model, image).processor)


def build(detector: Detector) -> nn.Module:
    """The detector with random weights."""
    return build_model(load_config(detector.config), 'cpu')


def time_pass(model: nn.Module, image: Tensor) -> Time:
    """The time that backbone, neck and head take."""
    with torch.inference_mode():
        return time_call(lambda: model(image, mode='tensor'))


# Table and figure


def latency_table(rows: Sequence[dict]) -> str:
    """The least times of each row, in Markdown."""
    base = next((min(row['seconds']) for row in rows if row['name'] == BASE), None)
    lines = []
    for row in rows:
        least = min(row['seconds'])
        plain = f'{min(row["plain_seconds"]):.2f}' if 'plain_seconds' in row else ''
        lines.append(
            [
                row['backbone'],
                f'{row["box_ap"]:.1f}',
                row['source'],
                f'{row["parameters"] / 1e6:.1f}M',
                f'{least:.2f}',
                f'{min(row["bfloat16_seconds"]):.2f}',
                plain,
                f'{least / base:.2f}' if base else '',
            ]
        )
    head = (
        'RetinaNet with',
        'published AP',
        'by',
        'parameters',
        'accelerated, s',
        'bfloat16, s',
        'plain, s',
        f'x {BASE}',
    )
    return markdown_table(head, lines)


def draw(results: dict, path: Path) -> None:
    """Draw AP over latency: a line for each family, a cross for the detectors of MMDetection."""
    rows = results['rows']
    height, width = results['size']
    figure, axes = plt.subplots(figsize=(7.5, 5.4), layout='constrained')
    for family, color in COLORS.items():
        members = [row for row in rows if row['family'] == family]
        if not members:
            continue
        seconds = [min(row['seconds']) for row in members]
        box_aps = [row['box_ap'] for row in members]
        axes.plot(seconds, box_aps, 'o-', color=color, label=family)
        low = [min(row['bfloat16_seconds']) for row in members]
        axes.plot(low, box_aps, 'o--', color=color, ms=3, lw=0.8)
        for row, x, y in zip(members, seconds, box_aps):
            name = row['backbone'].rpartition('-')[2]
            if family == 'PVT':  # below its line is Swin-T
                label(axes, name, (x, y), (-6, 4), color, ha='right')
            else:
                label(axes, name, (x, y), (6, -11), color, ha='left')
    for row in rows:
        if row['family']:
            continue
        least = min(row['seconds'])
        plain = min(row['plain_seconds'])
        low = min(row['bfloat16_seconds'])
        axes.plot([low, least, plain], [row['box_ap']] * 3, color=OTHER, lw=0.8, ls=':')
        axes.plot(low, row['box_ap'], 'X', color=OTHER, ms=5)
        axes.plot(least, row['box_ap'], 'X', color=OTHER, ms=8)
        axes.plot(plain, row['box_ap'], 'X', color='white', mec=OTHER, ms=8)
        label(axes, row['backbone'], (least, row['box_ap']), (0, -14), OTHER, ha='center')
    axes.plot([], [], 'o--', color='grey', ms=3, lw=0.8, label='the same in bfloat16')
    axes.plot([], [], 'X', color=OTHER, ms=8, ls='', label="MMDetection's, also accelerated")
    axes.plot([], [], 'X', color='white', mec=OTHER, ms=8, ls='', label='the same, not accelerated')
    axes.plot([], [], 'X', color=OTHER, ms=5, ls='', label='the same in bfloat16, accelerated')
    axes.set(
        title=f'RetinaNet on one thread of {results["machine"]["processor"]}',
        xlabel=f'time for one image of {height} x {width} pixels (measured)',
        ylabel='COCO box AP (published)',
    )
    axes.xaxis.set_major_formatter(lambda seconds, _: f'{seconds:g} s\n{1000 * seconds:.0f} ms')
    axes.margins(y=0.1)
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(alpha=0.25)
    figure.legend(frameon=False, loc='outside lower center', ncols=3, fontsize=8.5)
    with atomic_write(path, '.png') as draft:
        figure.savefig(draft, dpi=130)
    plt.close(figure)


def label(
    axes: plt.Axes,
    text: str,
    point: tuple[float, float],
    offset: tuple[float, float],
    color: str,
    ha: str,
) -> None:
    """Write a name at an offset from a point, in typographic points; lines do not cross it."""
    axes.annotate(
        text,
        point,
        offset,
        textcoords='offset points',
        ha=ha,
        color=color,
        fontsize=8.5,
        path_effects=[withStroke(linewidth=3, foreground='white')],
        zorder=5,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(latency, argv)


if __name__ == '__main__':
    sys.exit(main())
