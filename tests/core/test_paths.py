"""One model, every way of running it: the same maps and the same gradients."""

import itertools
import warnings
from functools import partial

import pytest
import torch
from reference import same_maps
from support import PINNED_TORCH

from cpvt_pyramid.model import set_checkpointing
from tests.models.ours import BACKBONES, VALID, images, maps_and_gradients


def checkpointed(model):
    set_checkpointing(model, True)
    return model


def compiled(model, backend):
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, dynamic=False, fullgraph=True)


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


# What is done to the model, and to the image.
PATHS = {
    'checkpointed': (checkpointed,),
    'channels-last': (channels_last, channels_last),
    'compiled': (partial(compiled, backend='eager'),),
    'compiled backward': (partial(compiled, backend='aot_eager'),),
}
# Compiling takes seconds; `test_export.py` has unpadded ones. SVT has both kinds of attention, and
# is compiled with its backward pass.
CASES = [
    pytest.param(name, valid, path, id=f'{name}-{path}{"" if valid is None else "-padded"}')
    for name, path, valid in itertools.product(BACKBONES, PATHS, (None, VALID))
    if 'compiled' not in path
    or valid is not None
    and (path == 'compiled backward') == (name == 'svt')
]


@pytest.mark.parametrize('name, valid, path', CASES)
def test_maps_and_gradients_are_the_same(name, valid, path):
    options = dict(out_indices=(0,)) if 'compiled' in path else {}
    model = BACKBONES[name](**options).train()
    maps, grads = maps_and_gradients(model, images(), valid)
    given = [model, images()]
    for i, change in enumerate(PATHS[path]):
        given[i] = change(given[i])
    trained, trained_grads = maps_and_gradients(*given, valid)
    with torch.no_grad():
        inferred = given[0].eval()(given[1], valid)
    same_maps(trained, maps)
    same_maps(inferred, maps)
    for a, b in zip(trained_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('name', BACKBONES)
def test_nothing_is_deprecated(name, autocast):
    """A forward and a backward pass, with and without padding, give no warning."""
    model = BACKBONES[name]().train()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for valid in (None, VALID):
            with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
                maps_and_gradients(model, images(), valid)


@pytest.mark.parametrize('way', ['bfloat16', 'autocast'])
@pytest.mark.parametrize('valid', [None, VALID], ids=['alone', 'padded'])
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
