"""The measurements of speed.py: results, time, and peak memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import multiprocessing
import sys
import time
import warnings
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.costs import count_operations, meta_model
from cpvt_pyramid import ARCHS, CPVTPyramid, accelerate
from cpvt_pyramid.app.predict.openvino_graph import to_rows
from cpvt_pyramid.app.predict.sessions import openvino_core
from cpvt_pyramid.app.tooling import sizes
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.app.tooling.report import amount
from tests.models import ports
from tests.models.ports import ports_of

OURS = ('plain', 'accelerated', 'checkpointed')
MODELS = ('timm', 'openmmlab', *OURS, 'openvino')
STEPS = ('inference', 'training')
DTYPES = ('float32', 'bfloat16', 'autocast')
# Largest differences of maps and gradients from float32, relative to the largest value, that are
# rounding.
TOLERANCES = {'float32': 1e-4, 'bfloat16': 0.05, 'autocast': 0.05}
# Tokens and channels of the products (tokens x C) @ (C x 4C) whose best rate is the limit: those of
# the MLPs of a backbone, each in parts of some MiB, so that none is limited by memory.
PRODUCTS = ((16384, 64), (4096, 128), (1024, 320), (4096, 320), (1024, 512))
OPENVINO = dict(
    PERFORMANCE_HINT='LATENCY',
    NUM_STREAMS=1,
    ENABLE_HYPER_THREADING=False,
    ENABLE_CPU_PINNING=False,  # of threads that PyTorch uses, too
)
MIB = 2**20
RESOLUTION = time.get_clock_info('process_time').resolution  # seconds


class Case(NamedTuple):
    """What all models of a table do."""

    arch: str
    step: str  # one of STEPS
    height: int  # pixels
    width: int

    def __str__(self) -> str:
        return f'{self.arch}, {self.step}, {self.height}x{self.width}'


class Way(NamedTuple):
    """How a model does it; a row of the table."""

    dtype: str  # one of DTYPES
    threads: int
    model: str  # one of MODELS

    def __str__(self) -> str:
        return f'{self.model} in {self.dtype}, {amount(self.threads, "thread")}'

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Way:
        return cls(row['dtype'], row['threads'], row['model'])

    @property
    def weights(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == 'bfloat16' else torch.float32

    @property
    def products(self) -> torch.dtype:
        return torch.float32 if self.dtype == 'float32' else torch.bfloat16


class Time(NamedTuple):
    """Seconds of a call."""

    clock: float
    processor: float  # of all threads


def ways_of(
    case: Case, models: Sequence[str], dtypes: Sequence[str], threads: Sequence[int]
) -> list[Way]:
    """The rows of a table: OpenVINO has no training and no autocast, and not every library has
    every architecture."""
    ways = []
    for dtype in dtypes:
        for number in threads:
            for model in models:
                if model == 'openvino' and (case.step == 'training' or dtype == 'autocast'):
                    continue
                if model in ('timm', 'openmmlab') and port_of(model, case.arch) is None:
                    continue
                ways.append(Way(dtype, number, model))
    return ways


def port_of(model: str, arch: str) -> str | None:
    """The library that is meant by 'timm' or 'openmmlab'."""
    for name in ports_of(arch):
        if (name == 'timm') == (model == 'timm'):
            return name
    return None


def parse_size(text: str) -> tuple[int, int]:
    """'224' or '800x1344': height and width."""
    try:
        size = sizes.parse_size(text)
    except ArgumentTypeError as error:
        raise UserError(f'a size {error}') from error
    if min(size) < 32:
        raise UserError(f'a size must be of at least 32 pixels, got {text}')
    return size


def say(line: str) -> None:
    """Report progress, on one line if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f'{line:78}', end='\r', file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


# A table


def measure(
    case: Case, ways: Sequence[Way], rounds: int, seconds: float, memory: bool
) -> list[dict[str, Any]]:
    """A row for each way, which JSON can hold. A model that fails, or whose results are wrong, has
    a reason there, and no times.

    Args:
        case: what is measured.
        ways: how.
        rounds: how often each model is timed, at most.
        seconds: after which no other round begins.
        memory: measure the memory of training steps.
    """
    runners = Runners(case)
    truths = runners.truths()
    gflops = operations(case) / 1e9
    rows: dict[Way, dict[str, Any]] = {}
    ready: dict[Way, Runner] = {}
    for way in ways:
        say(f'{case}: {way}')
        row = rows[way] = {**case._asdict(), **way._asdict(), 'gflops': gflops}
        torch.set_num_threads(way.threads)
        try:
            runner = runners.of(way)
            results = runner.results()
        except (RuntimeError, MemoryError, ImportError, AssertionError, TypeError) as error:
            row['failed'] = ' '.join(str(error).split())[:100]
            continue
        if way.dtype != 'float32' and way.model not in OURS:
            # PyTorch sums the gradients of LayerNorm's parameters in bfloat16 on a CPU: they lose
            # up to nine tenths of their value where there are many tokens. Our models correct it.
            norms = {name: results.pop(name) for name in list(results) if is_of_norm(name)}
            row['norm_difference'] = min(difference(norms, truth) for truth in truths)
        row['difference'] = min(difference(results, truth) for truth in truths)
        if row['difference'] > TOLERANCES[way.dtype]:
            row['failed'] = f'wrong: differs by {row["difference"]:.1e}'
            row['is_wrong'] = True
            continue
        ready[way] = runner
    if memory and case.step == 'training':
        add_memory(case, {way: rows[way] for way in ready})
    add_times(case, ready, rows, rounds, seconds)
    return list(rows.values())


def add_times(
    case: Case,
    runners: Mapping[Way, Runner],
    rows: Mapping[Way, dict[str, Any]],
    rounds: int,
    seconds: float,
) -> None:
    """Let the models take turns, so that a slower machine is slower for all."""
    times: dict[Way, list[Time]] = {way: [] for way in runners}
    products = {(way.products, way.threads): Products(way.products, way.threads) for way in runners}
    start = time.perf_counter()
    for i in range(rounds):
        say(f'{case}: round {i + 1} of {rounds}')
        for way, runner in runners.items():
            torch.set_num_threads(way.threads)
            times[way].append(time_of(runner.run))
        for product in products.values():
            product.run()
        if time.perf_counter() - start > seconds:
            break
    for way, of_way in times.items():
        rows[way] |= {
            'clock_seconds': [round(each.clock, 6) for each in of_way],
            'processor_seconds': [round(each.processor, 6) for each in of_way],
            'product_gflops': products[way.products, way.threads].gflops(),
        }


def add_memory(case: Case, rows: Mapping[Way, dict[str, Any]]) -> None:
    """Measure each model and dtype once, in the first of the numbers of threads."""
    found: dict[tuple[str, str], float] = {}
    for way, row in rows.items():
        key = (way.model, way.dtype)
        if key not in found:
            say(f'{case}: memory of {way}')
            found[key] = in_process(peak_of_this_process, case, way)
        row['peak_mib'] = found[key]


def time_of(function: Callable[[], object]) -> Time:
    clock = time.perf_counter()
    processor = time.process_time()
    function()
    return Time(time.perf_counter() - clock, time.process_time() - processor)


def operations(case: Case) -> int:
    """Floating-point operations of the products and convolutions of a step of our plain model.

    For each product a backward pass has two, of the gradients of both factors: it is not counted,
    because PyTorch's counter takes gradients of depthwise convolutions for those of dense ones.
    """
    forward = count_operations(meta_model(CPVTPyramid, case.arch), case.height, case.width)
    return forward if case.step == 'inference' else 3 * forward


# Models


class Runner:
    """A model that turns an image into maps.

    Args:
        model: ours or a library's.
        image: in the dtype of the weights.
        step: one of STEPS.
        autocast: compute in bfloat16 what torch.autocast does.
    """

    def __init__(self, model: nn.Module, image: Tensor, step: str, autocast: bool) -> None:
        self.model = model
        self.image = image
        self.step = step
        self.autocast = autocast

    def maps(self) -> Sequence[Tensor]:
        with torch.autocast('cpu', torch.bfloat16, enabled=self.autocast):
            return self.model(self.image)

    def run(self) -> None:
        """Run a step; gradients are freed."""
        run_step(self.maps, self.model, self.step)

    def results(self) -> dict[str, Tensor]:
        """The maps, and of a training step the gradients of the image and of all parameters."""
        if self.step == 'inference':
            with torch.inference_mode():
                return named(self.maps())
        self.image.requires_grad_()
        try:
            maps = self.maps()
            loss_of(maps).backward()
            found = named([x.detach() for x in maps])
            for name, value in [('image', self.image), *self.model.named_parameters()]:
                if value.grad is not None:
                    found[f'gradient of {name}'] = value.grad
        finally:
            self.image.requires_grad_(False)
            self.image.grad = None
            self.model.zero_grad(set_to_none=True)
        return found


class OpenVINORunner:
    """A model of OpenVINO.

    Args:
        graph: of OpenVINO, for one size.
        image: in float32.
        way: the dtype that it computes in, and the number of threads.
    """

    def __init__(self, graph: Any, image: Tensor, way: Way) -> None:
        settings = OPENVINO | {
            'INFERENCE_NUM_THREADS': way.threads,
            'INFERENCE_PRECISION_HINT': 'bf16' if way.dtype == 'bfloat16' else 'f32',
        }
        compiled = openvino_core().compile_model(graph, 'CPU', settings)
        self.request = compiled.create_infer_request()
        self.image = image.numpy()

    def run(self) -> None:
        self.request.infer([self.image], share_inputs=True, share_outputs=True)

    def results(self) -> dict[str, Tensor]:
        outputs = self.request.infer([self.image])
        return named([torch.from_numpy(value) for value in outputs.values()])


class Runners:
    """The models of a case, each built once, all with the same random weights.

    Args:
        case: what they do.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)
        self.image = torch.randn(1, 3, case.height, case.width, generator=generator)
        self.tensors = ports.randomize(self.our_model()).state_dict()
        self.modules: dict[tuple[str, torch.dtype], nn.Module] = {}
        self.graph: Any = None

    def of(self, way: Way) -> Runner | OpenVINORunner:
        if way.model == 'openvino':
            return OpenVINORunner(self.openvino_graph(), self.image, way)
        key = (way.model, way.weights)
        if key not in self.modules:
            model = self.build(way.model).to(way.weights).train(self.case.step == 'training')
            accelerated = way.model in ('accelerated', 'checkpointed')
            self.modules[key] = accelerate(model) if accelerated else model
        image = self.image.to(way.weights, copy=True)
        return Runner(self.modules[key], image, self.case.step, way.dtype == 'autocast')

    def truths(self) -> list[dict[str, Tensor]]:
        """The results of our plain model in float32; if it has windows, also with windows that the
        map does not fill treated as other libraries do."""
        paddings = ['mask', 'zero'] if ARCHS[self.case.arch].window else ['mask']
        found = []
        for padding in paddings:
            model = self.filled(self.our_model(window_padding=padding))
            model.train(self.case.step == 'training')
            found.append(Runner(model, self.image, self.case.step, autocast=False).results())
        return found

    def build(self, name: str) -> nn.Module:
        if name in OURS:
            return self.filled(self.our_model(with_cp=name == 'checkpointed'))
        port = port_of(name, self.case.arch)
        return ports.with_eps(
            ports.build(port, self.case.arch, self.tensors, has_stage_norm(self.case.arch))
        )

    def our_model(self, **options: Any) -> CPVTPyramid:
        return CPVTPyramid(self.case.arch, stage_norm=has_stage_norm(self.case.arch), **options)

    def filled(self, model: CPVTPyramid) -> nn.Module:
        model.load_state_dict(self.tensors)
        return ports.with_eps(model)

    def openvino_graph(self) -> Any:
        """Our plain model for OpenVINO, in the order of operations that it is fastest with."""
        if self.graph is None:
            import openvino

            model = self.build('plain').eval()
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter('ignore')  # of tracing, which is for one size
                self.graph = openvino.convert_model(
                    model, example_input=self.image, input=list(self.image.shape)
                )
            to_rows(self.graph)
        return self.graph


def has_stage_norm(arch: str) -> bool:
    """As in timm, SVT has none."""
    return ARCHS[arch].stage_norm and not ARCHS[arch].window


def run_step(maps_of: Callable[[], Sequence[Tensor]], model: nn.Module, step: str) -> None:
    """Run a step; gradients are freed."""
    if step == 'inference':
        with torch.inference_mode():
            maps_of()
        return
    loss_of(maps_of()).backward()
    model.zero_grad(set_to_none=True)


def loss_of(maps: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.float().square().mean() for x in maps]).sum()


def named(maps: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f'map {i}': x for i, x in enumerate(maps)}


def is_of_norm(name: str) -> bool:
    """Whether a result is the gradient of a parameter of a layer norm, which is named as ours."""
    return name.startswith('gradient of') and 'norm' in name


def difference(results: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The largest difference of values, relative to the largest value of the same name; infinite
    where shapes differ or a value is not finite."""
    found = 0.0
    for name in results.keys() & truth.keys():
        value = results[name].float()
        expected = truth[name]
        if value.shape != expected.shape or not value.isfinite().all():
            return math.inf
        found = max(found, ((value - expected).abs().max() / expected.abs().max()).item())
    return found


# The limit


class Products:
    """The best rate of a matrix product in a dtype and a number of threads.

    Args:
        dtype: of the factors.
        threads: that share a product.
    """

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self.threads = threads
        self.times: dict[int, list[Time]] = {}  # by the number of operations
        self.factors = []
        for tokens, channels in PRODUCTS:
            x = torch.randn(tokens, channels).to(dtype)
            weight = torch.randn(4 * channels, channels).to(dtype)
            self.factors.append((x, weight))
            if torch.backends.mkldnn.is_available():  # PyTorch's default in float32 is MKL
                self.factors.append((x.to_mkldnn(), weight.to_mkldnn()))

    def run(self) -> None:
        """Time each product; the first time prepares oneDNN's kernel."""
        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            for x, weight in self.factors:
                operations = 2 * x.shape[0] * weight.shape[0] * weight.shape[1]
                for _ in range(3):
                    found = time_of(functools.partial(F.linear, x, weight))
                    self.times.setdefault(operations, []).append(found)

    def gflops(self) -> dict[str, float]:
        """By the clock, and by the processor time of a thread."""
        clock = 0.0
        processor = 0.0
        for operations, times in self.times.items():
            clock = max(clock, operations / min(each.clock for each in times))
            least = min(each.processor for each in times) / self.threads
            processor = max(processor, operations / max(least, RESOLUTION))
        return {'clock': round(clock / 1e9, 1), 'processor': round(processor / 1e9, 1)}


# Memory


def in_process(function: Callable, *arguments: object) -> Any:
    """What a function returns in a process that runs nothing else."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload([__name__])  # imported once for all processes
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def peak_of_this_process(case: Case, way: Way) -> float:
    """Peak memory of a step in MiB, beyond what is in use before it, after an identical step."""
    from cpvt_pyramid.app.tooling import memory

    torch.set_num_threads(way.threads)
    runner = Runners(case).of(way)
    runner.run()
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)  # of glibc
    if malloc_trim:  # return freed heap to the OS, so that reuse shows up in the resident memory
        malloc_trim(0)
    memory.restart_peak()  # outside Linux, a step below the peak of building the model counts as 0
    before = memory.resident()
    runner.run()
    return max(memory.peak() - before, 0) / MIB
