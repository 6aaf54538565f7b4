"""Distributed training over NCCL: one process for each GPU, and the gradients of one process.

Spawned processes import this module by its name. They would not find `tests.cuda`: some packages on
the index install a package `tests`, which comes first.
"""

import copy
import os
import warnings

import torch
import torch.distributed as dist
from gpu import assert_near
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.models.ours import BACKBONES, VALID, images
from tests.models.ports import randomize


class WithNorm(nn.Module):
    """A backbone and a neck with batch normalization."""

    def __init__(self, name):
        super().__init__()
        self.backbone = BACKBONES[name](with_cp=True)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in self.backbone.channels)

    def forward(self, image, valid=None):
        return [norm(x) for norm, x in zip(self.norms, self.backbone(image, valid))]


def gradients(model, batch, valid):
    loss = sum(x.square().mean() for x in model(batch, valid))
    loss.backward()
    return [p.grad for p in model.parameters()]


def train(rank, processes, port, name, is_padded):
    """In each process: gradients of its part of the batch, averaged, against those of the whole."""
    os.environ |= {'MASTER_ADDR': 'localhost', 'MASTER_PORT': str(port)}
    device = torch.device('cuda', rank)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision('highest')
    torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group('nccl', rank=rank, world_size=processes, device_id=device)
    try:
        torch.manual_seed(0)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(randomize(WithNorm(name))).to(device)
        batch = images(2 * processes).to(device)
        valid = VALID.repeat(processes, 1).to(device) if is_padded else None
        part = slice(2 * rank, 2 * rank + 2)
        with warnings.catch_warnings():
            warnings.filterwarnings('error', 'Grad strides do not match')
            averaged = gradients(
                DistributedDataParallel(copy.deepcopy(model), device_ids=[rank]),
                batch[part],
                None if valid is None else valid[part],
            )
        single = copy.deepcopy(model)
        for norm in single.norms:  # plain batch normalization of the whole batch
            norm.__class__ = nn.BatchNorm2d
        assert_near(averaged, gradients(single, batch, valid), 1e-3)
    finally:
        dist.destroy_process_group()
