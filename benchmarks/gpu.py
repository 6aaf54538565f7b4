"""Measures our backbones and timm's on a GPU, in at most eight minutes, into one Markdown page.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --tiny --minutes 1     # tries the script without a GPU

What matters most comes first; what no longer fits into the time is listed at the end of the page:
forward passes and training steps of PCPVT-S and SVT-S in bfloat16 and float32, as they are,
padded, as CUDA graphs and compiled; LayerNorm alone; and tests that compile models or capture
graphs. The page is written after each row.

    ms           of a step, median of the rounds; the models take turns
    host ms      until the call returns, before the GPU is done
    kernels      started in a step, and their summed ms
    MiB          peak memory of a step beyond the model, of torch's allocator
    x timm       timm's ms / ours: images per second as a multiple of timm's

A training step is the forward pass, the mean square of all maps and the backward pass. timm has no
padded batches; there x timm compares with its unpadded one.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import ROOT
from benchmarks.host import STEPS, build, free_gradients, narrow, one_step
from benchmarks.machine import machine
from cpvt_pyramid.app.tooling.command import UserError, run_command
from cpvt_pyramid.app.tooling.files import make_folder, write_text
from cpvt_pyramid.app.tooling.report import markdown_table

SIZES = ((8, 512, 512), (2, 800, 1344), (8, 224, 224), (32, 224, 224))
MORE_SIZES = ((1, 512, 512), (32, 512, 512), (1, 224, 224))
TINY = ((2, 64, 96),)
# Seconds that a row must have left to start.
NEEDS = {'eager': 10, 'graph': 10, 'compiled': 100, 'layer norms': 45, 'tests': 60}
ROUNDS = 15
WARM_UP = 3
PROFILED = 3  # steps
TESTS = ('tests/cuda/test_core.py', '-k', 'compiled or graph')
TEST_PROCESSES = 4
HEAD = ('arch', 'step', 'dtype', 'batch', 'how', 'ours', 'timm', 'x timm')
NORM_HEAD = ('tokens x channels', 'dtype', 'what', 'µs', 'GB/s')


class Case(NamedTuple):
    """A row of the table."""

    arch: str
    step: str  # one of STEPS
    dtype: str
    batch: int
    height: int
    width: int
    how: str = 'eager'  # or 'graph', 'compiled'
    padded: bool = False

    @property
    def title(self) -> list[str]:
        """The first cells of the row."""
        how = f'{self.how}, padded' if self.padded else self.how
        return [
            self.arch,
            self.step,
            self.dtype,
            f'{self.batch} x {self.height} x {self.width}',
            how,
        ]


class Measured(NamedTuple):
    """A model in a case."""

    ms: float
    host_ms: float
    kernels: int
    kernel_ms: float
    mib: float

    def __str__(self) -> str:
        return (
            f'{self.ms:.2f} ms, host {self.host_ms:.2f}, {self.kernels} kernels '
            f'{self.kernel_ms:.2f}, {self.mib:.0f} MiB'
        )


def gpu(
    *,
    device: str = 'cuda',
    minutes: float = 8,
    tiny: bool = False,
    out: str = 'work_dirs/gpu',
) -> None:
    """Measure, and write report.md after each row.

    Args:
        device: what to measure on
        minutes: nothing starts that may end later
        tiny: narrow models, one small size and few rounds, to try the script
        out: folder of report.md
    """
    if minutes <= 0:
        raise UserError(f'--minutes must be positive, got {minutes}')
    if device.startswith('cuda') and not torch.cuda.is_available():
        raise UserError('this torch finds no GPU; cpvt doctor tells you why')
    torch.manual_seed(0)
    report = Report(out, device, time.monotonic() + 60 * minutes)
    bench = Bench(device, tiny)
    sizes = TINY if tiny else SIZES
    compiled_size = TINY[0] if tiny else SIZES[0]
    more_sizes = () if tiny else MORE_SIZES
    report.add_cases(bench, uncompiled('pcpvt_small', 'bfloat16', sizes))
    report.add_norms(bench)
    report.add_cases(bench, uncompiled('svt_small', 'bfloat16', sizes))
    report.add_cases(bench, compiled('pcpvt_small', 'bfloat16', compiled_size))
    report.add_tests()
    for arch in ('pcpvt_small', 'svt_small'):
        report.add_cases(bench, uncompiled(arch, 'float32', sizes[:2]))
    for arch in ('pcpvt_small', 'svt_small'):
        for dtype in ('bfloat16', 'float32'):
            report.add_cases(bench, uncompiled(arch, dtype, more_sizes))
    report.add_cases(bench, compiled('svt_small', 'bfloat16', compiled_size))
    report.write()
    print(report.page)


def uncompiled(arch: str, dtype: str, sizes: Sequence[tuple[int, int, int]]) -> Iterator[Case]:
    """Eager, padded where there are two images to pad, and as a graph."""
    for size in sizes:
        for step in STEPS:
            yield Case(arch, step, dtype, *size)
            if size[0] > 1:
                yield Case(arch, step, dtype, *size, padded=True)
            yield Case(arch, step, dtype, *size, how='graph')


def compiled(arch: str, dtype: str, size: tuple[int, int, int]) -> Iterator[Case]:
    for step in STEPS:
        yield Case(arch, step, dtype, *size, how='compiled')


class Report:
    """A page that grows row by row.

    Args:
        out: folder of the page.
        device: what is measured.
        end: when the time is over, of `time.monotonic`.
    """

    def __init__(self, out: str, device: str, end: float) -> None:
        self.page = make_folder(out) / 'report.md'
        self.end = end
        self.about = machine(device)
        self.rows: list[list[str]] = []
        self.norms: list[list[str]] = []
        self.tests = ''
        self.left_out: list[str] = []

    def add_cases(self, bench: Bench, cases: Iterable[Case]) -> None:
        for case in cases:
            self.add_case(bench, case)

    def add_case(self, bench: Bench, case: Case) -> None:
        """Add a row, if there is time: what was measured, or why it failed."""
        if case.how == 'graph' and not bench.has_graphs:
            return
        title = ', '.join(case.title)
        if not self.has_time(case.how, title):
            return
        try:
            ours, theirs = bench.measure(case)
        except RuntimeError as error:  # out of memory, or what a compiler cannot do
            reason = str(error).strip().splitlines()[0][:100]
            self.add_row(case, f'failed: {reason}', '', '')
            return
        self.add_row(case, str(ours), str(theirs), f'{theirs.ms / ours.ms:.2f}')

    def add_row(self, case: Case, ours: str, theirs: str, ratio: str) -> None:
        self.rows.append([*case.title, ours, theirs, ratio])
        self.write()

    def add_norms(self, bench: Bench) -> None:
        """Add the rows of the second table, if there is time."""
        if self.has_time('layer norms', 'layer norms'):
            for row in bench.layer_norms():
                self.norms.append(row)
                self.write()
                if time.monotonic() > self.end:
                    break

    def add_tests(self) -> None:
        """Run the tests that a GPU alone can fail; they may take half of what is left."""
        title = 'tests'
        if not self.about['processor'].startswith('NVIDIA') or not self.has_time('tests', title):
            return
        seconds = int((self.end - time.monotonic()) / 2)
        done = subprocess.run(
            ['timeout', '--signal=INT', '--kill-after=10', str(seconds)]
            + [sys.executable, '-m', 'pytest', '-q', '-n', str(TEST_PROCESSES), *TESTS],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        self.tests = '\n'.join(done.stdout.strip().splitlines()[-30:])
        self.write()

    def has_time(self, what: str, title: str) -> bool:
        """Whether there is the time that something needs (NEEDS); if not, its title is listed."""
        if time.monotonic() + NEEDS[what] <= self.end:
            print(title, file=sys.stderr, flush=True)
            return True
        self.left_out.append(title)
        return False

    def write(self) -> None:
        """Write the page with all that has been measured so far."""
        about = ', '.join(str(value) for value in self.about.values())
        parts = [f'# Measurements on a GPU\n\n{about}\n', markdown_table(HEAD, self.rows)]
        if self.norms:
            parts.append('## LayerNorm\n\n' + markdown_table(NORM_HEAD, self.norms))
        if self.tests:
            parts.append(f'## Tests\n\n```\n{self.tests}\n```\n')
        if self.left_out:
            items = ''.join(f'- {title}\n' for title in self.left_out)
            parts.append('## Not measured, for want of time\n\n' + items)
        write_text(self.page, '\n'.join(parts))


class Bench:
    """Measures on a device.

    Args:
        device: a CPU has no kernels and no allocator to ask; its operations count as kernels.
        tiny: narrow models and few rounds.
    """

    def __init__(self, device: str, tiny: bool) -> None:
        self.device = device
        self.tiny = tiny
        self.rounds = 2 if tiny else ROUNDS
        self.has_graphs = device.startswith('cuda')

    def measure(self, case: Case) -> tuple[Measured, Measured]:
        """Our model and timm's, in turns."""
        dtype = getattr(torch, case.dtype)
        pair = build(narrow(case.arch) if self.tiny else case.arch).to(self.device, dtype)
        size = (case.batch, 3, case.height, case.width)
        image = torch.randn(size, device=self.device, dtype=dtype)
        valid = self.valid_sizes(case) if case.padded else None
        steps = []
        memory = []
        for model, forward in zip(pair, pair.forwards(image, valid)):
            step = self.step(case, model, forward)
            for _ in range(WARM_UP):
                self.timed(step)
            memory.append(self.peak_mib(step))
            steps.append(step)
        times: list[list[tuple[float, float]]] = [[], []]
        for _ in range(self.rounds):
            for step, of_model in zip(steps, times):
                of_model.append(self.timed(step))
        found = []
        for step, of_model, mib in zip(steps, times, memory):
            total, host = (statistics.median(each) for each in zip(*of_model))
            kernels, kernel_ms = self.kernels(step)
            found.append(Measured(1e3 * total, 1e3 * host, kernels, kernel_ms, mib))
        torch.compiler.reset()
        return found[0], found[1]

    def valid_sizes(self, case: Case) -> Tensor:
        """True sizes of a batch of which only the first image is not padded."""
        sides = []
        for i in range(case.batch):
            share = 1 - 0.4 * i / case.batch
            sides.append((int(case.height * share), int(case.width * share)))
        return torch.tensor(sides, device=self.device)

    def step(
        self, case: Case, model: nn.Module, forward: Callable[[], Sequence[Tensor]]
    ) -> Callable[[], None]:
        """A step of a model, with its gradients freed."""
        if case.how == 'compiled':
            forward = torch.compile(forward, dynamic=False)
        step = one_step(case.step, model, forward)
        if case.how == 'graph':
            return captured(step, model)

        def step_and_free() -> None:
            step()
            free_gradients(model)

        return step_and_free

    def timed(self, step: Callable[[], None]) -> tuple[float, float]:
        """Seconds until the step is done, and until the call returns."""
        self.synchronize()
        start = time.perf_counter()
        step()
        returned = time.perf_counter()
        self.synchronize()
        return time.perf_counter() - start, returned - start

    def synchronize(self) -> None:
        if self.has_graphs:
            torch.cuda.synchronize(self.device)

    def peak_mib(self, step: Callable[[], None]) -> float:
        """Peak memory of a step in MiB, beyond what is in use before it."""
        if not self.has_graphs:
            return 0.0
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        self.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def kernels(self, step: Callable[[], None]) -> tuple[int, float]:
        """Number and summed milliseconds of a step's kernels."""
        on_device = torch.autograd.DeviceType.CUDA if self.has_graphs else None
        activities = [ProfilerActivity.CUDA if self.has_graphs else ProfilerActivity.CPU]
        with profile(activities=activities) as profiler:
            for _ in range(PROFILED):
                step()
            self.synchronize()
        events = profiler.events()
        if on_device is not None:
            events = [event for event in events if event.device_type == on_device]
            total = sum(event.self_device_time_total for event in events)
        else:
            total = sum(event.self_cpu_time_total for event in events)
        return len(events) // PROFILED, total / PROFILED / 1e3

    # LayerNorm

    def layer_norms(self) -> Iterator[list[str]]:
        """A row for PCPVT-S's first and third stage and each way to compute a LayerNorm."""
        batch, height, width = TINY[0] if self.tiny else SIZES[0]
        for stride, channels in ((4, 64), (16, 320)):
            tokens = batch * (height // stride) * (width // stride)
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.randn(tokens, channels, device=self.device, dtype=dtype)
                for what, function in norms(x).items():
                    function()  # compiles
                    seconds = self.seconds(function)
                    moved = 2 * x.numel() * x.element_size()
                    yield [
                        f'{tokens} x {channels}',
                        str(dtype).removeprefix('torch.'),
                        what,
                        f'{1e6 * seconds:.1f}',
                        f'{moved / seconds / 1e9:.0f}',
                    ]
        torch.compiler.reset()

    def seconds(self, function: Callable[[], object]) -> float:
        """Of a call among many, so that the host is ahead of the GPU; least of five."""
        calls = 2 if self.tiny else 100

        def many() -> None:
            for _ in range(calls):
                function()

        if self.has_graphs:
            many = captured(many)  # the host starts them all at once
        return min(self.timed(many)[0] for _ in range(5)) / calls


def norms(x: Tensor) -> dict[str, Callable[[], object]]:
    """Ways to normalize tokens (N, C), and a copy of them, which moves as much."""
    channels = x.shape[1]
    weight = torch.ones(channels, device=x.device, dtype=x.dtype)
    bias = torch.zeros_like(weight)
    shape = (channels,)
    columns = x.t().contiguous().t()  # as after a convolution of a contiguous map
    target = torch.empty_like(x)

    def by_parts(tokens: Tensor) -> Tensor:
        variance, mean = torch.var_mean(tokens.float(), 1, keepdim=True, correction=0)
        normal = (tokens - mean) * (variance + 1e-6).rsqrt()
        return (normal * weight + bias).to(tokens.dtype)

    layer_norm = functools.partial(F.layer_norm, normalized_shape=shape, weight=weight, bias=bias)
    fused = torch.compile(layer_norm, dynamic=False)
    fused_parts = torch.compile(by_parts, dynamic=False)
    return {
        'copy': functools.partial(target.copy_, x),
        'F.layer_norm': functools.partial(layer_norm, x),
        'F.layer_norm of (C, N) in memory': functools.partial(layer_norm, columns),
        'F.layer_norm, compiled': functools.partial(fused, x),
        'by var_mean, compiled': functools.partial(fused_parts, x),
    }


def captured(step: Callable[[], None], model: nn.Module | None = None) -> Callable[[], None]:
    """A step as a CUDA graph, captured after a warm-up on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
            if model is not None:
                free_gradients(model)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(gpu, argv, 'finished rows are in report.md')


if __name__ == '__main__':
    sys.exit(main())
