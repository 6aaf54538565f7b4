"""What the tests of the GPU suite share: models, a training step, and a measure of difference."""

import copy
from collections.abc import Sequence
from typing import Optional

import torch
from models.ports import randomize
from reference import TINY_SVT
from torch import Tensor, nn

from cpvt_pyramid import ARCHS, COLUMNAR_ARCHS, CPVT, CPVTPyramid, DenseCPVT
from cpvt_pyramid.archs import ColumnarArch

DEVICE = 'cuda'
# Every published variant, and small models that have every mechanism.
VARIANTS = {name: lambda name=name: CPVTPyramid(name) for name in ARCHS}
VARIANTS |= {name: lambda name=name: CPVT(name) for name in COLUMNAR_ARCHS}
SMALL = {
    'pcpvt': lambda **options: CPVTPyramid('pcpvt_nano', **options),
    'svt': lambda **options: CPVTPyramid(TINY_SVT, **options),
    'columnar': lambda **options: DenseCPVT(ColumnarArch(16, 2, 2), out_channels=8, **options),
}
SIZE = (100, 75)  # pixels; every patch embedding, window and sub-sampling is padded
VALID = torch.tensor([(100, 40), (61, 75)])


def images(batch: int = 2, size: Sequence[int] = SIZE) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(0))


def twins(build) -> tuple[nn.Module, nn.Module]:
    """A model with random weights on the CPU, and its copy on the GPU."""
    model = randomize(build())
    return model, copy.deepcopy(model).to(DEVICE)


def maps_and_gradients(
    model: nn.Module, image: Tensor, valid: Optional[Tensor] = None
) -> list[Tensor]:
    """Maps, then the gradients of the image and all weights, for fixed gradients of the maps."""
    leaf = image.clone().requires_grad_()
    maps = model(leaf, valid) if valid is not None else model(leaf)
    maps = [maps] if isinstance(maps, Tensor) else list(maps)
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(x.shape, generator=generator).to(x) for x in maps]
    leaves = [leaf, *(p for p in model.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(maps, leaves, noise)
    return [x.detach() for x in (*maps, *grads)]


def assert_near(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float) -> None:
    """Each tensor equals its counterpart within `tolerance` of the norm of the counterpart."""
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs)):
        a, b = a.double().cpu(), b.double().cpu()
        assert a.shape == b.shape and a.isfinite().all()
        error = (a - b).norm() / b.norm().clamp(min=1e-12)
        assert error <= tolerance, f'tensor {i} of {len(ours)} differs by {error:.1e}'
