#!/usr/bin/env python
"""Measures the backbones' time and memory beside those of other libraries, and beside a floor.

    python tools/benchmarks/speed.py
    python tools/benchmarks/speed.py --models ours timm pvt_v2_b2 swin_tiny convnext_tiny resnet50 \\
        --sizes 224 512 1024 2048 --steps forward train --json speed.json --plot speed.png
    python tools/benchmarks/speed.py --config configs/retinanet_cpvt_s.py --sizes 800x1333 --batch 2

All from an image to four maps: `ours`; the same architecture in other libraries, `timm` and `mmseg`
(Twins), `mmdet` (PVT), with the same weights and one eps, their maps compared first; others of
about its size, among which `mmdet` stands for a PCPVT: the PVT of its shape. SVT is without stage
norms, as in timm. A train step is a forward pass, the mean square of all maps, and a backward pass,
without an optimizer. After a warm-up the models take turns in one process: A B C, A B C, ...

With --config, all from a normalised image to the raw outputs of a config's detector or segmentor,
with the models as its backbone and one neck and heads, whose weights are random and the same; a
train step is then a backward pass of its loss, of random targets. In backbones nothing is dropped,
and all four maps are made. Where a model selects by score, small differences become large ones.

    ms      the median of the rounds
    ratio   to the first model: of the medians, and the middle half of the rounds' own ratios
    MiB     the most that the step takes beyond the built model, in a steady state: what libraries
            load and compile once, an equal step before has done. On a GPU, of torch's allocator; on
            a CPU, resident set, in a process of its own that runs nothing else
    GFLOPs  multiply-additions (get_flops.py)
    floor   ms / what arithmetic alone, or memory traffic alone, would take at the machine's rates,
            measured in this run: its best rate of matrix products, and that of a copy. Traffic is
            the operands and results of products with weights and of convolutions, each once.
            Neither this nor GFLOPs of what looks at values, as losses and proposals do
    differs from the first model's maps, largest difference / largest value
    graphs  compiled for this size, 0 where those of earlier ones serve, and breaks between them; in
            training one more, to compare the maps

With --compile each model is followed by itself compiled, of which a CPU's memory is not measured.
With --profile follow the operators that take most of a step, by the time in themselves and not in
those that they call: of the GPU or the CPU, as shares of all.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import json
import math
import operator
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run from a checkout, uninstalled

OURS = ('ours', 'ours_cp')  # the second with activation checkpointing
SAME = (*OURS, 'timm', 'mmseg', 'mmdet')  # the same architecture
OTHERS = ('pvt_v2_b2', 'swin_tiny', 'convnext_tiny', 'resnet50')
COMPILED = '_compiled'  # behind the name of a model
STEPS, DTYPES = ('forward', 'train'), ('float32', 'bfloat16', 'float16')
TOLERANCE = 1e-4  # of float32 maps that must be equal; of their largest value
WARM_UP = 2  # steps
OPERATORS = 8  # of a profile
BOXES = 7  # in each image of a detector's training
MIB = 2**20


class Case(NamedTuple):
    """What the models are measured on."""

    step: str  # one of STEPS
    dtype: str  # of weights and image
    height: int  # pixels
    width: int
    batch: int
    device: str
    config: str | None = None  # whose model it is; None: backbones alone

    def __str__(self) -> str:
        model = f'{Path(self.config).stem}, ' if self.config else ''
        size = f'{self.height}x{self.width}'
        return f'{model}{self.step}, {self.dtype}, {size}, batch {self.batch}, {self.device}'

    def image(self) -> Tensor:
        image = torch.randn(self.batch, 3, self.height, self.width)
        return image.to(self.device, getattr(torch, self.dtype))

    def prepared(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device, getattr(torch, self.dtype))
        if self.config:
            model.targets = targets(model, self)
        return model.train(self.step == 'train')


def benchmark(
    models: Sequence[str] = (),
    arch: str | None = None,
    sizes: Sequence[tuple[int, int]] = ((512, 512),),
    dtypes: Sequence[str] = ('float32',),
    steps: Sequence[str] = ('forward',),
    batch: int = 1,
    device: str = 'cpu',
    threads: int | None = None,
    rounds: int = 7,
    config: str | None = None,
    with_compile: bool = False,
    with_cp: bool = False,
    with_profile: bool = False,
    memory: bool = True,
    json_file: str | None = None,
    plot: str | None = None,
) -> dict:
    """Measure every combination of steps, dtypes and sizes, and print a table as each is done.

    Args:
        models: names from SAME and OTHERS; none: ours and all others of the same architecture.
        arch: a name from `ARCHS`; None: the config's, else pcpvt_small.
        sizes: height and width of the images, in pixels.
        dtypes: of weights and images.
        steps: 'forward', 'train' or both.
        batch: images at a time.
        device: torch device.
        threads: of torch on a CPU; None: as torch has it.
        rounds: how many times each model is timed.
        config: a config file whose model is measured, with the models as its backbone; None:
            backbones alone.
        with_compile: each model, then the same by torch.compile, with dynamic sizes.
        with_cp: 'ours' and 'ours_cp' first, then the others.
        with_profile: find the operators that take most time.
        memory: measure memory, too.
        json_file: where the numbers go, after each combination.
        plot: a picture of cost over resolution.

    Returns:
        What is in the JSON: `machine`, `options`, `rates` (of each dtype) and `rows`.
    """
    if config and with_compile:
        raise ValueError('--compile is for backbones alone, not for --config')
    arch = find_arch(arch, config)
    check(arch, sizes, batch, device, threads, rounds, (json_file, plot))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    models = models or [x for x in same_architecture(arch) if x != 'ours_cp']
    if with_cp:
        models = [*OURS, *(x for x in models if x not in OURS)]
    torch.manual_seed(0)
    results = {
        'machine': machine(device),
        'options': dict(arch=arch, config=config, threads=torch.get_num_threads())
        | dict(rounds=rounds, compiled=with_compile),
        'rates': {},
        'rows': [],
    }
    try:
        contestants = build_all(tuple(dict.fromkeys(models)), arch, config)
        if with_compile:
            contestants = beside_compiled(contestants)
        for step, dtype, (height, width) in itertools.product(steps, dtypes, sizes):
            case = Case(step, dtype, height, width, batch, device, config)
            say(f'{case} ...')
            if dtype not in results['rates']:
                results['rates'][dtype] = rates = machine_rates(device, dtype)
                print(rates_line(dtype, rates))
            rows = measure(contestants, arch, case, rounds, memory)
            for row in rows:
                if 'gflops' in row:
                    row['floor_ms'] = 1e3 * floor(row, results['rates'][dtype])
                if with_profile and 'ms' in row:
                    model = case.prepared(contestants[row['model']])
                    row['profile'] = profile(model, case)
            results['rows'] += rows
            print(table(case, rows), flush=True)
            if with_profile:
                print(profiles(rows), flush=True)
            if json_file:
                write_json(results, json_file)
    finally:
        torch.set_num_threads(threads_before)
        if plot and results['rows']:
            draw(results, plot)
    return results


def find_arch(arch: str | None, config: str | None) -> str:
    if not config:
        return arch or 'pcpvt_small'
    if arch:
        raise ValueError('--arch is what the backbone of --config says; leave one of them out')
    return read_config(config).model.backbone.get('arch', 'pcpvt_small')


def check(
    arch: str, sizes: Sequence, batch: int, device: str, threads: int | None, rounds: int,
    files: Sequence[str | None],
) -> None:  # fmt: skip
    from cpvt_pyramid import ARCHS

    if arch not in list(ARCHS):  # that of a config may be anything
        raise ValueError(f'unknown arch {arch!r}; one of {", ".join(ARCHS)}')
    if min(batch, rounds, threads or 1) < 1:
        raise ValueError('--batch, --rounds and --threads are numbers from 1 up')
    if min(min(size) for size in sizes) < 32:
        raise ValueError('--sizes are of 32 pixels and more')
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f'no device {device}: {str(error).splitlines()[0]}') from error
    for path in filter(None, files):
        if Path(path).exists():
            raise ValueError(f'{path} is there already')
        if not Path(path).parent.is_dir():
            raise ValueError(f'{path}: there is no such folder')


# The models


class Maps(nn.Module):
    """A model, called for its maps."""

    def __init__(self, model: nn.Module, maps: Callable[[nn.Module, Tensor], Sequence]) -> None:
        super().__init__()
        self.model = model
        self.maps = maps

    def forward(self, image: Tensor) -> list[Tensor]:
        return list(self.maps(self.model, image))


def build(name: str, arch: str, tensors: dict[str, Tensor] | None = None) -> nn.Module:
    """A model that makes four maps of an image.

    Args:
        name: one of SAME and OTHERS.
        arch: the architecture of those in SAME.
        tensors: the state of our model, for those in SAME.
    """
    from cpvt_pyramid import ARCHS, CPVTPyramid
    from cpvt_pyramid.weights import to_format

    if name in OTHERS:
        return build_other(name)
    a = ARCHS[arch]
    same = same_architecture(arch)
    if name not in same and (name != 'mmdet' or a.window):
        raise ValueError(f'{name} has no {arch}; {", ".join(same)} have')
    dims, depths, windows = list(a.dims), list(a.depths), [a.window] * 4 if a.window else None
    shape = dict(
        num_heads=list(a.heads), mlp_ratios=list(a.mlp_ratios), sr_ratios=list(a.sr_ratios)
    )
    if name == 'timm':
        from timm.models.twins import Twins

        model = inner = Twins(num_classes=0, wss=windows, embed_dims=dims, depths=depths, **shape)
        inner.norm = nn.Identity()  # the classifier's
        model = Maps(inner, lambda m, x: m.forward_intermediates(x, intermediates_only=True))
    elif name == 'mmseg':
        from mmseg.models.backbones import PCPVT, SVT

        shape |= dict(embed_dims=dims, depths=depths, norm_after_stage=False, qkv_bias=True)
        shape |= dict(drop_path_rate=0.0)
        model = inner = SVT(windiow_sizes=windows, **shape) if windows else PCPVT(**shape)
    elif name == 'mmdet':
        from mmdet.models.backbones import PyramidVisionTransformer

        shape |= dict(embed_dims=dims[0] // a.heads[0], num_layers=depths, drop_path_rate=0.0)
        model = inner = PyramidVisionTransformer(**shape)
    else:
        model = inner = CPVTPyramid(arch, stage_norm=False, with_cp=name == 'ours_cp')
    if tensors and name in same:
        inner.load_state_dict(to_format(tensors, name) if name.startswith('mm') else tensors)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    return model.eval()


def build_other(name: str) -> nn.Module:
    if name == 'resnet50':
        from torchvision.models import resnet50
        from torchvision.models.feature_extraction import create_feature_extractor

        layers = [f'layer{i}' for i in (1, 2, 3, 4)]
        return Maps(create_feature_extractor(resnet50(), layers), lambda m, x: m(x).values())
    import timm

    options = dict(swin_tiny=dict(strict_img_size=False)).get(name, {})
    full_name = dict(swin_tiny='swin_tiny_patch4_window7_224').get(name, name)
    return timm.create_model(full_name, features_only=True, **options)


def same_architecture(arch: str) -> tuple[str, ...]:
    """The names of those in SAME that have an architecture."""
    from cpvt_pyramid import ARCHS

    return OURS + (('mmdet',) if ARCHS[arch].position == 'learned' else ('timm', 'mmseg'))


def build_all(names: Sequence[str], arch: str, config: str | None = None) -> dict[str, nn.Module]:
    """Models by their names, those of one architecture with the same random weights; or the model
    of a config with each of them as its backbone, and all else the same."""
    others = [name for name in names if name in OTHERS]
    if config and others:
        raise ValueError(f'{others[0]} is not for --config; {", ".join(same_architecture(arch))}')
    ours = randomised(build('ours', arch))
    whole = build_whole(config) if config else None
    models = {name: build(name, arch, ours.state_dict()) for name in names}
    return {name: Whole(*whole, model) for name, model in models.items()} if whole else models


def randomised(model: nn.Module) -> nn.Module:
    """The model with weights large enough that all of them count."""
    for p in model.parameters():
        p.data += torch.randn_like(p) * (0.5 / math.sqrt(p[0].numel()) if p.dim() > 1 else 0.1)
    return model


# The models of configs


class Whole(nn.Module):
    """The model of a config with a backbone: of images its raw outputs or, in training, its loss.

    Args:
        model: the config's, of which a copy is taken.
        out_indices: the maps that it wants.
        backbone: makes four maps.

    Attributes:
        targets: what comes with the images in mm.
    """

    def __init__(self, model: nn.Module, out_indices: Sequence[int], backbone: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.model.backbone = Maps(backbone, lambda m, x: operator.itemgetter(*out_indices)(m(x)))
        self.targets = []

    def forward(self, images: Tensor) -> list[Tensor] | Tensor:
        from cpvt_pyramid.mm.valid_region import REGION

        REGION.announce(None)  # nothing is padding, whatever this process ran before
        if self.training:
            losses = self.model(images, self.targets, mode='loss')
            return self.model.parse_losses(losses)[0]
        outputs = tree_leaves(self.model(images, self.targets, mode='tensor'))
        return [x for x in outputs if isinstance(x, Tensor)]


def read_config(path: str) -> Any:
    """The config at a path, whose backbone must be ours and one that other libraries have."""
    from cpvt_pyramid.runner import launch

    with mistakes_in_a_config():
        cfg = launch.load_config(path)
    backbone = cfg.model.get('backbone') or {}
    if backbone.get('type') != 'CPVTPyramid':
        raise ValueError(f'{path}: its backbone is {backbone.get("type")}, not CPVTPyramid')
    own = set(backbone) - {'type', 'arch', 'out_indices', 'drop_path_rate', 'with_cp', 'init_cfg'}
    if own:
        raise ValueError(f'{path}: its backbone sets {min(own)}, which is not measured')
    for part in (cfg.model, backbone):
        part.pop('init_cfg', None)  # no pretrained weights
    return cfg


def build_whole(config: str) -> tuple[nn.Module, Sequence[int]]:
    """The model of a config without its backbone, and the maps that it wants of one."""
    from mmengine.logging import MMLogger

    from cpvt_pyramid.runner import launch

    cfg = read_config(config)
    for message in launch.CALM:
        warnings.filterwarnings('ignore', message)
    with mistakes_in_a_config():
        model = launch.build_model(cfg, 'cpu')
    out_indices, model.backbone = model.backbone.out_indices, nn.Identity()
    MMLogger.get_current_instance().setLevel('WARNING')  # else a line for each parameter
    model.init_weights()
    return randomised(model), out_indices


@contextlib.contextmanager
def mistakes_in_a_config() -> Iterator[None]:
    from cpvt_pyramid.runner.launch import UserError

    try:
        yield
    except UserError as error:
        raise ValueError(str(error)) from error


def targets(model: nn.Module, case: Case) -> list:
    """What comes with the images in mm: their size, and random boxes or label maps, always the
    same."""
    from mmengine.structures import InstanceData, PixelData

    model, size = model.model, (case.height, case.width)
    random = torch.Generator().manual_seed(0)
    classes = max(getattr(module, 'num_classes', None) or 0 for module in model.modules())
    metainfo = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), size)
    metainfo['scale_factor'] = (1.0, 1.0)
    samples = []
    for _ in range(case.batch):
        if hasattr(model, 'decode_head'):
            from mmseg.structures import SegDataSample

            labels = torch.randint(classes, (1, *size), generator=random)
            sample = SegDataSample(metainfo=metainfo, gt_sem_seg=PixelData(data=labels))
        else:
            from mmdet.structures import DetDataSample
            from mmdet.structures.mask import BitmapMasks

            labels = torch.randint(classes, (BOXES,), generator=random)
            corner, sides = torch.rand(2, BOXES, 2, generator=random) / 2
            boxes = torch.cat([corner, corner + 0.1 + 0.8 * sides], 1)
            boxes *= torch.tensor([case.width, case.height] * 2)
            instances = InstanceData(bboxes=boxes, labels=labels)
            if model.with_mask:
                left, top, right, bottom = boxes.T[..., None, None]
                y, x = torch.arange(size[0])[:, None], torch.arange(size[1])
                masks = (left <= x) & (x < right) & (top <= y) & (y < bottom)
                instances.masks = BitmapMasks(masks.byte().numpy(), *size)
            sample = DetDataSample(metainfo=metainfo, gt_instances=instances)
        samples.append(sample.to(case.device))
    return samples


# Measuring


def measure(
    contestants: dict[str, nn.Module], arch: str, case: Case, rounds: int, memory: bool
) -> list[dict]:
    """A row for each model; of one that does not fit or cannot take the size, the reason.

    Args:
        contestants: the models by their names.
        arch, case, rounds, memory: as in `benchmark`.
    """
    rows = {name: {'model': name, **case._asdict()} for name in contestants}
    image, steps, first = case.image(), {}, None
    for name, model in contestants.items():
        row, model = rows[name], case.prepared(model)
        of_eager = name.removesuffix(COMPILED)
        eager, same = contestants[of_eager], of_eager in same_architecture(arch)
        before = compilations()
        try:
            if memory and (model is eager or case.device != 'cpu'):
                row['peak_mib'] = peak_memory(name, arch, case, model, image)
            # On the meta device heads and losses fail in many ways, backbones must not.
            uncounted = [Exception] if case.config else []
            with contextlib.suppress(*uncounted):
                row['gflops'], row['gbytes'] = cost(eager, case)
            with torch.inference_mode():
                maps = model.eval()(image)
            if same and first is None:
                first = maps
            elif same:
                row['difference'] = difference(maps, first)
            del maps
            case.prepared(model)
            step = functools.partial(run, model, image, case.step)
            for _ in range(WARM_UP):
                elapsed(step, case.device)
            if model is not eager:
                row['graphs'], row['graph_breaks'] = (
                    after - was for after, was in zip(compilations(), before)
                )
            steps[name] = step
        except (RuntimeError, MemoryError, AssertionError, TypeError, ValueError) as error:
            row['failed'] = ' '.join(str(error).split())[:100]
        differs = row.get('difference', 0)
        if must_be_equal(arch, case) and (differs is None or differs > TOLERANCE):
            raise ValueError(f'{case}: {name} differs from the first model: {differs}')
    times = {name: [] for name in steps}
    for i in range(rounds):
        for name, step in steps.items():
            times[name].append(elapsed(step, case.device))
        say(f'{case}: round {i + 1} of {rounds}')
    for name, seconds in times.items():
        row, base = rows[name], next(iter(times.values()))
        row['ms'] = 1e3 * statistics.median(seconds)
        row['rounds_ms'] = [1e3 * t for t in seconds]
        row['ratio'] = statistics.median(seconds) / statistics.median(base)
        row['ratio_spread'] = middle_half([t / b for t, b in zip(seconds, base)])
    return list(rows.values())


def run(model: nn.Module, image: Tensor, step: str) -> None:
    """A step, with no gradient left behind."""
    if step == 'forward':
        with torch.inference_mode():
            model(image)
        return
    loss(model, image).backward()
    model.zero_grad(set_to_none=True)


def loss(model: nn.Module, image: Tensor) -> Tensor:
    """The mean square of all maps, or what the model of a config makes of its targets."""
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


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles on both sides of the median."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method='inclusive')
    return low, high


def beside_compiled(models: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Each model and, behind it, the same compiled for any size; they share the weights."""
    pairs = [
        ((name, model), (name + COMPILED, torch.compile(model, dynamic=True)))
        for name, model in models.items()
    ]
    return dict(itertools.chain(*pairs))


def compilations() -> tuple[int, int]:
    """Graphs that torch.compile has made in this process, and breaks between them."""
    counters = torch._dynamo.utils.counters
    return counters['stats']['unique_graphs'], sum(counters['graph_break'].values())


def difference(maps: Sequence[Tensor], first: Sequence[Tensor]) -> float | None:
    """The largest, as a share of the largest value; None where the maps have other sizes."""
    if [x.shape for x in maps] != [x.shape for x in first]:
        return None
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(maps, first))


def must_be_equal(arch: str, case: Case) -> bool:
    """Whether all libraries agree: on sizes that need no padding, which each does in its way, and
    as far as nothing is selected by scores, which can be as good as equal."""
    from cpvt_pyramid import ARCHS

    multiple = 32 * (ARCHS[arch].window or 1)
    fits = not (case.height % multiple or case.width % multiple)
    return fits and case.dtype == 'float32' and not case.config


def cost(model: nn.Module, case: Case) -> tuple[float, float]:
    """Billions of multiply-additions and of bytes, of the step."""
    from cpvt_pyramid.flops import Counter

    on_meta = case._replace(device='meta')
    model, image = on_meta.prepared(copy.deepcopy(model)), on_meta.image()
    with Counter() as counter:
        if case.step == 'train':
            loss(model, image).backward()
        else:
            model(image)
    return counter.total / 1e9, counter.bytes / 1e9


def profile(model: nn.Module, case: Case) -> dict[str, float]:
    """The operators in which a step takes most time, and their shares of all operators' time."""
    on_gpu = case.device.startswith('cuda')
    activity = torch.profiler.ProfilerActivity
    image = case.image()
    activities = [activity.CPU, activity.CUDA] if on_gpu else [activity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        run(model, image, case.step)
        synchronize(case.device)
    field = 'self_device_time_total' if on_gpu else 'self_cpu_time_total'
    of_cpu = torch.autograd.DeviceType.CPU  # operators; those of a GPU are their kernels
    events = [event for event in profiler.key_averages() if event.device_type == of_cpu]
    times = {event.key.removeprefix('aten::'): getattr(event, field) for event in events}
    longest = sorted(times, key=times.get, reverse=True)[:OPERATORS]
    return {name: times[name] / sum(times.values()) for name in longest}


# Memory


def peak_memory(name: str, arch: str, case: Case, model: nn.Module, image: Tensor) -> float:
    """MiB that the step takes at most, beyond what there is before it and after an equal one."""
    if case.device.startswith('cuda'):
        run(model, image, case.step)
        before = torch.cuda.memory_allocated(case.device)
        torch.cuda.reset_peak_memory_stats(case.device)
        run(model, image, case.step)
        return (torch.cuda.max_memory_allocated(case.device) - before) / MIB
    child = json.dumps([name, arch, case, torch.get_num_threads()])
    done = subprocess.run([sys.executable, __file__, '--child', child], capture_output=True)
    if done.returncode:
        lines = done.stderr.decode().strip().splitlines()
        raise MemoryError(lines[-1] if lines else f'ended by signal {-done.returncode}')
    return float(done.stdout.split()[-1])


def peak_of_this_process(name: str, arch: str, case: Case, threads: int) -> float:
    """`peak_memory` in a process that runs nothing else."""
    from cpvt_pyramid.runner import memory

    torch.set_num_threads(threads)
    torch.manual_seed(0)  # proposals, and so memory, depend on weights and image
    image = case.image()
    model = case.prepared(build_all([name], arch, case.config)[name])
    memory.limit()
    run(model, image, case.step)
    memory.trim()
    memory.restart_peak()  # outside Linux nothing is seen of a step below what built the model
    before = memory.resident()
    run(model, image, case.step)
    return max(memory.peak() - before, 0) / MIB


# The machine


def machine(device: str) -> dict:
    """What the numbers were measured on."""
    names = in_lines('/proc/cpuinfo', 'model name')
    cuda = device.startswith('cuda')
    return dict(
        processor=torch.cuda.get_device_name(device) if cuda else next(names, platform.machine()),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
        system=platform.platform(),
        torch=torch.__version__,
    )


def in_lines(path: str, field: str) -> Iterator[str]:
    if Path(path).exists():
        for line in Path(path).read_text().splitlines():
            if line.startswith(field):
                yield line.partition(':')[2].strip()


def machine_rates(device: str, dtype: str) -> dict[str, float]:
    """Matrix products in GFLOP/s, of torch and on a CPU of oneDNN by itself: a large square one and
    one as tall and thin as those of the first stage, 16384 tokens from 64 to 512 channels. A copy
    of 256 MiB in GB/s, reading and writing."""
    large = 8192 if device.startswith('cuda') else 2048
    options = dict(device=device, dtype=getattr(torch, dtype))
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
    """Seconds of the fastest of up to 10 calls, as many as two seconds allow."""
    elapsed(function, device)
    times = [elapsed(function, device)]
    while len(times) < 10 and sum(times) < 2:
        times.append(elapsed(function, device))
    return min(times)


def floor(row: dict, rates: dict[str, float]) -> float:
    """Seconds below which the step cannot be, by the counted work and the best measured rates."""
    best = max(rate for name, rate in rates.items() if name != 'copy')
    return max(2 * row['gflops'] / best, row['gbytes'] / rates['copy'])


# What is shown


def say(line: str) -> None:
    """Progress, on one line of a terminal."""
    end = '\r' if sys.stderr.isatty() else '\n'
    print(f'{line:78}' if end == '\r' else line, end=end, file=sys.stderr, flush=True)


def rates_line(dtype: str, rates: dict[str, float]) -> str:
    texts = [f'{name} {rate:.0f}' for name, rate in rates.items() if name != 'copy']
    return f'{dtype} products in GFLOP/s: {"; ".join(texts)}. Copy: {rates["copy"]:.1f} GB/s'


def table(case: Case, rows: Sequence[dict]) -> str:
    """The rows of a case in aligned columns; a column that nobody fills is left out."""
    columns = {
        'model': lambda row: row['model'],
        'ms': lambda row: f'{row["ms"]:.1f}',
        'ratio': lambda row: '{:.2f} ({:.2f} to {:.2f})'.format(row['ratio'], *row['ratio_spread']),
        'MiB': lambda row: f'{row["peak_mib"]:.0f}',
        'GFLOPs': lambda row: f'{row["gflops"]:.1f}',
        'x floor': lambda row: f'{row["ms"] / row["floor_ms"]:.2f}',
        'differs': lambda row: shown(row['difference']),
        'graphs, breaks': lambda row: f'{row["graphs"]}, {row["graph_breaks"]}',
        '': lambda row: row['failed'],
    }
    cells = [list(columns)] + [[cell(of, row) for of in columns.values()] for row in rows]
    lines = list(zip(*(column for column in zip(*cells) if any(column[1:]))))
    return f'\n{case}\n{aligned(lines, str.rjust)}'


def aligned(lines: Sequence[Sequence[str]], after_the_first: Callable) -> str:
    """Cells in columns, the first of them left-justified."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return '\n'.join(
        '  '.join([line[0].ljust(widths[0])] + list(map(after_the_first, line[1:], widths[1:])))
        .rstrip()
        for line in lines
    )  # fmt: skip


def profiles(rows: Sequence[dict]) -> str:
    """The profiles of a case, a column for each model."""
    rows = [row for row in rows if 'profile' in row]
    columns = [
        [row['model']] + [f'{share:4.0%} {name}' for name, share in row['profile'].items()]
        for row in rows
    ]
    return '\n' + aligned(list(itertools.zip_longest(*columns, fillvalue='')), str.ljust)


def shown(difference: float | None) -> str:
    return 'in size' if difference is None else f'{difference:.0e}' if difference else '0'


def cell(of: Callable[[dict], str], row: dict) -> str:
    try:
        return of(row)
    except (KeyError, TypeError):  # not measured
        return ''


def write_json(results: dict, path: str) -> None:
    draft = Path(f'{path}.{os.getpid()}')
    draft.write_text(json.dumps(results, indent=1) + '\n')
    draft.replace(path)


def draw(results: dict, path: str) -> None:
    """Time and memory over the side of the image, each step and dtype a column."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = results['rows']
    columns = list(dict.fromkeys((row['step'], row['dtype']) for row in rows))
    names = list(dict.fromkeys(row['model'] for row in rows))
    quantities = {'ms': 'milliseconds', 'peak_mib': 'MiB beyond the model'}
    quantities = {key: text for key, text in quantities.items() if any(key in row for row in rows)}
    eager = dict.fromkeys(name.removesuffix(COMPILED) for name in names)
    colors = dict(zip(eager, itertools.cycle(['#1f4e9c', *plt.get_cmap('Dark2').colors])))
    figure, axes = plt.subplots(
        len(quantities), len(columns), squeeze=False, sharex=True, layout='constrained',
        figsize=(1.5 + 5.5 * len(columns), 0.8 + 4.2 * len(quantities)),
    )  # fmt: skip
    options, batch = results['options'], rows[0]['batch']
    where = results['machine']['processor']
    what = Path(options['config']).stem if options['config'] else options['arch']
    figure.suptitle(f'{what}, batch {batch}, {where}, {options["threads"]} threads')
    for (key, text), across in zip(quantities.items(), axes):
        for (step, dtype), ax in zip(columns, across):
            here = [row for row in rows if (row['step'], row['dtype']) == (step, dtype)]
            for name in names:
                points = sorted(
                    (math.sqrt(row['height'] * row['width']), row[key])
                    for row in here
                    if row['model'] == name and key in row
                )
                if not points:
                    continue
                sides, costs = zip(*points)  # root of the area, cost
                model = name.removesuffix(COMPILED)
                look = dict(linewidth=2.6, zorder=3) if model in OURS else dict(linewidth=1.4)
                look |= dict(color=colors[model], linestyle='-' if name == model else '--')
                ax.plot(sides, costs, marker='o', markersize=4, label=name, **look)
                if name == names[0]:
                    linear = [costs[-1] * (side / sides[-1]) ** 2 for side in sides]
                    ax.plot(sides, linear, ':', color='#777777', label='in step with the pixels')
            ax.set(xscale='log', yscale='log', title=f'{step}, {dtype}', ylabel=text)
            sides = sorted({math.sqrt(row['height'] * row['width']) for row in here})
            ax.set_xticks(sides, [f'{side:.0f}' for side in sides], rotation=45)
            ax.set_xticks([], minor=True)
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter('{x:g}')
            ax.yaxis.set_minor_formatter(NullFormatter())
            ax.grid(color='#e6e6e6')
            ax.spines[['top', 'right']].set_visible(False)
            ax.legend(frameon=False, fontsize=8)
    for ax in axes[-1]:
        ax.set_xlabel('side of the image in pixels (root of its area)')
    figure.savefig(path, dpi=150)
    plt.close(figure)


def size(text: str) -> tuple[int, int]:
    """'224' or '800x1344': height and width."""
    height, _, width = text.partition('x')
    return int(height), int(width or height)


def main(argv: Sequence[str] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser('benchmark', description=__doc__, formatter_class=plain)
    add = parser.add_argument
    names = (*SAME, *OTHERS)
    add('--models', nargs='+', choices=names, metavar='NAME', default=[], help=', '.join(names))
    add('--arch', help='of ours, timm, mmseg and mmdet (pcpvt_small)')
    add('--config', help='its whole detector or segmentor, with the models as the backbone')
    add('--sizes', nargs='+', type=size, default=[(512, 512)], metavar='SIDE or HxW', help='(512)')
    add('--dtypes', nargs='+', choices=DTYPES, default=['float32'], help='(float32)')
    add('--steps', nargs='+', choices=STEPS, default=['forward'], help='(forward)')
    add('--batch', type=int, default=1, metavar='N', help='images at a time (%(default)s)')
    add('--device', default='cpu', help='torch device, for example cuda (%(default)s)')
    add('--threads', type=int, metavar='N', help='of torch on a CPU (as many as it takes)')
    add('--rounds', type=int, default=7, metavar='N', help='turns of each model (%(default)s)')
    add('--compile', action='store_true', dest='with_compile', help='each model compiled, too')
    add('--with-cp', action='store_true', help='ours with activation checkpointing, too: ours_cp')
    add('--profile', action='store_true', dest='with_profile', help='the longest operators, too')
    add('--no-memory', action='store_false', dest='memory', help='time alone')
    add('--json', metavar='FILE', dest='json_file', help='write all numbers')
    add('--plot', metavar='FILE', help='draw cost over resolution')
    add('--child', help=argparse.SUPPRESS)
    arguments = vars(parser.parse_args(argv))
    child = arguments.pop('child')
    if child:
        name, arch, case, threads = json.loads(child)
        print(peak_of_this_process(name, arch, Case(*case), threads))
        return 0
    try:
        benchmark(**arguments)
    except (OSError, ValueError, ImportError) as error:
        print(f'benchmark: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('benchmark: interrupted; what is done stands above', file=sys.stderr)
        return 130
    return 0


if __name__ == '__main__':
    sys.exit(main())
