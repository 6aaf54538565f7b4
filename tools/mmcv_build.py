#!/usr/bin/env python
"""Print what mmcv's operators have to be compiled for here, for tools/setup_env.sh."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

logging.getLogger('torch.utils.cpp_extension').setLevel(logging.ERROR)  # "No CUDA runtime"
from torch.utils import cpp_extension  # noqa: E402


def mmcv_built_for() -> str:
    """Torch, Python and the device, which is 'cuda-' and the GPU's architectures if torch can use a
    GPU and there is nvcc, or with FORCE_CUDA=1; otherwise 'cpu'. The folder of a compiled wheel has
    this name.

    Raises:
        ValueError: an operator library for CUDA cannot be compiled with this torch and this nvcc.
    """
    name = f'torch{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}'
    nvcc = Path(cpp_extension.CUDA_HOME or '', 'bin/nvcc')
    built = torch.version.cuda
    is_usable = torch.cuda.is_available() and built and nvcc.exists()
    if not is_usable and os.environ.get('FORCE_CUDA') != '1':
        return f'{name}-cpu'
    version = version_of(nvcc)
    architectures = os.environ.get('TORCH_CUDA_ARCH_LIST') or architectures_of_gpus()
    fits = bool(built and version) and version.split('.')[0] == built.split('.')[0]
    if not fits or not architectures:
        raise ValueError(
            'compiling for CUDA needs a torch for CUDA, an nvcc of the same major version (see '
            'CUDA_HOME), and a GPU or architectures in TORCH_CUDA_ARCH_LIST, such as 8.0;9.0; got '
            f'torch for CUDA {built}, nvcc {version or None} in {nvcc.parent}, and architectures '
            f'{architectures or None}; see tools/setup_env.sh --help, or set CUDA_VISIBLE_DEVICES='
        )
    return f'{name}-cuda-{re.sub("[^0-9A-Za-z.+]+", "_", architectures)}'


def version_of(nvcc: Path) -> str:
    """The version of CUDA that a compiler is of; '' if there is none."""
    try:
        done = subprocess.run([nvcc, '--version'], capture_output=True, text=True, timeout=60)
    except OSError:
        return ''
    return done.stdout.partition('release ')[2].partition(',')[0]


def architectures_of_gpus() -> str:
    gpus = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return ';'.join(sorted({f'{major}.{minor}' for major, minor in gpus}))


if __name__ == '__main__':
    try:
        print(mmcv_built_for())
    except ValueError as error:
        sys.exit(f'setup: {error}')
