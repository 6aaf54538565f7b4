"""Tests of data sets: on one thread of the CPU."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope='module', autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mmengine.device.utils.DEVICE', 'cpu')
        yield
    torch.set_num_threads(threads)
