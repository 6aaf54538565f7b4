"""Distributed training over NCCL: one process for each GPU, and the gradients of one process."""

import socket

import pytest
import torch
from data_parallel import train

from tests.models.ours import BACKBONES


@pytest.mark.parametrize('is_padded', [False, True], ids=['alone', 'padded'])
@pytest.mark.parametrize('name', BACKBONES)
def test_gradients_over_nccl(name, is_padded):
    processes = torch.cuda.device_count()
    with socket.socket() as listener:
        listener.bind(('localhost', 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(train, (processes, port, name, is_padded), processes)
