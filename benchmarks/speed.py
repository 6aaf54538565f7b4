"""Measures time and memory of our backbones and of other libraries'.

    python -m benchmarks.speed
    python -m benchmarks.speed --arch svt_small --sizes 448 --steps forward train --with-cp
    python -m benchmarks.speed --models ours timm swin_tiny resnet50 --sizes 224 512 1024

Every model turns an image into four maps. `ours`, `timm` and `mmseg` (Twins) and `mmdet` (PVT) are
the same architecture with the same weights and LayerNorm eps, and their maps are compared before
they are timed. The others are backbones of similar size; for a PCPVT, `mmdet` is one of them: the
PVT of the same shape. `ours_accelerated` is ours after `accelerate`. As in timm, SVT has no stage
norms. A training step is a forward pass, the mean square of all maps, and a backward pass; there is
no optimizer. After a warm-up the models take turns in one process (A B C, A B C, ...).

    ms      median over the rounds
    ratio   to the first model: ratio of the medians, and quartiles of the rounds' ratios
    MiB     peak memory of a step beyond the model, after an identical step that loads and compiles
            whatever happens only once. On a GPU, of torch's allocator; on a CPU, resident memory
            of a separate process that runs nothing else; of compiled models on a GPU alone
    differs maximum difference from the first model's maps / maximum value
    graphs  number of graphs compiled for this size, and graph breaks; training needs one more, to
            compare the maps

benchmarks.host counts what the host does for a model, benchmarks.gpu measures on a GPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path
from typing import Literal

from cpvt_pyramid.app.tooling.command import UserError, imports_of, prepare_for_torch, run_command
from cpvt_pyramid.app.tooling.files import write_text
from cpvt_pyramid.app.tooling.report import text_table

prepare_for_torch()  # before torch is imported

with imports_of('speed'):
    import torch

    from benchmarks.machine import machine
    from benchmarks.measuring import (
        DTYPES,
        NAMES,
        STEPS,
        Case,
        build_all,
        measure,
        parse_size,
        say,
        shown,
    )
    from cpvt_pyramid import ARCHS
    from tests.models.ports import ports_of

COLUMNS = {
    'model': lambda row: row['model'],
    'ms': lambda row: f'{row["ms"]:.1f}',
    'images/s': lambda row: f'{1e3 * row["batch"] / row["ms"]:.1f}' if row['batch'] > 1 else '',
    'ratio': lambda row: '{:.2f} ({:.2f} to {:.2f})'.format(row['ratio'], *row['ratio_spread']),
    'MiB': lambda row: f'{row["peak_mib"]:.0f}',
    'differs': lambda row: shown(row['difference']),
    'graphs, breaks': lambda row: f'{row["graphs"]}, {row["graph_breaks"]}',
    '': lambda row: row['failed'],
}


def speed(
    *,
    models: Sequence[Literal[NAMES]] = (),
    arch: str = 'pcpvt_small',
    sizes: Sequence[str] = ('512',),
    dtypes: Sequence[Literal[DTYPES]] = ('float32',),
    steps: Sequence[Literal[STEPS]] = ('forward',),
    batch: int = 1,
    device: str = 'cpu',
    threads: int | None = None,
    rounds: int = 7,
    compile: bool = False,
    with_cp: bool = False,
    no_memory: bool = False,
    json: str | None = None,
) -> None:
    """Measure all combinations of steps, dtypes and sizes, printing a table after each.

    Args:
        models: ours, ours_cp, ours_accelerated, timm, mmseg, mmdet, pvt_v2_b2, swin_tiny,
            convnext_tiny, resnet50; by default ours, on a CPU ours_accelerated, too, and all ports
            of the architecture
        arch: of ours and of the ports
        sizes: of the images, in pixels, each as SIDE or HEIGHTxWIDTH
        dtypes: of weights and images
        steps: what to measure
        batch: images per step
        device: torch device, for example cuda
        threads: CPU threads; by default as many as torch takes
        rounds: timed steps of each model
        compile: add each model compiled, for each size
        with_cp: add ours with activation checkpointing, as ours_cp
        no_memory: measure time only
        json: write machine, options and rows to this file, after each table
    """
    pixels = [parse_size(text) for text in sizes]
    check(arch, batch, device, threads, rounds, json)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    first = ['ours', 'ours_cp'] if with_cp else []
    accelerated = ['ours_accelerated'] if device == 'cpu' else []
    names = list(dict.fromkeys([*first, *(models or ['ours', *accelerated, *ports_of(arch)])]))
    torch.manual_seed(0)
    rows = []
    options = {'arch': arch, 'threads': torch.get_num_threads(), 'rounds': rounds}
    results = {'machine': machine(device), 'options': options, 'rows': rows}
    try:
        built = build_all(names, arch, compile)
        for step, dtype, (height, width) in itertools.product(steps, dtypes, pixels):
            case = Case(step, dtype, height, width, batch, device)
            say(f'{case} ...')
            new = measure(built, arch, case, rounds, not no_memory)
            rows += new
            print(f'{results["machine"]["processor"]}, {torch.get_num_threads()} threads')
            print(table(case, new), flush=True)
            if json:
                write_text(json, dumps(results, indent=1) + '\n')
    finally:
        torch.set_num_threads(threads_before)


def table(case: Case, rows: Sequence[dict]) -> str:
    """The rows of a case in aligned columns, without empty columns."""
    columns = []
    for name, text_of in COLUMNS.items():
        cells = [cell(text_of, row) for row in rows]
        if any(cells):
            columns.append([name, *cells])
    head, *lines = zip(*columns)
    return f'\n{case}\n{text_table(head, lines)}'


def cell(text_of: Callable[[dict], str], row: dict) -> str:
    try:
        return text_of(row)
    except KeyError:  # not measured
        return ''


def check(
    arch: str, batch: int, device: str, threads: int | None, rounds: int, file: str | None
) -> None:
    if arch not in ARCHS:
        raise UserError(f'unknown arch {arch!r}; one of {", ".join(ARCHS)}')
    if min(batch, rounds, threads or 1) < 1:
        raise UserError('--batch, --rounds and --threads must be at least 1')
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'no device {device}: {str(error).splitlines()[0]}') from error
    if file and Path(file).exists():
        raise UserError(f'{file} already exists; remove it or name another file')
    if file and not Path(file).parent.is_dir():
        raise UserError(f'{file}: no such directory')


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(speed, argv, 'finished results are above')


if __name__ == '__main__':
    sys.exit(main())
