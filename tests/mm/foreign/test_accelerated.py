"""Detectors and segmentors of the mm packages, accelerated: the same losses and gradients."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cpvt_pyramid import accelerate
from tests.models.families import FAMILIES, batch, build

SOME = ('Mask2Former', 'DINO', 'Faster R-CNN', 'UPerNet')  # attention, in-place layers, RoIs


def step(model: nn.Module, data: dict) -> tuple[Tensor, Tensor]:
    """The loss of a training step, and all gradients."""
    torch.manual_seed(0)
    np.random.seed(0)
    losses = model.train()(**copy.deepcopy(data), mode='loss')
    total, _ = model.parse_losses(losses)
    total.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return total.detach(), torch.cat(grads)


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=() if name in SOME else pytest.mark.foreign) for name in FAMILIES],
)
def test_a_training_step_is_the_same(name):
    torch.manual_seed(0)
    model = build(FAMILIES[name])
    data = batch(FAMILIES[name], model)
    fast = accelerate(copy.deepcopy(model))
    loss, grads = step(model, data)
    fast_loss, fast_grads = step(fast, data)
    torch.testing.assert_close(fast_loss, loss, rtol=1e-4, atol=0)
    # Where an input of a ReLU or of max pooling is near another, rounding changes its gradient:
    # weights that differ by a millionth change the whole by up to 1.5 percent.
    assert (fast_grads - grads).norm() < 0.03 * grads.norm()
