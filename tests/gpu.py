"""What the tests of the GPU suite share: models, and a measure of difference."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cpvt_pyramid import ARCHS, COLUMNAR_ARCHS, CPVT, CPVTPyramid
from tests.models.ports import randomize

DEVICE = 'cuda'
VARIANTS = {name: lambda name=name: CPVTPyramid(name) for name in ARCHS}
VARIANTS |= {name: lambda name=name: CPVT(name) for name in COLUMNAR_ARCHS}


def twins(build) -> tuple[nn.Module, nn.Module]:
    """A model with random weights on the CPU, and its copy on the GPU."""
    model = randomize(build())
    return model, copy.deepcopy(model).to(DEVICE)


def assert_never_waits(step: Callable[[], None]) -> None:
    """Assert that the second call never waits for the GPU; in the first, kernels load and an
    optimizer makes its state."""
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode('default')


def assert_near(ours: object, theirs: object, tolerance: float) -> None:
    """Each tensor equals its counterpart within `tolerance` of the norm of the counterpart."""
    ours, theirs = tree_leaves(ours), tree_leaves(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.double().cpu(), b.double().cpu()
        assert a.shape == b.shape and a.isfinite().all()
        error = (a - b).norm() / b.norm().clamp(min=1e-12)
        assert error <= tolerance, f'tensor {i} of {len(ours)} differs by {error:.1e}'
