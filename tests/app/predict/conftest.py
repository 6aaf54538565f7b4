"""Tests of predictions: on one thread of the CPU, each in an empty folder."""

from collections.abc import Iterator

import pytest
import torch
from tiny_onnx import model as model
from tiny_onnx import photos as photos


@pytest.fixture(scope='module', autouse=True)
def _one_thread() -> Iterator[None]:
    """Results of two processes are bit-identical only on a CPU and with the same number of threads;
    one is the fastest for tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('CUDA_VISIBLE_DEVICES', '-1')
        patch.setenv('OMP_NUM_THREADS', '1')
        yield
    torch.set_num_threads(threads)
