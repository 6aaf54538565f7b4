"""One model, every way of running it: the same maps and the same gradients."""

import contextlib
from unittest import mock

import pytest
import torch
from models.ports import randomize
from reference import TINY_SVT, same_maps
from support import PINNED_TORCH

from cpvt_pyramid import CPVTPyramid, DenseCPVT, ops
from cpvt_pyramid.archs import ColumnarArch
from cpvt_pyramid.layers import set_checkpointing
from cpvt_pyramid.ops import attention, products

MODELS = {
    'pcpvt': lambda **options: CPVTPyramid('pcpvt_nano', **options),
    'svt': lambda **options: CPVTPyramid(TINY_SVT, **options),
    'columnar': lambda **options: DenseCPVT(ColumnarArch(16, 2, 2), out_channels=8, **options),
}
IMAGE = torch.randn(2, 3, 100, 75, generator=torch.Generator().manual_seed(0))
VALID = torch.tensor([(100, 40), (61, 75)])


@contextlib.contextmanager
def in_parts():
    """All attention by oneDNN; scores and hidden maps in several parts."""
    with (
        mock.patch.multiple(attention, AT_A_TIME=500, WORTH_ONEDNN=1),
        mock.patch.object(products, 'AT_A_TIME', 500),
    ):
        yield


@contextlib.contextmanager
def grouped():
    """Queries in groups, on more threads than there are heads."""
    with (
        mock.patch.object(attention, 'MIN_GROUP', 3),
        mock.patch.object(torch, 'get_num_threads', lambda: 7),
    ):
        yield


def with_mkl(slow):
    return lambda: mock.patch.object(products, 'MKL_IS_SLOW', slow)


def torchs_own():
    return torch.backends.mkldnn.flags(enabled=False)


def run(model, image, valid):
    """Maps, and the gradients of all weights and of the image for random gradients of the maps."""
    image = image.clone().requires_grad_()
    maps = model(image, valid)
    leaves = [image, *(p for p in model.parameters() if p.requires_grad)]
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in maps]
    grads = torch.autograd.grad(maps, leaves, noise)
    return [x.detach() for x in maps], grads


def checkpointed(model):
    set_checkpointing(model, True)
    return model


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend='aot_eager', dynamic=False)


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


def same(x):
    return x


PATHS = {  # under what, and what becomes of the model and of the image
    'onednn': (contextlib.nullcontext, same, same),
    'plain': (ops.plain, same, same),
    'plain, checkpointed': (ops.plain, checkpointed, same),
    'in parts': (in_parts, same, same),
    'checkpointed': (in_parts, checkpointed, same),
    'grouped': (grouped, same, same),
    'with a slow MKL': (with_mkl(True), same, same),
    'with a fast MKL': (with_mkl(False), same, same),
    'channels-last': (contextlib.nullcontext, channels_last, channels_last),
    'compiled': (contextlib.nullcontext, compiled, same),
}


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('valid', [None, VALID], ids=['alone', 'padded'])
@pytest.mark.parametrize('name', MODELS)
def test_maps_and_gradients_are_the_same(name, valid, path):
    # More stages are compiled in the same way and take longer.
    options = dict(out_indices=(0, 1)) if path == 'compiled' else {}
    model = randomize(MODELS[name](**options)).train()
    with torchs_own():
        maps, grads = run(model, IMAGE, valid)
    context, of_model, of_image = PATHS[path]
    with context():
        model, image = of_model(model), of_image(IMAGE)
        trained, trained_grads = run(model, image, valid)
        with torch.no_grad():
            inferred = model.eval()(image, valid)
    same_maps(trained, maps)
    same_maps(inferred, maps)
    for a, b in zip(trained_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize('way', ['bfloat16', 'autocast'])
@pytest.mark.parametrize('valid', [None, VALID], ids=['alone', 'padded'])
@pytest.mark.parametrize('name', MODELS)
def test_bfloat16_is_near(name, valid, way):
    """Eight bits of mantissa: a percent of the maps after some ten layers, and a few percent of the
    whole gradient."""
    model = randomize(MODELS[name]()).train()
    maps, grads = run(model, IMAGE, valid)
    if way == 'bfloat16':
        near, near_grads = run(model.bfloat16(), IMAGE.bfloat16(), valid)
    else:
        with torch.autocast('cpu', torch.bfloat16):
            near, near_grads = run(model, IMAGE, valid)
    near_grads, grads = (torch.cat([g.float().flatten() for g in x]) for x in (near_grads, grads))
    for a, b in zip(near, maps):
        assert (a.float() - b).norm() < 0.03 * b.norm()
    # The oneDNN of PyTorch 2.7 is coarser in the gradients of bfloat16 convolutions.
    assert (near_grads - grads).norm() < (0.06 if PINNED_TORCH else 0.12) * grads.norm()
