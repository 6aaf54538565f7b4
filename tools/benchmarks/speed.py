#!/usr/bin/env python
"""Measures time and memory of our backbones, other libraries', and a lower bound.

    python tools/benchmarks/speed.py
    python tools/benchmarks/speed.py --models ours timm pvt_v2_b2 swin_tiny resnet50 \\
        --sizes 224 512 1024 2048 --steps forward train --json speed.json --plot speed.png
    python tools/benchmarks/speed.py --config configs/retinanet_cpvt_s.py --sizes 800x1333 --batch 2

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

With --busy, each model is measured with every way in which OpenMP's threads can wait for each
other, in a process of its own, while one other process per core computes:

    passive  they sleep (OMP_WAIT_POLICY=passive)
    bounded  they spin for a fraction of a millisecond, as in all tools of this repository
    default  they spin for milliseconds
    idle ms  the median without the other processes

--plain adds ours with plain PyTorch operations (`cpvt_pyramid.ops.plain`) instead of the fast ones.
--compile adds each model compiled: with dynamic sizes, or, if training steps are measured, which
torch 2.13 cannot compile so, for each size. --runtimes adds each model in onnxruntime, in OpenVINO,
and in OpenVINO with products in bfloat16: ours as one file for all sizes (tools/export.py), the
others exported by torch.onnx.export for each size. Runtimes are in the tables of float32. Memory of
these is not measured on a CPU.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from json import dumps, loads
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# A checkout that is not installed, and runtimes.py where this file is loaded as a module.
sys.path[:0] = [str(ROOT), str(ROOT / 'tests'), str(Path(__file__).parent)]
from cpvt_pyramid.tooling.command import (  # noqa: E402
    SPIN_COUNT,
    WAIT_VARIABLES,
    UserError,
    imports_of,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.tooling.files import write_text  # noqa: E402
from cpvt_pyramid.tooling.report import text_table  # noqa: E402
from cpvt_pyramid.tooling.threads import usable_cores  # noqa: E402

prepare_for_torch()  # before torch is imported

with imports_of('speed'):
    import numpy as np
    import torch
    from models import ports
    from models.ports import Maps, ports_of
    from runtimes import RUNTIMES, in_runtimes
    from torch import Tensor, nn
    from torch.utils._pytree import tree_leaves

    from cpvt_pyramid import ARCHS, CPVTPyramid, ops
    from cpvt_pyramid.flops import Counter

OURS = ('ours', 'ours_cp', 'ours_plain')  # as is; activation checkpointing; plain operations
NAMES = (*OURS, *ports.PORTS, *ports.OTHERS)
COMPILED = '_compiled'  # suffix of the name of a compiled model
VARIANTS = re.compile(f'({COMPILED}|_({"|".join(RUNTIMES)}))$')  # and of one in a runtime
STEPS, DTYPES = ('forward', 'train'), ('float32', 'tf32', 'bfloat16', 'float16')
TOLERANCE = 1e-4  # for float32 maps that must be equal, relative to their maximum
WARM_UP = 2  # steps
BOXES = 7  # per training image of a detector
MIB = 2**20
CHILD = '--call'  # first argument of a process that calls a function of this file
# Ways of waiting, see --busy; 'default' is libgomp's, and not the tools'.
WAITS = {
    'passive': {'OMP_WAIT_POLICY': 'passive'},
    'bounded': {'GOMP_SPINCOUNT': SPIN_COUNT},
    'default': {'GOMP_SPINCOUNT': '300000'},
}
BUSY = 'while True: pass'  # a process that keeps a core busy


class Case(NamedTuple):
    """A workload."""

    step: str  # one of STEPS
    dtype: str  # of weights and image, one of DTYPES
    height: int  # pixels
    width: int
    batch: int
    device: str
    config: str | None = None  # measure its model; None: backbones only

    def __str__(self) -> str:
        model = f'{Path(self.config).stem}, ' if self.config else ''
        size = f'{self.height}x{self.width}'
        return f'{model}{self.step}, {self.dtype}, {size}, batch {self.batch}, {self.device}'

    def image(self) -> Tensor:
        image = torch.randn(self.batch, 3, self.height, self.width)
        return image.to(self.device, torch_dtype(self.dtype))

    def prepared(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device, torch_dtype(self.dtype))
        if self.config:
            model.targets = targets(model, self)
        return model.train(self.step == 'train')


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
    busy: bool = False,
    no_memory: bool = False,
    json: str | None = None,
    plot: str | None = None,
) -> None:
    """Measure all combinations of steps, dtypes and sizes, printing a table after each.

    Args:
        models (NAME): ours, ours_cp, ours_plain, timm, mmseg, mmdet, pvt_v2_b2, swin_tiny,
            convnext_tiny, resnet50; by default ours and, without --busy, all ports of the
            architecture
        arch: of ours and of the ports; by default that of the config, or pcpvt_small
        config: measure the detector or segmentor of this config file, with each model as its
            backbone, instead of backbones alone
        sizes (SIDE|HxW): of the images, in pixels
        dtypes: of weights and images; tf32 is float32 whose products a GPU rounds to TF32
        steps: what to measure
        batch (N): images per step
        device: torch device, for example cuda
        threads (N): CPU threads; by default as many as torch takes
        rounds (N): timed steps of each model
        compile: add each model compiled
        runtimes: add each model in onnxruntime and in OpenVINO, in float32
        with_cp: add ours with activation checkpointing, as ours_cp
        plain: add ours with plain operations, as ours_plain
        busy: measure time on busy cores, for each way in which OpenMP's threads wait
        no_memory: measure time only
        json (FILE): write machine, options, rates and rows to this file, after each table
        plot (FILE): draw cost over resolution into this file
    """
    if config and compile:
        raise UserError('--compile measures backbones; leave --config out')
    if busy and (compile or device != 'cpu'):
        raise UserError('--busy measures on a CPU; leave --compile and --device out')
    plain_case = (device, *steps) == ('cpu', 'forward') and 'float32' in dtypes
    if runtimes and (busy or config or not plain_case):
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
    models = models or ['ours', *([] if busy else ports_of(arch))]
    variants = [*['ours_cp'] * with_cp, *['ours_plain'] * plain]
    models = tuple(dict.fromkeys([*(['ours', *variants] if variants else ()), *models]))
    torch.manual_seed(0)
    results = {
        'machine': machine(device),
        'options': dict(arch=arch, config=config, threads=torch.get_num_threads())
        | dict(rounds=rounds, compiled=compile),
        'rates': {},
        'rows': [],
    }
    try:
        contestants = {} if busy else build_all(models, arch, config)
        contestants = with_variants(contestants, compile, runtimes, dynamic='train' not in steps)
        for step, dtype, (height, width) in itertools.product(steps, dtypes, pixels):
            case = Case(step, dtype, height, width, batch, device, config)
            say(f'{case} ...')
            select_tf32(dtype == 'tf32')
            if busy:
                rows = measure_busy(models, arch, case, rounds)
            else:
                rates = results['rates'].get(dtype) or machine_rates(device, dtype)
                in_dtype = {
                    name: model
                    for name, model in contestants.items()
                    if dtype == 'float32' or not name.endswith(RUNTIMES)
                }
                rows = measure(in_dtype, arch, case, rounds, not no_memory)
                # A machine with other work is slower at times.
                again = machine_rates(device, dtype)
                rates = results['rates'][dtype] = {k: max(rates[k], again[k]) for k in rates}
                for row in rows:
                    if 'gflops' in row:
                        row['floor_ms'] = 1e3 * floor(row, rates)
                print(f'{results["machine"]["processor"]}, {rates_line(dtype, rates)}')
            results['rows'] += rows
            print(table(case, rows), flush=True)
            if json:
                write_text(json, dumps(results, indent=1) + '\n')
    finally:
        torch.set_num_threads(threads_before)
        select_tf32(False)
        if plot and results['rows']:
            draw(results, plot)


def torch_dtype(name: str) -> torch.dtype:
    return torch.float32 if name == 'tf32' else getattr(torch, name)


def select_tf32(enable: bool) -> None:
    """Whether a GPU may round the factors of float32 products and convolutions to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = enable


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


# The models


def build(name: str, arch: str, tensors: dict[str, Tensor] | None = None) -> nn.Module:
    """A model that makes four maps of an image.

    Args:
        name: one of NAMES.
        arch: the architecture of ours and of ports.
        tensors: the state dict of our model, for models with the same parameters.
    """
    if name in OURS:
        model = CPVTPyramid(arch, stage_norm=False, with_cp=name == 'ours_cp')
        if tensors:
            model.load_state_dict(tensors)
        return ports.with_eps(Maps(model, in_plain) if name == 'ours_plain' else model).eval()
    tensors = tensors if name in ports_of(arch) else None
    try:
        return ports.with_eps(ports.build(name, arch, tensors, stage_norm=False))
    except (ImportError, ValueError) as error:
        raise UserError(str(error)) from error


def in_plain(model: nn.Module, image: Tensor) -> Sequence[Tensor]:
    with ops.plain():
        return model(image)


def build_all(names: Sequence[str], arch: str, config: str | None = None) -> dict[str, nn.Module]:
    """Models by name. Those with the same parameters have the same random weights; with a config,
    they are the backbones of otherwise identical models."""
    others = [name for name in names if name in ports.OTHERS]
    if config and others:
        available = ', '.join((*OURS, *ports_of(arch)))
        raise UserError(f'--config takes {available} as --models, not {others[0]}')
    tensors = ports.randomize(build('ours', arch)).state_dict()
    whole = build_whole(config) if config else None
    models = {name: build(name, arch, tensors) for name in names}
    return {name: Whole(*whole, model) for name, model in models.items()} if whole else models


# The models of configs


class Whole(nn.Module):
    """The model of a config with another backbone: from images to raw outputs or, in training
    mode, to its loss.

    Args:
        model: the config's model; it is copied.
        out_indices: the maps that its neck or head takes.
        backbone: returns four maps.

    Attributes:
        targets: the data samples of a batch.
    """

    def __init__(self, model: nn.Module, out_indices: Sequence[int], backbone: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        # Contiguous, as those of every backbone that is registered in mm.
        self.model.backbone = Maps(
            backbone,
            lambda model, x: [y.contiguous() for i, y in enumerate(model(x)) if i in out_indices],
        )
        self.targets = []

    def forward(self, images: Tensor) -> list[Tensor] | Tensor:
        if self.training:
            losses = self.model(images, self.targets, mode='loss')
            return self.model.parse_losses(losses)[0]
        outputs = tree_leaves(self.model(images, self.targets, mode='tensor'))
        return [x for x in outputs if isinstance(x, Tensor)]


def read_config(path: str) -> Any:
    """The config at a path; its backbone must be ours, and one that other libraries have."""
    from cpvt_pyramid.runner.config.load import load_config

    cfg = load_config(path)
    backbone = cfg.model.get('backbone') or {}
    if backbone.get('type') != 'CPVTPyramid':
        raise UserError(f'{path}: the backbone must be CPVTPyramid, got {backbone.get("type")}')
    own = set(backbone) - {'type', 'arch', 'out_indices', 'drop_path_rate', 'with_cp', 'init_cfg'}
    if own:
        raise UserError(f'{path}: remove {min(own)} from the backbone; no other library has it')
    for part in (cfg.model, backbone):
        part.pop('init_cfg', None)  # no pretrained weights
    return cfg


def build_whole(config: str) -> tuple[nn.Module, Sequence[int]]:
    """The model of a config with an empty backbone, and the indices of the maps that it takes."""
    from mmengine.logging import MMLogger

    from cpvt_pyramid.runner.models import build_model

    model = build_model(read_config(config), 'cpu')
    out_indices, model.backbone = model.backbone.out_indices, nn.Identity()
    MMLogger.get_current_instance().setLevel('WARNING')  # not a line per parameter
    model.init_weights()
    for p in model.parameters():  # noise, so that all of them affect the result
        p.data += torch.randn_like(p) * (0.5 / math.sqrt(p[0].numel()) if p.dim() > 1 else 0.1)
    return model, out_indices


def targets(whole: Whole, case: Case) -> list:
    """The data samples of a batch, with boxes, masks or label maps, always the same."""
    from models.samples import annotated

    model, size = whole.model, (case.height, case.width)
    classes = max(getattr(module, 'num_classes', None) or 0 for module in model.modules())
    corners = torch.rand(BOXES, 2, generator=torch.Generator().manual_seed(0)) * 0.7
    boxes = torch.cat([corners, corners + 0.25], 1) * torch.tensor(size[::-1] * 2)
    labels = [label % classes for label in range(BOXES)]
    segmentor, masks = hasattr(model, 'decode_head'), getattr(model, 'with_mask', False)
    sample = annotated(segmentor, size, boxes.tolist(), labels, classes, masks).to(case.device)
    return [sample] * case.batch


# Measuring


def measure(
    contestants: dict[str, nn.Module], arch: str, case: Case, rounds: int, memory: bool
) -> list[dict]:
    """A row for each model; if one runs out of memory or rejects the size, the row says so.

    Args:
        contestants: models by name.
        arch, case, rounds, memory: as in `speed`.
    """
    rows = {name: {'model': name, **case._asdict()} for name in contestants}
    image, steps, first, own = case.image(), {}, None, None
    for name, model in contestants.items():
        row, model = rows[name], case.prepared(model)
        eager_name = VARIANTS.sub('', name)
        eager, same = contestants[eager_name], eager_name in (*OURS, *ports_of(arch))
        before = compilations()
        try:
            if memory and (model is eager or case.device != 'cpu'):
                row['peak_mib'] = peak_memory(name, arch, case, model, image)
            # On the meta device heads and losses fail in many ways; backbones must not.
            uncounted = [Exception] if case.config else []
            with contextlib.suppress(*uncounted):
                row['gflops'], row['gbytes'] = cost(eager, case)
            with torch.inference_mode():
                maps = model.eval()(image)
            if same and first is None:
                first = maps
            elif same:
                row['difference'] = difference(maps, own if name.endswith(RUNTIMES) else first)
            if name == eager_name:
                own = maps
            del maps
            case.prepared(model)
            step = functools.partial(run, model, image, case.step)
            for _ in range(WARM_UP):
                elapsed(step, case.device)
            if name.endswith(COMPILED):
                row['graphs'], row['graph_breaks'] = (compilations() - before).tolist()
            steps[name] = step
        except (RuntimeError, MemoryError, AssertionError, TypeError, ValueError) as error:
            row['failed'] = ' '.join(str(error).split())[:100]
        differs = row.get('difference', 0)
        rounded = name.endswith('bf16')
        if not rounded and must_be_equal(arch, case) and (differs is None or differs > TOLERANCE):
            raise UserError(
                f'{case}: {name} must equal the first model within {TOLERANCE}, '
                f'differs by {shown(differs)}'
            )
    times, cpu_times = ({name: [] for name in steps} for _ in range(2))
    for i in range(rounds):
        for name, step in steps.items():
            before = time.process_time()
            times[name].append(elapsed(step, case.device))
            cpu_times[name].append(time.process_time() - before)
        say(f'{case}: round {i + 1} of {rounds}')
    for name, seconds in times.items():
        rows[name] |= compared(seconds, next(iter(times.values())))
        rows[name]['cpu_ms'] = 1e3 * statistics.median(cpu_times[name])
    return list(rows.values())


def compared(seconds: Sequence[float], base: Sequence[float]) -> dict:
    """What a row says about the times of its rounds and of the first model's."""
    return {
        'ms': 1e3 * statistics.median(seconds),
        'rounds_ms': [1e3 * t for t in seconds],
        'ratio': statistics.median(seconds) / statistics.median(base),
        'ratio_spread': np.percentile(np.divide(seconds, base), [25, 75]).tolist(),
    }


def run(model: nn.Module, image: Tensor, step: str) -> None:
    """Run a step; gradients are freed."""
    if step == 'forward':
        with torch.inference_mode():
            model(image)
        return
    loss(model, image).backward()
    model.zero_grad(set_to_none=True)


def loss(model: nn.Module, image: Tensor) -> Tensor:
    """The mean square of all maps, or the loss of a config's model."""
    outputs = model(image)
    if isinstance(outputs, Tensor):
        return outputs
    return sum(x.float().square().mean() for x in outputs)


def elapsed(function: Callable[[], object], device: str) -> float:
    """Seconds that a call takes."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device.startswith('cuda'):
        torch.cuda.synchronize(device)


def measure_busy(names: Sequence[str], arch: str, case: Case, rounds: int) -> list[dict]:
    """A row for each model and each of WAITS, with every core busy.

    Args:
        names: of the models.
        arch, case, rounds: as in `speed`.
    """
    rows, base = [], None
    for name, waits in itertools.product(names, WAITS):
        say(f'{case}: {name}, {waits}')
        environment = dict.fromkeys(WAIT_VARIABLES) | WAITS[waits]
        arguments = name, arch, case, rounds
        try:
            idle = in_process(time_rounds, *arguments, **environment)
            with busy_cores():
                busy = in_process(time_rounds, *arguments, **environment)
        except MemoryError as error:
            raise UserError(f'{name}, {waits}: {error}') from error
        base = base or busy
        row = {'idle_ms': 1e3 * statistics.median(idle)} | compared(busy, base)
        rows.append({'model': f'{name}, {waits}', **case._asdict(), **row})
    return rows


def in_process(function: Callable, *arguments: object, **environment: str | None) -> Any:
    """What a function of this file returns in a process of its own, with as many threads; both are
    of JSON. Environment variables that are None are removed."""
    call = dumps([function.__name__, torch.get_num_threads(), *arguments])
    variables = {k: v for k, v in (os.environ | environment).items() if v is not None}
    done = subprocess.run(
        [sys.executable, __file__, CHILD, call], capture_output=True, text=True, env=variables
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise MemoryError(lines[-1] if lines else f'killed by signal {-done.returncode}')
    return loads(done.stdout.splitlines()[-1])


def build_step(name: str, arch: str, case: Case) -> Callable[[], None]:
    """A step of a model, with an image and weights that are always the same."""
    torch.manual_seed(0)  # the number of proposals depends on weights and image
    image = case.image()
    model = case.prepared(build_all([name], arch, case.config)[name])
    return functools.partial(run, model, image, case.step)


def time_rounds(name: str, arch: str, case: Case, rounds: int) -> list[float]:
    """The seconds of some steps."""
    step = build_step(name, arch, case)
    return [elapsed(step, case.device) for _ in range(WARM_UP + rounds)][WARM_UP:]


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """One busy process per core, until the context ends."""
    processes = [subprocess.Popen([sys.executable, '-c', BUSY]) for _ in range(os.cpu_count())]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def with_variants(
    models: dict[str, nn.Module], compile: bool, runtimes: bool, dynamic: bool
) -> dict[str, nn.Module]:
    """Each model, followed by the same model compiled, with dynamic sizes or for each size, and in
    each runtime."""
    result = {}
    for name, model in models.items():
        result[name] = model
        if compile:
            result[name + COMPILED] = torch.compile(model, dynamic=dynamic)
        if runtimes:
            result |= in_runtimes(name, model)
    return result


def compilations() -> np.ndarray:
    """Graphs compiled in this process so far, and graph breaks."""
    counters = torch._dynamo.utils.counters
    return np.array([counters['stats']['unique_graphs'], sum(counters['graph_break'].values())])


def difference(maps: Sequence[Tensor], first: Sequence[Tensor]) -> float | None:
    """The largest difference relative to the largest value; None if the shapes differ."""
    if [x.shape for x in maps] != [x.shape for x in first]:
        return None
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(maps, first))


def must_be_equal(arch: str, case: Case) -> bool:
    """Whether all libraries agree: at sizes that need no padding, where each library does its own,
    and in backbones, because heads may select by scores that are almost equal."""
    multiple = 32 * (ARCHS[arch].window or 1)
    fits = not (case.height % multiple or case.width % multiple)
    return fits and case.dtype == 'float32' and not case.config


def cost(model: nn.Module, case: Case) -> tuple[float, float]:
    """Billions of multiply-additions and of bytes in a step."""
    on_meta = case._replace(device='meta')
    model, image = on_meta.prepared(copy.deepcopy(model)), on_meta.image()
    with Counter() as counter:
        if case.step == 'train':
            loss(model, image).backward()
        else:
            model(image)
    return counter.total / 1e9, counter.bytes / 1e9


# Memory


def peak_memory(name: str, arch: str, case: Case, model: nn.Module, image: Tensor) -> float:
    """Peak memory of a step in MiB, beyond what is in use before it, after an identical step."""
    if case.device.startswith('cuda'):
        run(model, image, case.step)
        before = torch.cuda.memory_allocated(case.device)
        torch.cuda.reset_peak_memory_stats(case.device)
        run(model, image, case.step)
        return (torch.cuda.max_memory_allocated(case.device) - before) / MIB
    return in_process(peak_of_this_process, name, arch, case)


def peak_of_this_process(name: str, arch: str, case: Case) -> float:
    """`peak_memory` on a CPU, in a process that runs nothing else."""
    from cpvt_pyramid.tooling import memory

    step = build_step(name, arch, case)
    memory.limit()
    step()
    memory.trim()
    memory.restart_peak()  # outside Linux, a step below the peak of building the model counts as 0
    before = memory.resident()
    step()
    return max(memory.peak() - before, 0) / MIB


# The machine


def machine(device: str) -> dict:
    """The machine that the numbers are from."""
    cuda = device.startswith('cuda')
    return dict(
        processor=torch.cuda.get_device_name(device) if cuda else processor(),
        cores=usable_cores(),
        system=platform.platform(),
        torch=torch.__version__,
    )


def processor() -> str:
    """The processor's name; many virtual machines hide the model, but not its numbers."""
    try:
        lines = Path('/proc/cpuinfo').read_text().partition('\n\n')[0].splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    found = {key.strip(): value.strip() for key, _, value in (x.partition(':') for x in lines)}
    numbers = [f'{key} {found[key]}' for key in ('cpu family', 'model') if key in found]
    return ', '.join([found.get('model name', platform.machine()), *numbers])


def machine_rates(device: str, dtype: str) -> dict[str, float]:
    """Rates of matrix products, in GFLOP/s, and of a copy of 256 MiB, in GB/s read and written.

    The products are a large square one and one of the first stage's shape, 16384 tokens from 64 to
    512 channels; by torch and, on a CPU, by oneDNN called directly.
    """
    large = 8192 if device.startswith('cuda') else 2048
    options = dict(device=device, dtype=torch_dtype(dtype))
    products = {'torch': torch.nn.functional.linear}
    if device == 'cpu' and torch.backends.mkldnn.is_available() and dtype != 'float16':
        products['oneDNN'] = lambda x, weight: torch.ops.mkldnn._linear_pointwise(
            x, weight, None, 'none', [], ''
        )
    rates = {}
    with torch.inference_mode():
        for shape, (m, k, n) in {'square': (large,) * 3, 'tall': (16384, 64, 512)}.items():
            x, weight = torch.randn(m, k, **options), torch.randn(n, k, **options)
            for library, product in products.items():
                seconds = least(functools.partial(product, x, weight), device)
                rates[f'{shape}, {library}'] = 2 * m * k * n / seconds / 1e9
        source = torch.zeros(256 * MIB, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        seconds = least(lambda: target.copy_(source), device)
        rates['copy'] = 2 * source.numel() / seconds / 1e9
    return rates


def least(function: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of up to 10 calls, or as many as fit into two seconds."""
    elapsed(function, device)
    times = [elapsed(function, device)]
    while len(times) < 10 and sum(times) < 2:
        times.append(elapsed(function, device))
    return min(times)


def floor(row: dict, rates: dict[str, float]) -> float:
    """Lower bound of a step in seconds, from the counted work and the highest measured rates."""
    best = max(rate for name, rate in rates.items() if name != 'copy')
    return max(2 * row['gflops'] / best, row['gbytes'] / rates['copy'])


# Output


def say(line: str) -> None:
    """Report progress, on one line if stderr is a terminal."""
    end = '\r' if sys.stderr.isatty() else '\n'
    print(f'{line:78}' if end == '\r' else line, end=end, file=sys.stderr, flush=True)


def rates_line(dtype: str, rates: dict[str, float]) -> str:
    texts = [f'{name} {rate:.0f}' for name, rate in rates.items() if name != 'copy']
    return f'{dtype} products in GFLOP/s: {"; ".join(texts)}. Copy: {rates["copy"]:.1f} GB/s'


def table(case: Case, rows: Sequence[dict]) -> str:
    """The rows of a case in aligned columns, without empty columns."""
    columns = {
        'model': lambda row: row['model'],
        'idle ms': lambda row: f'{row["idle_ms"]:.1f}',
        'ms': lambda row: f'{row["ms"]:.1f}',
        'cpu ms': lambda row: f'{row["cpu_ms"]:.1f}',
        'images/s': lambda row: f'{1e3 * row["batch"] / row["ms"]:.1f}' if row['batch'] > 1 else '',
        'ratio': lambda row: '{:.2f} ({:.2f} to {:.2f})'.format(row['ratio'], *row['ratio_spread']),
        'MiB': lambda row: f'{row["peak_mib"]:.0f}',
        'GFLOPs': lambda row: f'{row["gflops"]:.1f}',
        'x floor': lambda row: f'{row["ms"] / row["floor_ms"]:.2f}',
        'differs': lambda row: shown(row['difference']),
        'graphs, breaks': lambda row: f'{row["graphs"]}, {row["graph_breaks"]}',
        '': lambda row: row['failed'],
    }
    cells = [list(columns)] + [[cell(of, row) for of in columns.values()] for row in rows]
    head, *lines = zip(*(column for column in zip(*cells) if any(column[1:])))
    return f'\n{case}\n{text_table(head, lines)}'


def shown(difference: float | None) -> str:
    return 'in size' if difference is None else f'{difference:.0e}' if difference else '0'


def cell(of: Callable[[dict], str], row: dict) -> str:
    try:
        return of(row)
    except (KeyError, TypeError):  # not measured
        return ''


def draw(results: dict, path: str) -> None:
    """Time and memory over image size; one column per step and dtype."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    rows = results['rows']
    columns = list(dict.fromkeys((row['step'], row['dtype']) for row in rows))
    names = list(dict.fromkeys(row['model'] for row in rows))
    sides = sorted({round(math.sqrt(row['height'] * row['width'])) for row in rows})
    quantities = [('ms', 'time in ms'), ('peak_mib', 'peak memory in MiB, beyond the model')]
    quantities = [pair for pair in quantities if any(pair[0] in row for row in rows)]
    eager = dict.fromkeys(VARIANTS.sub('', name) for name in names)
    colors = dict(zip(eager, itertools.cycle(['#1f4e9c', *plt.get_cmap('Dark2').colors])))
    figure, axes = plt.subplots(
        len(quantities), len(columns), squeeze=False, sharex=True, layout='constrained',
        figsize=(1.5 + 5.5 * len(columns), 0.8 + 4.2 * len(quantities)),
    )  # fmt: skip
    options = results['options']
    what = Path(options['config']).stem if options['config'] else options['arch']
    where = f'{results["machine"]["processor"]}, {options["threads"]} threads'
    figure.suptitle(f'{what}, batch {rows[0]["batch"]}, {where}')
    panels = itertools.product(quantities, columns)
    for ax, ((key, text), (step, dtype)) in zip(axes.flat, panels):
        for name in names:
            points = sorted(
                (math.sqrt(row['height'] * row['width']), row[key])
                for row in rows
                if (row['model'], row['step'], row['dtype']) == (name, step, dtype) and key in row
            )
            if points:
                model = VARIANTS.sub('', name)
                look = dict(color=colors[model], linestyle='-' if name == model else '--')
                ax.plot(*zip(*points), marker='o', markersize=4, label=name, **look)
        ax.set(xscale='log', yscale='log', title=f'{text}: {step}, {dtype}')
        ax.set_xlabel('image side in pixels (square root of the area)')
        ax.set_xticks(sides, sides)
        ax.set_xticks([], minor=True)
        ax.yaxis.set_major_formatter('{x:,.0f}')
        ax.grid(color='#e6e6e6', which='both')
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_size(text: str) -> tuple[int, int]:
    """'224' or '800x1344': height and width."""
    match = re.fullmatch(r'(\d+)(?:x(\d+))?', text)
    sides = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if min(sides) < 32:
        raise UserError(f'a size must be SIDE or HEIGHTxWIDTH of at least 32 pixels, got {text}')
    return sides


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [CHILD]:
        function, threads, name, arch, case, *rest = loads(argv[1])
        torch.set_num_threads(threads)
        print(dumps(globals()[function](name, arch, Case(*case), *rest)))
        return 0
    return run_command(speed, argv, 'finished results are above')


if __name__ == '__main__':
    sys.exit(main())
