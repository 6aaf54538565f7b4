"""Tests of trainings: on one thread of the CPU, each in an empty folder."""

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope='module', autouse=True)
def _one_thread() -> Iterator[None]:
    """Results of two processes are bit-identical only on a CPU and with the same number of threads;
    one is the fastest for tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mmengine.device.utils.DEVICE', 'cpu')
        # Data workers of a training that was garbage collected are never told to end.
        patch.setattr('torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL', 0.1)
        # mmengine formats the config for each checkpoint, which takes longer than these trainings.
        patch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (text, True))
        # It takes longer than the rest of these trainings; see test_pictures.py.
        patch.setattr('cpvt_pyramid.app.training.pictures.write_curves', lambda *_: None)
        # For child processes.
        patch.setenv('CUDA_VISIBLE_DEVICES', '-1')
        patch.setenv('OMP_NUM_THREADS', '1')
        patch.setenv('PYTHON', sys.executable)
        yield
    torch.set_num_threads(threads)
