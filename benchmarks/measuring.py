"""The measurements of speed.py: time, peak memory, arithmetic, and differences of maps."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import pickle
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from os import environ
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer, timer

from benchmarks.contestants import COMPILED, OURS, VARIANTS, build_all
from benchmarks.models.ports import ports_of
from benchmarks.runtimes import RUNTIMES
from cpvt_pyramid import ARCHS
from cpvt_pyramid.flops import Counter
from cpvt_pyramid.tooling.command import UserError

STEPS = ('forward', 'train')
DTYPES = ('float32', 'tf32', 'bfloat16', 'float16')
TOLERANCE = 1e-4  # for float32 maps that must be equal, relative to their maximum
WARM_UP = 2  # steps
RUN_TIME = 0.5  # seconds, of a function whose fastest call counts
MIB = 2**20
# A process that calls a function; what the function prints is not its result.
CALL = """
import pickle, sys
result, sys.stdout = sys.stdout.buffer, sys.stderr
sys.path = pickle.load(sys.stdin.buffer)
function, arguments = pickle.load(sys.stdin.buffer)
pickle.dump(function(*arguments), result)
"""


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
            model.annotate((self.height, self.width), self.batch, self.device)
        return model.train(self.step == 'train')


def torch_dtype(name: str) -> torch.dtype:
    return torch.float32 if name == 'tf32' else getattr(torch, name)


def parse_size(text: str) -> tuple[int, int]:
    """'224' or '800x1344': height and width."""
    match = re.fullmatch(r'(\d+)(?:x(\d+))?', text)
    sides = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if min(sides) < 32:
        raise UserError(f'a size must be SIDE or HEIGHTxWIDTH of at least 32 pixels, got {text}')
    return sides


def say(line: str) -> None:
    """Report progress, on one line if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f'{line:78}', end='\r', file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def measure(
    contestants: dict[str, nn.Module], arch: str, case: Case, rounds: int, memory: bool
) -> list[dict]:
    """A row for each model; if one runs out of memory or rejects the size, the row says so.

    `arch` is the architecture of ours and of ports.
    """
    rows = {name: {'model': name, **case._asdict()} for name in contestants}
    image = case.image()
    steps: dict[str, Callable[[], None]] = {}
    first = None  # maps of the first model that has our weights
    eager_maps = None  # of the model whose variants, compiled and in runtimes, come after it
    for name, model in contestants.items():
        row = rows[name]
        eager_name = VARIANTS.sub('', name)
        eager = contestants[eager_name]
        compiled_before = compilations()
        try:
            model = case.prepared(model)
            if memory and (model is eager or case.device != 'cpu'):
                row['peak_mib'] = peak_memory(name, arch, case, model, image)
            # On the meta device heads and losses fail in many ways; backbones must not.
            with contextlib.suppress(*[Exception] if case.config else []):
                row['gflops'], row['gbytes'] = cost(eager, case)
            with torch.inference_mode():
                maps = model.eval()(image)
            if name == eager_name:
                eager_maps = maps
            has_our_weights = eager_name in (*OURS, *ports_of(arch))
            if has_our_weights and first is None:
                first = maps
            elif has_our_weights:
                expected = eager_maps if name.endswith(RUNTIMES) else first
                row['difference'] = difference(maps, expected)
            del maps
            steps[name] = warmed_up(case.prepared(model), image, case)
            if name.endswith(COMPILED):
                row['graphs'], row['graph_breaks'] = (compilations() - compiled_before).tolist()
        except (RuntimeError, MemoryError, AssertionError, TypeError, ValueError) as error:
            row['failed'] = ' '.join(str(error).split())[:100]
        check_difference(name, row, arch, case)
    times = time_in_turns(steps, case, rounds)
    for name, of_model in times.items():
        base = next(iter(times.values()))
        rows[name] |= compared(of_model.seconds, base.seconds)
        rows[name]['cpu_ms'] = 1e3 * statistics.median(of_model.cpu_seconds)
    return list(rows.values())


def check_difference(name: str, row: dict, arch: str, case: Case) -> None:
    """Raise a `UserError` if maps differ from the first model's where they must not."""
    if 'difference' not in row or name.endswith('bf16') or not must_be_equal(arch, case):
        return
    found = row['difference']
    if found is None or found > TOLERANCE:
        raise UserError(
            f'{case}: {name} must equal the first model within {TOLERANCE}, differs by '
            f'{shown(found)}'
        )


# Time


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


def warmed_up(model: nn.Module, image: Tensor, case: Case) -> Callable[[], None]:
    """A step of a model that has been run."""
    step = functools.partial(run, model, image, case.step)
    for _ in range(WARM_UP):
        elapsed(step, case.device)
    return step


class Times(NamedTuple):
    """Of a model in each round."""

    seconds: list[float]
    cpu_seconds: list[float]  # of all threads


def time_in_turns(
    steps: Mapping[str, Callable[[], None]], case: Case, rounds: int
) -> dict[str, Times]:
    """Run the steps in turns (A B C, A B C, ...), so that a slower machine is slower for all.

    `torch.utils.benchmark.Timer` is not made for it: each measurement of one call runs two others
    to warm up, and measures one clock.
    """
    times = {name: Times([], []) for name in steps}
    for i in range(rounds):
        for name, step in steps.items():
            cpu_before = time.process_time()
            times[name].seconds.append(elapsed(step, case.device))
            times[name].cpu_seconds.append(time.process_time() - cpu_before)
        say(f'{case}: round {i + 1} of {rounds}')
    return times


def elapsed(function: Callable[[], object], device: str) -> float:
    """Seconds that a call takes."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def least_seconds(function: Callable[[], object], clock: Callable[[], float] = timer) -> float:
    """Seconds of a call when the machine has nothing else to do.

    Args:
        function: is called for `RUN_TIME`.
        clock: by default, of time, after the work of the GPU.
    """
    measured = Timer(
        'function()',
        globals={'function': function},
        timer=clock,
        num_threads=torch.get_num_threads(),
    )
    return min(measured.blocked_autorange(min_run_time=RUN_TIME).times)


def synchronize(device: str) -> None:
    if device.startswith('cuda'):
        torch.cuda.synchronize(device)


def compared(seconds: Sequence[float], base: Sequence[float]) -> dict:
    """What a row says about the times of its rounds and of the first model's."""
    return {
        'ms': 1e3 * statistics.median(seconds),
        'rounds_ms': [1e3 * t for t in seconds],
        'ratio': statistics.median(seconds) / statistics.median(base),
        'ratio_spread': np.percentile(np.divide(seconds, base), [25, 75]).tolist(),
    }


def ratio_text(row: dict) -> str:
    return '{:.2f} ({:.2f} to {:.2f})'.format(row['ratio'], *row['ratio_spread'])


# A process of its own


def in_process(
    function: Callable, *arguments: object, environment: Mapping[str, str] = environ
) -> Any:
    """What a function of a file in this folder returns in a process that runs nothing else."""
    done = subprocess.run(
        [sys.executable, '-c', CALL],
        input=pickle.dumps(sys.path) + pickle.dumps((function, arguments)),
        capture_output=True,
        env=environment,
    )
    if done.returncode:
        lines = done.stderr.decode().strip().splitlines()
        raise MemoryError(lines[-1] if lines else f'killed by signal {-done.returncode}')
    return pickle.loads(done.stdout)


def build_step(name: str, arch: str, case: Case, threads: int) -> Callable[[], None]:
    """A step of a model, with an image and weights that are always the same."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)  # the number of proposals depends on weights and image
    image = case.image()
    model = case.prepared(build_all([name], arch, case.config)[name])
    return functools.partial(run, model, image, case.step)


def time_rounds(rounds: int, *what: Any) -> list[float]:
    """The seconds of some steps of what `build_step` takes."""
    step = build_step(*what)
    return [elapsed(step, 'cpu') for _ in range(WARM_UP + rounds)][WARM_UP:]


# Memory


def peak_memory(name: str, arch: str, case: Case, model: nn.Module, image: Tensor) -> float:
    """Peak memory of a step in MiB, beyond what is in use before it, after an identical step."""
    if case.device.startswith('cuda'):
        run(model, image, case.step)
        before = torch.cuda.memory_allocated(case.device)
        torch.cuda.reset_peak_memory_stats(case.device)
        run(model, image, case.step)
        return (torch.cuda.max_memory_allocated(case.device) - before) / MIB
    return in_process(peak_of_this_process, name, arch, case, torch.get_num_threads())


def peak_of_this_process(*what: Any) -> float:
    """`peak_memory` on a CPU, of what `build_step` takes, in a process that runs nothing else."""
    from cpvt_pyramid.tooling import memory

    step = build_step(*what)
    limit_memory()
    step()
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)  # of glibc
    if malloc_trim:  # return freed heap to the OS, so that reuse shows up in the resident memory
        malloc_trim(0)
    memory.restart_peak()  # outside Linux, a step below the peak of building the model counts as 0
    before = memory.resident()
    step()
    return max(memory.peak() - before, 0) / MIB


def limit_memory() -> None:
    """Make allocations fail before the machine runs out of memory. No effect on Windows."""
    import psutil

    from cpvt_pyramid.tooling import memory

    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        most = memory.available() + psutil.Process().memory_info().vms
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


# Arithmetic, graphs and maps


def cost(model: nn.Module, case: Case) -> tuple[float, float]:
    """Billions of multiply-additions and of bytes in a step."""
    on_meta = case._replace(device='meta')
    model = on_meta.prepared(copy.deepcopy(model))
    image = on_meta.image()
    with Counter() as counter:
        if case.step == 'train':
            loss(model, image).backward()
        else:
            model(image)
    return counter.total / 1e9, counter.bytes / 1e9


def compilations() -> np.ndarray:
    """Graphs compiled in this process so far, and graph breaks."""
    counters = torch._dynamo.utils.counters
    return np.array([counters['stats']['unique_graphs'], sum(counters['graph_break'].values())])


def difference(maps: Sequence[Tensor], first: Sequence[Tensor]) -> float | None:
    """The largest difference relative to the largest value; None if the shapes differ."""
    if [x.shape for x in maps] != [x.shape for x in first]:
        return None
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(maps, first))


def shown(difference: float | None) -> str:
    return 'in size' if difference is None else f'{difference:.0e}' if difference else '0'


def must_be_equal(arch: str, case: Case) -> bool:
    """Whether all libraries agree: at sizes that need no padding, where each library does its own,
    and in backbones, because heads may select by scores that are almost equal."""
    multiple = 32 * (ARCHS[arch].window or 1)
    fits = not (case.height % multiple or case.width % multiple)
    return fits and case.dtype == 'float32' and not case.config
