"""The measurements of speed.py: results, time, and peak memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple, Union

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import process_memory
from benchmarks.costs import count_operations, meta_model
from benchmarks.parts import PARTS
from benchmarks.speed_tables import WITHOUT
from benchmarks.timing import RESOLUTION, Time, show_progress, time_call, torch_threads
from cpvt_pyramid import ARCHS, CPVTPyramid, accelerate
from cpvt_pyramid.acceleration.ordinary import is_supported
from cpvt_pyramid.app.predict.openvino_graph import to_rows
from cpvt_pyramid.app.predict.sessions import openvino_core
from cpvt_pyramid.app.tooling.report import amount
from tests.models import ports

OURS = ('plain', 'accelerated', 'checkpointed')
OPENVINO = ('openvino', 'converted')
MODELS = ('timm', 'openmmlab', *OURS, *OPENVINO)
STEPS = ('inference', 'training')
DTYPES = ('float32', 'bfloat16', 'autocast')
# Largest differences of maps and gradients from float32, relative to the largest value, that are
# rounding.
TOLERANCES = {'float32': 1e-4, 'bfloat16': 0.05, 'autocast': 0.05}
# Tokens and channels of the products (tokens x C) @ (C x 4C) whose best rate is the limit: those of
# the MLPs of a backbone, each in parts of some MiB, so that none is limited by memory.
PRODUCTS = ((16384, 64), (4096, 128), (1024, 320), (4096, 320), (1024, 512))
OPENVINO_SETTINGS = dict(
    PERFORMANCE_HINT='LATENCY',
    NUM_STREAMS=1,
    ENABLE_HYPER_THREADING=False,
    ENABLE_CPU_PINNING=False,  # of threads that PyTorch uses, too
)
MIB = 2**20


class Case(NamedTuple):
    """What all models of a table do."""

    arch: str
    step: str  # one of STEPS
    height: int  # pixels
    width: int
    batch: int = 1  # images

    def __str__(self) -> str:
        images = f'{self.batch} x ' if self.batch > 1 else ''
        return f'{self.arch}, {self.step}, {images}{self.height}x{self.width}'


class Variant(NamedTuple):
    """A model, its dtype and its number of threads: a row of the table."""

    dtype: str  # one of DTYPES
    threads: int
    model: str  # one of MODELS, or `WITHOUT` and a part of acceleration

    def __str__(self) -> str:
        return f'{self.model} in {self.dtype}, {amount(self.threads, "thread")}'

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Variant:
        return cls(row['dtype'], row['threads'], row['model'])

    @property
    def is_ours(self) -> bool:
        return self.model in OURS or self.is_partial

    @property
    def is_partial(self) -> bool:
        """Accelerated without a part."""
        return self.model.startswith(WITHOUT)

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == 'bfloat16' else torch.float32

    @property
    def product_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == 'float32' else torch.bfloat16


def variants_of(
    case: Case, models: Sequence[str], dtypes: Sequence[str], threads: Sequence[int]
) -> list[Variant]:
    """The rows of a table: OpenVINO has no training and no autocast, and not every library has
    every architecture."""
    variants = []
    for dtype in dtypes:
        for number in threads:
            for model in models:
                if model in OPENVINO and (case.step == 'training' or dtype == 'autocast'):
                    continue
                if model in ('timm', 'openmmlab') and port_of(model, case.arch) is None:
                    continue
                variants.append(Variant(dtype, number, model))
    return variants


def port_of(model: str, arch: str) -> str | None:
    """The library that 'timm' or 'openmmlab' stands for. None: it has no such architecture."""
    for name in ports.ports_of(arch):
        if (name == 'timm') == (model == 'timm'):
            return name
    return None


# A table


def measure(
    case: Case, variants: Sequence[Variant], rounds: int, seconds: float, memory: bool
) -> list[dict[str, Any]]:
    """Check the results of all variants, then measure their memory and time.

    Args:
        case: what is measured.
        variants: the models.
        rounds: how often each model is timed, at most.
        seconds: after which no other round begins.
        memory: measure the memory of training steps.

    Returns:
        A row for each variant, which JSON can hold. A variant that fails, or whose results are
        wrong, has the reason there (`failed`) and no times.
    """
    with Runners(case) as runners:
        return measure_in_turns(runners, variants, rounds, seconds, memory)


def measure_in_turns(
    runners: Runners, variants: Sequence[Variant], rounds: int, seconds: float, memory: bool
) -> list[dict[str, Any]]:
    """`measure` the variants of the case of some runners."""
    case = runners.case
    references = runners.references()
    gflops = operations(case) / 1e9
    rows: dict[Variant, dict[str, Any]] = {}
    right: dict[Variant, AnyRunner] = {}
    for variant in variants:
        show_progress(f'{case}: {variant}')
        row = rows[variant] = {**case._asdict(), **variant._asdict(), 'gflops': gflops}
        try:
            with torch_threads(variant.threads):
                runner = runners.runner(variant)
                results = runner.results()
        except (RuntimeError, MemoryError, ImportError, AssertionError, TypeError) as error:
            row['failed'] = ' '.join(str(error).split())[:100]
            continue
        row |= compare(results, references, variant)
        if 'failed' not in row:
            right[variant] = runner
    if memory and case.step == 'training':
        add_memory(case, {variant: rows[variant] for variant in right})
    add_times(case, right, rows, rounds, seconds)
    return list(rows.values())


def compare(
    results: dict[str, Tensor], references: Sequence[Mapping[str, Tensor]], variant: Variant
) -> dict[str, Any]:
    """What a row says of results: how much they differ from the nearest of the references."""
    found: dict[str, Any] = {}
    if variant.dtype != 'float32' and not variant.is_ours:
        # PyTorch sums the gradients of LayerNorm's parameters in bfloat16 on a CPU: they lose up to
        # nine tenths of their value where there are many tokens. Our models correct it.
        norms = {name: results.pop(name) for name in list(results) if is_norm_gradient(name)}
        found['norm_difference'] = min(difference(norms, reference) for reference in references)
    found['difference'] = min(difference(results, reference) for reference in references)
    if found['difference'] > TOLERANCES[variant.dtype]:
        found['failed'] = f'wrong: differs by {found["difference"]:.1e}'
        found['is_wrong'] = True
    return found


def add_times(
    case: Case,
    runners: Mapping[Variant, AnyRunner],
    rows: Mapping[Variant, dict[str, Any]],
    rounds: int,
    seconds: float,
) -> None:
    """Let the models take turns, so that a slower machine is slower for all."""
    times: dict[Variant, list[Time]] = {variant: [] for variant in runners}
    products: dict[tuple[torch.dtype, int], Products] = {}
    for variant in runners:
        key = (variant.product_dtype, variant.threads)
        products[key] = Products(*key)
    start = time.perf_counter()
    for i in range(rounds):
        show_progress(f'{case}: round {i + 1} of {rounds}')
        for variant, runner in runners.items():
            with torch_threads(variant.threads):
                times[variant].append(runner.time())
        for product in products.values():
            product.run()
        if time.perf_counter() - start > seconds:
            break
    for variant, found in times.items():
        rows[variant] |= {
            'clock_seconds': [round(each.clock, 6) for each in found],
            'processor_seconds': [round(each.processor, 6) for each in found],
            'product_gflops': products[variant.product_dtype, variant.threads].gflops(),
        }


def add_memory(case: Case, rows: Mapping[Variant, dict[str, Any]]) -> None:
    """Measure each model and dtype once, in the first of the numbers of threads."""
    found: dict[tuple[str, str], float] = {}
    for variant, row in rows.items():
        key = (variant.model, variant.dtype)
        if key not in found:
            show_progress(f'{case}: memory of {variant}')
            found[key] = call_in_process(measure_peak, case, variant)
        row['peak_mib'] = found[key]


def operations(case: Case) -> int:
    """Floating-point operations of the products and convolutions of a step of our plain model.

    For each product a backward pass has two, of the gradients of both factors: it is not counted,
    because PyTorch's counter takes gradients of depthwise convolutions for those of dense ones.
    """
    model = meta_model(CPVTPyramid, case.arch)
    forward = case.batch * count_operations(model, case.height, case.width)
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
        if self.step == 'inference':
            with torch.inference_mode():
                self.maps()
            return
        loss_of(self.maps()).backward()
        self.model.zero_grad(set_to_none=True)

    def time(self) -> Time:
        return time_call(self.run)

    def results(self) -> dict[str, Tensor]:
        """The maps, and of a training step the gradients of the image and of all parameters."""
        if self.step == 'inference':
            with torch.inference_mode():
                return by_name(self.maps())
        self.image.requires_grad_()
        try:
            maps = self.maps()
            loss_of(maps).backward()
            found = by_name([x.detach() for x in maps])
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
        variant: the dtype that it computes in, and the number of threads.
    """

    def __init__(self, graph: Any, image: Tensor, variant: Variant) -> None:
        settings = OPENVINO_SETTINGS | {
            'INFERENCE_NUM_THREADS': variant.threads,
            'INFERENCE_PRECISION_HINT': 'bf16' if variant.dtype == 'bfloat16' else 'f32',
        }
        compiled = openvino_core().compile_model(graph, 'CPU', settings)
        self.request = compiled.create_infer_request()
        self.image = image.numpy()

    def run(self) -> None:
        self.request.infer([self.image], share_inputs=True, share_outputs=True)

    def time(self) -> Time:
        return time_call(self.run)

    def results(self) -> dict[str, Tensor]:
        outputs = self.request.infer([self.image])
        return by_name([torch.from_numpy(value) for value in outputs.values()])


class RemoteRunner:
    """A model in a process of its own.

    Args:
        process: that runs `start_process`, and nothing else.
        variant: its model.
    """

    def __init__(self, process: ProcessPoolExecutor, variant: Variant) -> None:
        self.process = process
        self.variant = variant

    def run(self) -> None:
        self.time()

    def time(self) -> Time:
        return self.process.submit(time_in_process, self.variant).result()

    def results(self) -> dict[str, Tensor]:
        found = self.process.submit(results_in_process, self.variant).result()
        return {name: torch.tensor(value) for name, value in found.items()}


AnyRunner = Union[Runner, OpenVINORunner, RemoteRunner]


class Runners:
    """The models of a case, each built once, all with the same random weights.

    Models without a part of acceleration are in other processes, which end with the context that
    this is.

    Args:
        case: what they do.
        weights: theirs. None: random ones.
        is_remote: this is such a process.
    """

    def __init__(
        self, case: Case, weights: dict[str, Tensor] | None = None, is_remote: bool = False
    ) -> None:
        self.case = case
        self.is_remote = is_remote
        self.processes: dict[str, ProcessPoolExecutor] = {}  # by the model
        generator = torch.Generator().manual_seed(0)
        self.image = torch.randn(case.batch, 3, case.height, case.width, generator=generator)
        self.weights = weights or ports.randomize(self.our_model()).state_dict()
        self.modules: dict[tuple[str, torch.dtype], nn.Module] = {}
        self.graphs: dict[str, Any] = {}  # of OpenVINO

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.shutdown()

    def runner(self, variant: Variant) -> AnyRunner:
        """What runs a variant; those of one model and one dtype of weights share a module."""
        if variant.model in OPENVINO:
            return OpenVINORunner(self.openvino_graph(variant.model), self.image, variant)
        if variant.is_partial and not self.is_remote:
            return RemoteRunner(self.process(variant.model), variant)
        key = (variant.model, variant.weight_dtype)
        if key not in self.modules:
            model = self.build(variant.model).to(variant.weight_dtype)
            model.train(self.case.step == 'training')
            if variant.is_partial:
                PARTS[variant.model.removeprefix(WITHOUT)](model)
            elif variant.model in ('accelerated', 'checkpointed'):
                accelerate(model)
            self.modules[key] = model
        image = self.image.to(variant.weight_dtype, copy=True)
        return Runner(self.modules[key], image, self.case.step, variant.dtype == 'autocast')

    def process(self, model: str) -> ProcessPoolExecutor:
        """The process of a model, in all dtypes and numbers of threads."""
        if model not in self.processes:
            # As arrays: each tensor would need a file descriptor.
            weights = {name: value.numpy() for name, value in self.weights.items()}
            self.processes[model] = new_process(start_process, self.case, weights)
        return self.processes[model]

    def references(self) -> list[dict[str, Tensor]]:
        """The results of our plain model in float32; if it has windows, also with windows that the
        map does not fill treated as other libraries do."""
        paddings = ['mask', 'zero'] if ARCHS[self.case.arch].window else ['mask']
        found = []
        for padding in paddings:
            model = self.with_weights(self.our_model(window_padding=padding))
            model.train(self.case.step == 'training')
            found.append(Runner(model, self.image, self.case.step, autocast=False).results())
        return found

    def build(self, name: str) -> nn.Module:
        """A model in PyTorch, not accelerated."""
        if name in OURS or name.startswith(WITHOUT):
            return self.with_weights(self.our_model(with_cp=name == 'checkpointed'))
        arch = self.case.arch
        model = ports.build(port_of(name, arch), arch, self.weights, has_stage_norm(arch))
        return ports.with_eps(model)

    def our_model(self, **options: Any) -> CPVTPyramid:
        return CPVTPyramid(self.case.arch, stage_norm=has_stage_norm(self.case.arch), **options)

    def with_weights(self, model: CPVTPyramid) -> nn.Module:
        model.load_state_dict(self.weights)
        return ports.with_eps(model)

    def openvino_graph(self, name: str) -> Any:
        """Our plain model for OpenVINO: 'openvino', in the order of operations that it is fastest
        with, or 'converted', as it is."""
        if name not in self.graphs:
            import openvino

            model = self.build('plain').eval()
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter('ignore')  # of tracing, which is for one size
                self.graphs[name] = openvino.convert_model(
                    model, example_input=self.image, input=list(self.image.shape)
                )
            if name == 'openvino':
                to_rows(self.graphs[name])
        return self.graphs[name]


# In a process of its own

remote: Runners  # those of this process, see `start_process`


def start_process(case: Case, weights: dict[str, np.ndarray]) -> None:
    global remote
    tensors = {name: torch.tensor(value) for name, value in weights.items()}
    remote = Runners(case, tensors, is_remote=True)


def time_in_process(variant: Variant) -> Time:
    with torch_threads(variant.threads):
        return remote.runner(variant).time()


def results_in_process(variant: Variant) -> dict[str, np.ndarray]:
    with torch_threads(variant.threads):
        results = remote.runner(variant).results()
    return {name: value.float().numpy() for name, value in results.items()}


def new_process(function: Callable, *arguments: object) -> ProcessPoolExecutor:
    """A process that first calls a function."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload([__name__])  # imported once for all processes
    return ProcessPoolExecutor(1, context, function, arguments)


def has_stage_norm(arch: str) -> bool:
    """As in timm, SVT has none."""
    return ARCHS[arch].stage_norm and not ARCHS[arch].window


def loss_of(maps: Sequence[Tensor]) -> Tensor:
    """The sum of the mean cubes of all maps.

    The gradient of squares is nearly 0 where a layer norm comes last: it would be rounding.
    """
    return torch.stack([x.float().pow(3).mean() for x in maps]).sum()


def by_name(maps: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f'map {i}': x for i, x in enumerate(maps)}


def is_norm_gradient(name: str) -> bool:
    """Whether a result is the gradient of a parameter of a layer norm, which is named as ours."""
    return name.startswith('gradient of') and 'norm' in name


def difference(results: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest difference of values, relative to the largest value of the same name; infinite
    where shapes differ or a value is not finite."""
    found = 0.0
    for name in results.keys() & reference.keys():
        value = results[name].float()
        expected = reference[name]
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
            # PyTorch's default in float32 is MKL.
            if torch.backends.mkldnn.is_available() and is_supported(dtype):
                self.factors.append((x.to_mkldnn(), weight.to_mkldnn()))

    def run(self) -> None:
        """Time each product; the first time prepares oneDNN's kernel."""
        with torch_threads(self.threads), torch.inference_mode():
            for x, weight in self.factors:
                operations = 2 * x.shape[0] * weight.shape[0] * weight.shape[1]
                for _ in range(3):
                    found = time_call(functools.partial(F.linear, x, weight))
                    self.times.setdefault(operations, []).append(found)

    def gflops(self) -> dict[str, float]:
        """By the clock, and by the processor time of a thread."""
        clock = 0.0
        processor = 0.0
        for operations, times in self.times.items():
            clock = max(clock, operations / min(each.clock for each in times))
            least = min(each.processor for each in times) / self.threads
            processor = max(processor, operations / max(least, RESOLUTION))
        return {'clock': round(clock / 1e9, 3), 'processor': round(processor / 1e9, 3)}


# Memory


def call_in_process(function: Callable, *arguments: object) -> Any:
    """Call a function in a process that runs nothing else; returns what it returns."""
    with new_process(gc.collect) as process:
        return process.submit(function, *arguments).result()


def measure_peak(case: Case, variant: Variant) -> float:
    """Peak memory of a step in MiB, beyond what is in use before it, after an identical step."""
    torch.set_num_threads(variant.threads)
    runner = Runners(case, is_remote=True).runner(variant)
    runner.run()
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)  # of glibc
    if malloc_trim:  # return freed heap to the OS, so that reuse shows up in the resident memory
        malloc_trim(0)
    # Outside Linux, a step below the peak of building the model counts as 0.
    process_memory.restart_peak()
    before = process_memory.resident()
    runner.run()
    return max(process_memory.peak() - before, 0) / MIB
