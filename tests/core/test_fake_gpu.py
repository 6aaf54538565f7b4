"""The models on tensors of a GPU that is not there: PyTorch computes shapes, devices and dtypes.

A fake tensor raises where its values are read, as `.item()` and a branch on a tensor do, which on a
GPU waits for all work. Autograd needs a GPU for gradients of CUDA tensors; meta tensors take the
same paths through this package, and raise there, too.
"""

from collections.abc import Iterator
from functools import partial
from typing import Optional

import pytest
import torch
from fake_gpu import place
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cpvt_pyramid import COLUMNAR_ARCHS, CPVT, CPVTPyramid
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.model import Attention
from cpvt_pyramid.versions import VERSION
from tests.models.ours import shallow

SIZE = 97, 130
# With each kind of stage.
FAMILIES = ['pcpvt_nano', 'svt_small', 'pvt_tiny', 'pvt_v2_b0', 'pvt_v2_b2_li', 'cpvt_tiny']
padded = pytest.mark.parametrize('is_padded', [False, True], ids=['alone', 'padded'])


def build(name: str) -> nn.Module:
    with torch.device('meta'):
        if name in COLUMNAR_ARCHS:
            return CPVT(COLUMNAR_ARCHS[name]._replace(depth=2))
        return CPVTPyramid(shallow(name), drop_path_rate=0.2)


def batch(device: str, is_padded: bool) -> tuple[Tensor, Optional[Tensor]]:
    image = torch.empty(2, 3, *SIZE, device=device)
    valid = torch.empty(2, 2, dtype=torch.int64, device=device) if is_padded else None
    return image, valid


def outputs(model: nn.Module, image: Tensor, valid: Optional[Tensor]) -> tuple[Tensor, ...]:
    found = model(image, valid)
    return found if isinstance(found, tuple) else (found,)


@pytest.fixture
def fake_gpu() -> Iterator[None]:
    with FakeTensorMode() as mode:
        mode.cache_enabled = True  # `conftest.py` turns it off; these sizes are fixed
        yield


@padded
@pytest.mark.parametrize('name', FAMILIES)
def test_the_forward_pass_never_reads_a_value(name, is_padded, fake_gpu):
    model = build(name).eval()
    place(model, 'cuda')
    found = outputs(model, *batch('cuda', is_padded))
    assert {x.device.type for x in found} == {'cuda'}


@pytest.fixture
def autocast_of_gpu(fake_gpu) -> Iterator[None]:
    # `torch.autocast` does nothing where no GPU is.
    enable = torch.set_autocast_enabled
    if VERSION >= (2, 4):
        enable = partial(enable, 'cuda')
    enable(True)
    try:
        yield
    finally:
        enable(False)


@padded
@pytest.mark.parametrize('name', FAMILIES)
def test_no_attention_casts_its_bias(name, is_padded, autocast_of_gpu, monkeypatch):
    """Autocast computes queries in float16, and on a GPU tokens in float32. Maps of 97 x 130 pixels
    do not fill the windows of SVT."""
    attend = Attention.attend
    dtypes = []

    def watched(self: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if grid.key_bias is not None:
            dtypes.append((q.dtype, grid.key_bias.dtype))
        return attend(self, q, k, v, grid)

    monkeypatch.setattr(Attention, 'attend', watched)
    model = build(name).eval()
    place(model, 'cuda')
    outputs(model, *batch('cuda', is_padded))
    has_bias = name == 'svt_small' or (is_padded and name != 'pvt_v2_b2_li')
    assert set(dtypes) == ({(torch.half, torch.half)} if has_bias else set())


@padded
@pytest.mark.parametrize('name', FAMILIES)
def test_forward_and_backward_never_read_a_value(name, is_padded):
    model = build(name).train()
    place(model, 'meta')
    found = outputs(model, *batch('meta', is_padded))
    sum(x.sum() for x in found).backward()
    assert [key for key, x in model.named_parameters() if x.grad is None] == []


@padded
@pytest.mark.parametrize('name', ['pcpvt_nano', 'svt_small'])
def test_the_pass_is_one_graph(name, is_padded, fake_gpu):
    """What compilers and graphs of CUDA capture: no part of it runs on the CPU."""
    model = build(name).eval()
    place(model, 'cuda')
    with torch.no_grad():
        traced = make_fx(lambda *given: outputs(model, *given))(*batch('cuda', is_padded))
    values = [node.meta['val'] for node in traced.graph.nodes if 'val' in node.meta]
    on_cpu = [x for x in values if isinstance(x, Tensor) and x.device.type == 'cpu']
    assert len(values) > 100 and on_cpu == []


def test_a_model_that_reads_a_value_is_found(fake_gpu):
    class Reads(nn.Module):
        def forward(self, image: Tensor, valid: Tensor) -> Tensor:
            height = int(valid[:, 0].max())
            return image[:, :, :height]

    with pytest.raises(DataDependentOutputException):
        outputs(Reads(), *batch('cuda', is_padded=True))
