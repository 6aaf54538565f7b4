"""Measures time and memory of our backbones, other libraries', and a lower bound.

    python -m benchmarks.speed
    python -m benchmarks.speed --models ours timm pvt_v2_b2 swin_tiny resnet50 \\
        --sizes 224 512 1024 2048 --steps forward train --json speed.json --plot speed.png
    python -m benchmarks.speed --config configs/retinanet_cpvt_s.py --sizes 800x1333 --batch 2

Every model turns an image into four maps. `ours`, `timm` and `mmseg` (Twins) and `mmdet` (PVT) are
the same architecture with the same weights and LayerNorm eps, and their maps are compared before
they are timed. The others are backbones of similar size; for a PCPVT, `mmdet` is one of them: the
PVT of the same shape. As in timm, SVT has no stage norms. A training step is a forward pass, the
mean square of all maps, and a backward pass; there is no optimizer. After a warm-up the models take
turns in one process (A B C, A B C, ...).

With --config, the model is the detector or segmentor of a config, from normalized images to raw
outputs, with each backbone in turn and the same random weights in neck and heads. A training step
is then a backward pass of its loss on random targets. No backbone drops paths, and all four maps
are computed. Where a model selects by score, small differences become large ones.

    ms      median over the rounds
    cpu ms  median of the processor time of all threads, on which other processes have less effect
    ratio   to the first model: ratio of the medians, and quartiles of the rounds' ratios
    MiB     peak memory of a step beyond the model, after an identical step that loads and compiles
            whatever happens only once. On a GPU, of torch's allocator; on a CPU, resident memory
            of a separate process that runs nothing else
    GFLOPs  billions of multiply-additions (get_flops.py)
    floor   ms / the time of the arithmetic alone, or of the memory traffic alone, whichever is
            longer, at the highest rates so far, which are measured first and after each table: of
            matrix products, and of a copy. Traffic is the operands and results of matrix products
            with weights and of convolutions, once each. Operations that depend on values, such as
            losses and proposals, are not counted
    differs maximum difference from the first model's maps / maximum value; of a model in a runtime
            from the maps of the same model in PyTorch
    graphs  number of graphs compiled for this size (0: earlier ones are reused), and graph breaks;
            training needs one more, to compare the maps

--plain adds ours with plain PyTorch operations (`cpvt_pyramid.ops.plain`) instead of the fast ones.
--compile adds each model compiled: with dynamic sizes, or, if training steps are measured, which
torch 2.13 cannot compile so, for each size. --runtimes adds each model in onnxruntime, in OpenVINO,
and in OpenVINO with products in bfloat16: ours as one file for all sizes (cpvt export), the
others exported by torch.onnx.export for each size. Runtimes are in the tables of float32. Memory of
these is not measured on a CPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Literal

from cpvt_pyramid.tooling.command import (
    UserError,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.tooling.files import write_text

prepare_for_torch()  # before torch is imported

with imports_of('speed'):
    import torch

    from benchmarks.contestants import NAMES, build_all, read_config, with_variants
    from benchmarks.machine import floor, machine, machine_rates, rates_line
    from benchmarks.measuring import DTYPES, STEPS, Case, measure, parse_size, say
    from benchmarks.models.ports import ports_of
    from benchmarks.runtimes import RUNTIMES
    from benchmarks.speed_output import draw, table
    from cpvt_pyramid import ARCHS


def speed(
    *,
    models: Sequence[Literal[NAMES]] = (),
    arch: str | None = None,
    config: str | None = None,
    sizes: Sequence[str] = ('512',),
    dtypes: Sequence[Literal[DTYPES]] = ('float32',),
    steps: Sequence[Literal[STEPS]] = ('forward',),
    batch: int = 1,
    device: str = 'cpu',
    threads: int | None = None,
    rounds: int = 7,
    compile: bool = False,
    runtimes: bool = False,
    with_cp: bool = False,
    plain: bool = False,
    no_memory: bool = False,
    json: str | None = None,
    plot: str | None = None,
) -> None:
    """Measure all combinations of steps, dtypes and sizes, printing a table after each.

    Args:
        models: ours, ours_cp, ours_plain, timm, mmseg, mmdet, pvt_v2_b2, swin_tiny,
            convnext_tiny, resnet50; by default ours and all ports of the architecture
        arch: of ours and of the ports; by default that of the config, or pcpvt_small
        config: measure the detector or segmentor of this config file, with each model as its
            backbone, instead of backbones alone
        sizes: of the images, in pixels, each as SIDE or HEIGHTxWIDTH
        dtypes: of weights and images; tf32 is float32 whose products a GPU rounds to TF32
        steps: what to measure
        batch: images per step
        device: torch device, for example cuda
        threads: CPU threads; by default as many as torch takes
        rounds: timed steps of each model
        compile: add each model compiled
        runtimes: add each model in onnxruntime and in OpenVINO, in float32
        with_cp: add ours with activation checkpointing, as ours_cp
        plain: add ours with plain operations, as ours_plain
        no_memory: measure time only
        json: write machine, options, rates and rows to this file, after each table
        plot: draw cost over resolution into this file
    """
    if config and compile:
        raise UserError('--compile measures backbones; leave --config out')
    plain_case = (device, *steps) == ('cpu', 'forward') and 'float32' in dtypes
    if runtimes and (config or not plain_case):
        raise UserError('--runtimes measures float32 forward passes of backbones on a CPU')
    if config and arch:
        raise UserError('--config determines the architecture; leave --arch out')
    if config:
        arch = read_config(config).model.backbone.get('arch')
    arch = arch or 'pcpvt_small'
    pixels = [parse_size(text) for text in sizes]
    check(arch, batch, device, threads, rounds, json, plot)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    names = names_of(models or ['ours', *ports_of(arch)], with_cp, plain)
    torch.manual_seed(0)
    rates = {}
    rows = []
    results = {
        'machine': machine(device),
        'options': {
            'arch': arch,
            'config': config,
            'threads': torch.get_num_threads(),
            'rounds': rounds,
            'compiled': compile,
        },
        'rates': rates,
        'rows': rows,
    }
    try:
        contestants = build_all(names, arch, config)
        contestants = with_variants(contestants, compile, runtimes, dynamic='train' not in steps)
        for step, dtype, (height, width) in itertools.product(steps, dtypes, pixels):
            case = Case(step, dtype, height, width, batch, device, config)
            say(f'{case} ...')
            select_tf32(dtype == 'tf32')
            before = rates.get(dtype) or machine_rates(device, dtype)
            fitting = contestants
            if dtype != 'float32':  # which runtimes take alone
                fitting = {k: v for k, v in contestants.items() if not k.endswith(RUNTIMES)}
            new = measure(fitting, arch, case, rounds, not no_memory)
            # A machine with other work is slower at times.
            after = machine_rates(device, dtype)
            rates[dtype] = {name: max(rate, after[name]) for name, rate in before.items()}
            for row in new:
                if 'gflops' in row:
                    row['floor_ms'] = 1e3 * floor(row, rates[dtype])
            rows += new
            print(f'{results["machine"]["processor"]}, {rates_line(dtype, rates[dtype])}')
            print(table(case, new), flush=True)
            if json:
                write_text(json, dumps(results, indent=1) + '\n')
    finally:
        torch.set_num_threads(threads_before)
        select_tf32(False)
        if plot and rows:
            draw(results, plot)


def names_of(models: Sequence[str], with_cp: bool, plain: bool) -> list[str]:
    """The models to build, each once: ours and its variants, if there are any, first."""
    names = []
    if with_cp or plain:
        names.append('ours')
    if with_cp:
        names.append('ours_cp')
    if plain:
        names.append('ours_plain')
    return list(dict.fromkeys([*names, *models]))


def select_tf32(enable: bool) -> None:
    """Whether a GPU may round the factors of float32 products and convolutions to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = enable
    torch.backends.cudnn.allow_tf32 = enable


def check(
    arch: str, batch: int, device: str, threads: int | None, rounds: int, *files: str | None
) -> None:
    if arch not in list(ARCHS):  # not hashable if a config spells its arch out
        raise UserError(f'unknown arch {arch!r}; one of {", ".join(ARCHS)}')
    if min(batch, rounds, threads or 1) < 1:
        raise UserError('--batch, --rounds and --threads must be at least 1')
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f'no device {device}: {str(error).splitlines()[0]}') from error
    for path in filter(None, files):
        if Path(path).exists():
            raise UserError(f'{path} already exists; remove it or name another file')
        if not Path(path).parent.is_dir():
            raise UserError(f'{path}: no such directory')


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(speed, argv, 'finished results are above')


if __name__ == '__main__':
    sys.exit(main())
