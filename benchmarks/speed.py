"""Measures how close our backbones on a CPU come to its limit, and to other libraries' backbones.

    python -m benchmarks.speed
    python -m benchmarks.speed --archs mit_b2 --sizes 512 --dtypes bfloat16 --threads 1
    python -m benchmarks.speed --steps training --sizes 512 --json training.json

For each architecture, size and step it prints a table. All models have the same random weights and
turn one image, or a batch, into four maps:

    timm         timm's; it has no MiT, which is its PVTv2 in MiT's shape
    openmmlab    MMSegmentation's or MMDetection's
    plain        ours
    accelerated  ours after `accelerate`
    checkpointed accelerated, with activation checkpointing
    openvino     our plain model converted by OpenVINO for this one size, with layer norms and sums
                 as rows (`cpvt_pyramid.app.predict.openvino_graph`), which it is fastest with; in
                 inference alone. `autocast` is compared with its bfloat16
    converted    as OpenVINO converts it, without these rows

`--without products` adds our accelerated model without a part of acceleration: without the products
of linear layers, MLPs and patches, without our own functions (kernels), or without our attention.
It runs in a process of its own.

`bfloat16` are weights and image in bfloat16, `autocast` float32 under `torch.autocast`. A training
step is a forward pass, the mean cube of all maps, and a backward pass, without an optimizer.

First each result is compared with float32 of our plain model: maps and, of a training step,
gradients. A model that differs by more than rounding gets no time. Then the models take turns in
one process (A B C, A B C, ...), with all dtypes and numbers of threads.

    ms           median of the clock
    cpu ms       least processor time of all threads, divided by their number. On a busy machine it
                 is what counts; on an idle one both agree, but for threads that wait
    x port       how many times as fast as timm's, or OpenMMLab's if timm's was not measured
    x OpenVINO   than OpenVINO's
    x whole      than our accelerated model, of models without a part of acceleration
    x float32    than the same model in float32
    x 1 thread   than the same model in one thread
    share        of the best rate of a matrix product in this dtype and number of threads: five
                 shapes (tokens x C) @ (C x 4C), by PyTorch's default and by oneDNN, in the same
                 turns. The operations of a model are those of the matrix products and convolutions
                 of our plain one, and three times as many in training; what else it does counts
                 as none
    MiB          peak memory of a training step beyond the model, in a process of its own
    differs      largest difference / largest value, of all maps and gradients
    norms        the same of the gradients of the parameters of other libraries' layer norms, if not
                 in float32 and named as ours. PyTorch sums them in bfloat16 on a CPU, so that they
                 lose up to nine tenths: they are shown, and do not make a result wrong. Those of
                 our layer norms are summed in float32, and count in `differs`

Ratios and shares are of `ms`, or with `--by processor` of `cpu ms`. The default takes some ten
minutes on two idle cores; training takes several times as long. benchmarks.speed_tables writes the
documentation's tables. benchmarks.host counts what the host does for a model, benchmarks.gpu
measures on a GPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from json import dumps, loads
from pathlib import Path
from typing import Literal

from cpvt_pyramid.app.tooling.command import (
    UserError,
    check_at_least,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.app.tooling.files import write_text
from cpvt_pyramid.app.tooling.report import markdown_table, text_table
from cpvt_pyramid.app.tooling.sizes import Size

prepare_for_torch()  # before torch is imported

with imports_of('speed'):
    from benchmarks.machine import machine, version
    from benchmarks.measuring import (
        DTYPES,
        MODELS,
        STEPS,
        Case,
        Variant,
        measure,
        variants_of,
    )
    from benchmarks.parts import PARTS
    from benchmarks.speed_tables import HEAD, WITHOUT, file_of, lines_of, read, write_tables
    from benchmarks.timing import show_progress
    from cpvt_pyramid import ARCHS

SIZES = (Size(512, 512), Size(800, 1344))  # of images
STRIDE = 32  # pixels. The libraries treat sizes that it does not divide differently.


def speed(
    *,
    archs: Sequence[str] = ('pcpvt_small', 'svt_small', 'pvt_v2_b2', 'mit_b2'),
    models: Sequence[Literal[MODELS]] = ('timm', 'plain', 'accelerated', 'openvino'),
    sizes: Sequence[Size] = SIZES,
    batches: Sequence[int] = (1,),
    steps: Sequence[Literal[STEPS]] = ('inference',),
    dtypes: Sequence[Literal[DTYPES]] = DTYPES,
    threads: Sequence[int] = (1, 2),
    rounds: int = 9,
    seconds: float = 40,
    by: Literal['clock', 'processor'] = 'clock',
    no_memory: bool = False,
    markdown: bool = False,
    without: Sequence[Literal[tuple(PARTS)]] = (),
    json: str | None = None,
    record: bool = False,
) -> None:
    """Measure all combinations, printing a table for each architecture, size and step.

    Args:
        archs: architectures of pyramids
        models: what to compare
        sizes: of the image, in pixels, multiples of 32
        batches: numbers of images at a time
        steps: what to measure
        dtypes: float32, weights in bfloat16, or float32 weights under autocast
        threads: numbers of threads
        rounds: turns of each model, at most
        seconds: of the rounds of a table, after which no other one begins
        by: what ratios and shares are of
        no_memory: do not measure the memory of training steps
        markdown: print tables in Markdown
        without: parts of acceleration that are left out, one at a time
        json: write machine, commit and all times to this file, after each table
        record: at the end, write them to benchmarks/processors, in place of this processor's, or
            beside them if these are of the same commit, and write the tables of the documentation
    """
    check(archs, sizes, batches, threads, rounds, json)
    about = {'machine': machine('cpu'), **version(), 'by': by}
    models = [*models, *(WITHOUT + part for part in without)]
    done: list[dict] = []
    wrong = []
    for arch, size, batch, step in itertools.product(archs, sizes, batches, steps):
        case = Case(arch, step, *size, batch)
        show_progress(f'{case} ...')
        variants = variants_of(case, models, dtypes, threads)
        rows = measure(case, variants, rounds, seconds, memory=not no_memory)
        done += rows
        print(f'\n{about["machine"]["processor"]}, {case}\n')
        table = markdown_table if markdown else text_table
        print(table(HEAD, lines_of(rows, by)), flush=True)
        if json:
            write_text(json, as_json(about, done))
        for row in rows:
            if row.get('is_wrong'):
                wrong.append(f'{case}, {Variant.of(row)}: {row["failed"]}')
    if record and not wrong:
        file = file_of(about['machine']['processor'])
        write_text(file, as_json(about, [*recorded_before(file, about, done), *done]))
        write_tables(read())
    if wrong:
        raise UserError('wrong results: ' + '; '.join(wrong))


def check(
    archs: Sequence[str],
    sizes: Sequence[Size],
    batches: Sequence[int],
    threads: Sequence[int],
    rounds: int,
    file: str | None,
) -> None:
    """Raise a UserError for options that cannot be measured, or a file that cannot be written."""
    for arch in archs:
        if arch not in ARCHS:
            raise UserError(f'unknown arch {arch!r}; one of {", ".join(ARCHS)}')
    for size in sizes:
        if size.height % STRIDE or size.width % STRIDE:
            raise UserError(f'sizes must be multiples of {STRIDE}, got {size}')
    check_at_least('rounds', rounds, 1)
    check_at_least('batches', min(batches), 1)
    check_at_least('threads', min(threads), 1)
    if file and Path(file).exists():
        raise UserError(f'{file} already exists; remove it or name another file')
    if file and not Path(file).parent.is_dir():
        raise UserError(f'{file}: no such directory')


def recorded_before(file: Path, about: dict, rows: Sequence[dict]) -> list[dict]:
    """The rows of a file that a run of the same code on the same machine has written, without those
    that are measured again."""
    if not file.exists():
        return []
    found = loads(file.read_text())
    before = found.pop('rows')
    if found != about:
        return []
    again = {what_is_measured(row) for row in rows}
    return [row for row in before if what_is_measured(row) not in again]


def what_is_measured(row: dict) -> tuple:
    return tuple(row.get(name) for name in (*Case._fields, *Variant._fields))


def as_json(about: dict, rows: Sequence[dict]) -> str:
    """A line for each row, so that a later measurement can be compared."""
    lines = ',\n'.join(dumps(row) for row in rows)
    return f'{dumps(about)[:-1]}, "rows": [\n{lines}\n]}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(speed, argv, 'finished results are above')


if __name__ == '__main__':
    sys.exit(main())
