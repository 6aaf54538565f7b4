"""The measurements of speed.py: time, peak memory, and differences of maps."""

from __future__ import annotations

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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cpvt_pyramid import ARCHS, CPVTPyramid, accelerate
from cpvt_pyramid.app.tooling.command import UserError
from tests.models import ports
from tests.models.ports import ports_of

# As is; with activation checkpointing; accelerated.
OURS = ('ours', 'ours_cp', 'ours_accelerated')
NAMES = (*OURS, *ports.PORTS, *ports.OTHERS)
COMPILED = '_compiled'  # suffix of the name of a compiled model
STEPS = ('forward', 'train')
DTYPES = ('float32', 'bfloat16', 'float16')
TOLERANCE = 1e-4  # for float32 maps that must be equal, relative to their maximum
WARM_UP = 2  # steps
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

    def __str__(self) -> str:
        size = f'{self.height}x{self.width}'
        return f'{self.step}, {self.dtype}, {size}, batch {self.batch}, {self.device}'

    def image(self) -> Tensor:
        image = torch.randn(self.batch, 3, self.height, self.width)
        return image.to(self.device, getattr(torch, self.dtype))

    def prepared(self, model: nn.Module) -> nn.Module:
        return model.to(self.device, getattr(torch, self.dtype)).train(self.step == 'train')


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


# Models


def build_all(names: Sequence[str], arch: str, compile: bool = False) -> dict[str, nn.Module]:
    """Models of NAMES by name, which make four maps of an image; those with the same parameters
    have the same random weights. With `compile`, each is followed by itself, compiled.

    Args:
        names: of NAMES.
        arch: that of ours and of ports.
        compile: compile for each size.
    """
    tensors = ports.randomize(build('ours', arch)).state_dict()
    models = {}
    for name in names:
        models[name] = build(name, arch, tensors)
        if compile:
            models[name + COMPILED] = torch.compile(models[name], dynamic=False)
    return models


def build(name: str, arch: str, tensors: dict[str, Tensor] | None = None) -> nn.Module:
    """The model of a name; `tensors` are the state dict of ours, for those that have the same
    parameters."""
    if name in OURS:
        model = CPVTPyramid(arch, stage_norm=False, with_cp=name == 'ours_cp')
        if tensors:
            model.load_state_dict(tensors)
        model = ports.with_eps(model).eval()
        return accelerate(model) if name == 'ours_accelerated' else model
    tensors = tensors if name in ports_of(arch) else None
    try:
        return ports.with_eps(ports.build(name, arch, tensors, stage_norm=False))
    except (ImportError, ValueError) as error:
        raise UserError(str(error)) from error


# Rows


def measure(
    models: dict[str, nn.Module], arch: str, case: Case, rounds: int, memory: bool
) -> list[dict]:
    """A row for each model; if one runs out of memory or rejects the size, the row says so.

    `arch` is the architecture of ours and of ports.
    """
    rows = {name: {'model': name, **case._asdict()} for name in models}
    image = case.image()
    steps: dict[str, Callable[[], None]] = {}
    first = None  # maps of the first model that has our weights
    for name, model in models.items():
        row = rows[name]
        is_compiled = name.endswith(COMPILED)
        compiled_before = compilations()
        try:
            model = case.prepared(model)
            if memory and (not is_compiled or case.device != 'cpu'):
                row['peak_mib'] = peak_memory(name, arch, case, model, image)
            with torch.inference_mode():
                maps = model.eval()(image)
            if name.removesuffix(COMPILED) in (*OURS, *ports_of(arch)):
                if first is None:
                    first = maps
                else:
                    row['difference'] = difference(maps, first)
            del maps
            steps[name] = warmed_up(case.prepared(model), image, case)
            if is_compiled:
                row['graphs'], row['graph_breaks'] = (compilations() - compiled_before).tolist()
        except (RuntimeError, MemoryError, AssertionError, TypeError, ValueError) as error:
            row['failed'] = ' '.join(str(error).split())[:100]
        check_difference(name, row, arch, case)
    times = time_in_turns(steps, case, rounds)
    for name, seconds in times.items():
        base = next(iter(times.values()))
        rows[name] |= {
            'ms': 1e3 * statistics.median(seconds),
            'rounds_ms': [1e3 * t for t in seconds],
            'ratio': statistics.median(seconds) / statistics.median(base),
            'ratio_spread': np.percentile(np.divide(seconds, base), [25, 75]).tolist(),
        }
    return list(rows.values())


def check_difference(name: str, row: dict, arch: str, case: Case) -> None:
    """Raise a `UserError` if maps differ from the first model's where they must not."""
    if 'difference' not in row or not must_be_equal(arch, case):
        return
    found = row['difference']
    if found is None or found > TOLERANCE:
        raise UserError(
            f'{case}: {name} must equal the first model within {TOLERANCE}, differs by '
            f'{shown(found)}'
        )


def must_be_equal(arch: str, case: Case) -> bool:
    """Whether all libraries agree: at sizes that need no padding, where each library does its
    own."""
    multiple = 32 * (ARCHS[arch].window or 1)
    fits = not (case.height % multiple or case.width % multiple)
    return fits and case.dtype == 'float32'


def difference(maps: Sequence[Tensor], first: Sequence[Tensor]) -> float | None:
    """The largest difference relative to the largest value; None if the shapes differ."""
    if [x.shape for x in maps] != [x.shape for x in first]:
        return None
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(maps, first))


def shown(difference: float | None) -> str:
    return 'in size' if difference is None else f'{difference:.0e}' if difference else '0'


def compilations() -> np.ndarray:
    """Graphs compiled in this process so far, and graph breaks."""
    counters = torch._dynamo.utils.counters
    return np.array([counters['stats']['unique_graphs'], sum(counters['graph_break'].values())])


# Time


def run(model: nn.Module, image: Tensor, step: str) -> None:
    """Run a step; gradients are freed."""
    if step == 'forward':
        with torch.inference_mode():
            model(image)
        return
    sum(x.float().square().mean() for x in model(image)).backward()
    model.zero_grad(set_to_none=True)


def warmed_up(model: nn.Module, image: Tensor, case: Case) -> Callable[[], None]:
    """A step of a model that has been run."""
    step = functools.partial(run, model, image, case.step)
    for _ in range(WARM_UP):
        elapsed(step, case.device)
    return step


def time_in_turns(
    steps: Mapping[str, Callable[[], None]], case: Case, rounds: int
) -> dict[str, list[float]]:
    """The seconds of each step in each round. The steps take turns (A B C, A B C, ...), so that a
    slower machine is slower for all."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        for name, step in steps.items():
            times[name].append(elapsed(step, case.device))
        say(f'{case}: round {i + 1} of {rounds}')
    return times


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


def in_process(function: Callable, *arguments: object) -> Any:
    """What a function of a file in this folder returns in a process that runs nothing else."""
    done = subprocess.run(
        [sys.executable, '-c', CALL],
        input=pickle.dumps(sys.path) + pickle.dumps((function, arguments)),
        capture_output=True,
    )
    if done.returncode:
        lines = done.stderr.decode().strip().splitlines()
        raise MemoryError(lines[-1] if lines else f'killed by signal {-done.returncode}')
    return pickle.loads(done.stdout)


def peak_of_this_process(name: str, arch: str, case: Case, threads: int) -> float:
    """`peak_memory` on a CPU, in a process that runs nothing else."""
    from cpvt_pyramid.app.tooling import memory

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    image = case.image()
    model = case.prepared(build_all([name], arch)[name])
    step = functools.partial(run, model, image, case.step)
    step()
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)  # of glibc
    if malloc_trim:  # return freed heap to the OS, so that reuse shows up in the resident memory
        malloc_trim(0)
    memory.restart_peak()  # outside Linux, a step below the peak of building the model counts as 0
    before = memory.resident()
    step()
    return max(memory.peak() - before, 0) / MIB
