"""One model, every way of running it: the same maps and the same gradients."""

import contextlib
from unittest import mock

import pytest
import torch
from models.ours import BACKBONES, VALID, images, maps_and_gradients
from reference import same_maps
from support import PINNED_TORCH

from cpvt_pyramid import ops
from cpvt_pyramid.layers import set_checkpointing
from cpvt_pyramid.ops import attention, products

padded = pytest.mark.parametrize('valid', [None, VALID], ids=['alone', 'padded'])


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


def checkpointed(model):
    set_checkpointing(model, True)
    return model


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend='aot_eager', dynamic=False)


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


# The context, and what is done to the model and to the image.
PATHS = {
    'onednn': (),
    'plain': (ops.plain,),
    'plain, checkpointed': (ops.plain, checkpointed),
    'in parts': (in_parts,),
    'checkpointed': (in_parts, checkpointed),
    'grouped': (grouped,),
    'with a slow MKL': (with_mkl(True),),
    'with a fast MKL': (with_mkl(False),),
    'channels-last': (contextlib.nullcontext, channels_last, channels_last),
    'compiled': (contextlib.nullcontext, compiled),
}


def run_path(
    model, image, valid, context=contextlib.nullcontext, change=lambda m: m, lay_out=lambda x: x
):
    """Maps and gradients of a training step, and the maps of inference."""
    with context():
        model, image = change(model), lay_out(image)
        maps, grads = maps_and_gradients(model, image, valid)
        with torch.no_grad():
            return maps, grads, model.eval()(image, valid)


@pytest.mark.parametrize('path', PATHS)
@padded
@pytest.mark.parametrize('name', BACKBONES)
def test_maps_and_gradients_are_the_same(name, valid, path):
    # More stages are compiled in the same way and take longer; `test_export.py` has unpadded ones.
    if path == 'compiled' and valid is None:
        return
    options = dict(out_indices=(0,)) if path == 'compiled' else {}
    model = BACKBONES[name](**options).train()
    with torch.backends.mkldnn.flags(enabled=False):  # PyTorch's own products
        maps, grads = maps_and_gradients(model, images(), valid)
    trained, trained_grads, inferred = run_path(model, images(), valid, *PATHS[path])
    same_maps(trained, maps)
    same_maps(inferred, maps)
    for a, b in zip(trained_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize('way', ['bfloat16', 'autocast'])
@padded
@pytest.mark.parametrize('name', BACKBONES)
def test_bfloat16_is_near(name, valid, way):
    """Eight bits of mantissa: a percent of the maps after some ten layers, and a few percent of the
    whole gradient."""
    model = BACKBONES[name]().train()
    maps, grads = maps_and_gradients(model, images(), valid)
    if way == 'bfloat16':
        near, near_grads = maps_and_gradients(model.bfloat16(), images().bfloat16(), valid)
    else:
        with torch.autocast('cpu', torch.bfloat16):
            near, near_grads = maps_and_gradients(model, images(), valid)
    near_grads, grads = (torch.cat([g.float().flatten() for g in x]) for x in (near_grads, grads))
    for a, b in zip(near, maps):
        assert (a.float() - b).norm() < 0.03 * b.norm()
    # The oneDNN of PyTorch 2.7 is coarser in the gradients of bfloat16 convolutions.
    assert (near_grads - grads).norm() < (0.06 if PINNED_TORCH else 0.12) * grads.norm()
