"""Derivatives beyond those of training: tangents, gradients of gradients, `torch.func`.

Of PyTorch's kernels of attention, the plain one has them all.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.models.ours import classifier, dense, outputs, pcpvt, svt


def plain_attention() -> AbstractContextManager:
    """Attention by products and softmax, whose derivatives all transforms know."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # newer than the oldest torch

    return sdpa_kernel(SDPBackend.MATH)


BUILDERS = {'pcpvt': pcpvt, 'svt': svt, 'classifier': classifier, 'dense': dense}


@pytest.fixture(params=BUILDERS)
def build(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    return BUILDERS[request.param]


def image() -> Tensor:
    return torch.randn(1, 3, 32, 36)


def slope(build: Callable[[], nn.Module], x: Tensor, direction: Tensor) -> list[Tensor]:
    """The derivative of a model's outputs along a direction, by central differences in float64."""
    model, step = build().double().eval(), 1e-5 * direction.double()
    with torch.no_grad():
        ahead, behind = outputs(model, x.double() + step), outputs(model, x.double() - step)
    return [((a - b) / 2e-5).float() for a, b in zip(ahead, behind)]


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize('gradients', [False, True])
def test_forward_mode(build, gradients):
    model, x, direction = build().eval(), image(), image()
    expected = slope(build, x, direction)
    with torch.set_grad_enabled(gradients), plain_attention():
        _, tangents = torch.func.jvp(lambda x: outputs(model, x), (x,), (direction,))
        assert_near(tangents, expected)
        with forward_ad.dual_level():
            maps = outputs(model, forward_ad.make_dual(x, direction))
            assert_near([forward_ad.unpack_dual(y).tangent for y in maps], expected)


@torch.no_grad()
def test_tangents_of_weights(build):
    """Where the image has none."""
    model, x = build().eval(), image()
    weights = dict(model.named_parameters())
    directions = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def at(step: float) -> list[Tensor]:
        moved = {name: w.double() + step * directions[name].double() for name, w in weights.items()}
        return outputs(lambda x: torch.func.functional_call(model, moved, (x,)), x.double())

    call = lambda w: outputs(lambda x: torch.func.functional_call(model, w, (x,)), x)  # noqa: E731
    with plain_attention():
        _, tangents = torch.func.jvp(call, (weights,), (directions,))
    expected = [((a - b) / 2e-6).float() for a, b in zip(at(1e-6), at(-1e-6))]
    assert_near(tangents, expected)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return sum(y.square().mean() for y in outputs(model, x))


def test_gradients_of_gradients(build):
    model, x, direction = build().eval(), image(), image()
    x.requires_grad_()
    with plain_attention():
        (grad,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
        (found,) = torch.autograd.grad((grad * direction).sum(), x)
        # Forward over reverse mode.
        gradient = torch.func.grad(lambda x: loss_of(model, x))
        _, expected = torch.func.jvp(gradient, (x.detach(),), (direction,))
    assert_near([found], [expected])


def test_gradients_and_batches_of_torch_func(build):
    model, x = build().eval(), image()
    leaf = x.clone().requires_grad_()
    loss_of(model, leaf).backward()
    assert_near([torch.func.grad(lambda x: loss_of(model, x))(x)], [leaf.grad])
    batch = torch.stack([x, image()])
    with torch.no_grad():
        together = torch.func.vmap(lambda x: outputs(model, x))(batch)
        for i, each in enumerate(batch):
            assert_near([maps[i] for maps in together], outputs(model, each))


def test_against_numerical_derivatives(build):
    """In float64: the Jacobian in both modes, and the derivatives of the gradient."""
    model = build().double().eval()
    x = torch.randn(1, 3, 8, 9, dtype=torch.double, requires_grad=True)

    def some(x: Tensor) -> Tensor:
        return outputs(model, x)[-1].flatten()[:3]

    with plain_attention():
        assert torch.autograd.gradcheck(some, x, fast_mode=True, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(some, x, fast_mode=True)


@torch.no_grad()
def test_a_batch_of_torch_func_with_sizes(build):
    model, batch = build().eval(), torch.randn(2, 3, 32, 36)
    sizes = torch.tensor([[32, 17], [11, 36]])
    together = torch.func.vmap(lambda x, size: outputs(model, x[None], size[None]))(batch, sizes)
    assert_near([maps[:, 0] for maps in together], outputs(model, batch, sizes))
