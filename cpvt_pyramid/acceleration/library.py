"""Compile kernels.cpp, once on a machine, and load it."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

import torch

from ..caches import cache_folder

SOURCE = Path(__file__).with_name('kernels.cpp')
HEADERS = 'kernels_*.h'  # beside it
COMPILERS = ('g++', 'c++')
COMPILER_SECONDS = 120  # it takes about 8, more on a busy machine
DIGEST_SIZE = hashlib.sha256().digest_size
OPTIONS = '-std=c++17 -O3 -g0 -mfma -fopenmp -fPIC'.split()
# By what PyTorch uses of the processor.
OPTIONS_OF = {
    'AVX2': '-mavx2'.split(),
    'AVX512': '-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16'.split(),
}


class NoKernels(Exception):
    """Why there are no kernels: a processor, compiler or folder that is missing."""


@functools.cache
def library() -> Optional[ctypes.CDLL]:
    """The compiled functions of kernels.cpp. None: there are none, see `load_library`."""
    try:
        return load_library()
    except NoKernels:
        return None


def load_library() -> ctypes.CDLL:
    """Load the functions of kernels.cpp, compiled by this or an earlier process.

    Raises:
        NoKernels: they cannot run on this processor, or cannot be compiled or loaded.
    """
    if sys.platform != 'linux' or platform.machine() != 'x86_64':
        raise NoKernels('they need Linux and an x86-64 processor')
    options = options_of_processor()
    try:
        functions = ctypes.CDLL(str(compiled_file(options)))
        fit = functions.kernels_fit_processor()
    # A folder that cannot be written, no OpenMP in this PyTorch; a compiler that left them out.
    except (OSError, AttributeError) as error:
        raise NoKernels(f'they cannot be compiled or loaded: {error}') from error
    if not fit:
        raise NoKernels('they need a processor with AVX2 and FMA, or with AVX-512 F, BW, DQ and VL')
    return functions


def options_of_processor() -> list[str]:
    """The compiler's options for what PyTorch uses of this processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    for name, options in OPTIONS_OF.items():
        if capability.startswith(name):  # there is more than one of AVX512
            return [*OPTIONS, *options]
    raise NoKernels(f'they need AVX2 or AVX-512, and the CPU capability of PyTorch is {capability}')


def compiled_file(options: list[str]) -> Path:
    """kernels.cpp, compiled with some options, in the user's folder for caches.

    Files of other versions (70 to 420 kB each) and folders of killed compilers stay. All can be
    removed.
    """
    compiler = find_compiler()
    sources = [SOURCE, *sorted(SOURCE.parent.glob(HEADERS))]
    text = b''.join(path.read_bytes() for path in sources)
    text += ' '.join([*compiler, *options]).encode()
    path = cache_folder() / f'kernels-{hashlib.sha256(text).hexdigest()[:16]}.so'
    if not is_undamaged(path):
        compile_to(path, [*compiler, *options])
    return path


def is_undamaged(path: Path) -> bool:
    """True if a file ends with the digest of what comes before it.

    To load a file that a full disk or a crash cut off can end the process.
    """
    if not path.is_file():
        return False
    content = path.read_bytes()
    return content[-DIGEST_SIZE:] == digest(content[:-DIGEST_SIZE])


def digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def find_compiler() -> list[str]:
    """The command of the C++ compiler: `CXX`, else the first of those that are common."""
    try:
        command = shlex.split(os.environ.get('CXX', ''))
    except ValueError as error:
        raise NoKernels(f'CXX={os.environ["CXX"]}: {error}') from error
    if command:
        return command
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise NoKernels(f'no C++ compiler: neither CXX nor {" nor ".join(COMPILERS)}')


def compile_to(path: Path, compiler: list[str]) -> None:
    """Compile kernels.cpp. Of processes that do so at the same time, the last one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='kernels-', dir=path.parent) as folder:
        unlinked = Path(folder, 'kernels.o')
        compiled = Path(folder, 'kernels.so')
        # Compiled and linked apart: the linker is not told of OpenMP, whose functions PyTorch has.
        run_compiler([*compiler, '-c', str(SOURCE), '-o', str(unlinked)])
        run_compiler([*compiler, '-shared', str(unlinked), '-o', str(compiled)])
        content = compiled.read_bytes()
        compiled.write_bytes(content + digest(content))
        compiled.replace(path)


def run_compiler(command: list[str]) -> None:
    """Run a command of the compiler.

    Raises:
        NoKernels: it ends with an error, or does not end.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors='replace',
            timeout=COMPILER_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        reason = f'it did not end in {COMPILER_SECONDS} seconds'
        raise NoKernels(f'{command[0]} fails: {reason}') from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if 'error' in line]
        reason = lines[0] if lines else f'status {done.returncode}'
        raise NoKernels(f'{command[0]} fails: {reason}')
