"""The encodings by themselves: against torch's convolutions and interpolation, timm, and loops."""

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from reference import TINY_SVT
from timm.layers import apply_rot_embed_cat
from torch import nn

from cpvt_pyramid import ColumnarArch, CPVTPyramid, DenseCPVT, PEGConfig
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.model import Attention
from cpvt_pyramid.position import POSITIONS, Encoding, RoPE, rotate
from cpvt_pyramid.position.added import SinCosPosition
from cpvt_pyramid.position.attention import centers
from tests.models.ours import pcpvt, svt
from tests.models.ports import randomize


@pytest.mark.parametrize('height, width', [(1, 1), (5, 7), (14, 3)])
@pytest.mark.parametrize('normalized', [False, True])
def test_rope_is_timms(normalized, height, width):
    """RoPE-ViT's axial frequencies, and DINOv3's coordinates."""
    size = dict(feat_shape=(height, width), grid_indexing='xy')
    if normalized:
        theirs = timm.layers.RotaryEmbeddingDinoV3(16, rotate_half=False, **size)
    else:
        theirs = timm.layers.RotaryEmbeddingCat(16, temperature=100, in_pixels=False, **size)
    q = torch.randn(2, 3, height * width, 16)
    rotation, _ = RoPE(normalized=normalized).rotations(Grid(height, width), 16, q)
    found = rotate(q, rotation)
    torch.testing.assert_close(found, apply_rot_embed_cat(q, theirs.get_embed()))


@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16])
def test_rotations_in_half_precision(dtype):
    """Angles are computed in single precision: at the far end of a long map an angle in half
    precision would be anywhere."""
    q = torch.randn(1, 4, 600, 8).to(dtype)
    results = []
    for x in (q, q.float()):
        rotation, _ = RoPE().rotations(Grid(2, 300), 8, x)
        results.append(rotate(x, rotation))
    assert results[0].dtype == dtype
    torch.testing.assert_close(results[0], results[1].to(dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16])
def test_sines_in_half_precision(dtype):
    sincos = SinCosPosition(16)
    found = sincos(torch.zeros(1, 2, 300, 16, dtype=dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found, sincos(torch.zeros(1, 2, 300, 16)).to(dtype))


class Distance(torch.nn.Module):
    """An encoding of one's own: a penalty on the distance in rows."""

    def forward(self, q, k, grid):
        rows = torch.arange(grid.height, device=q.device).repeat_interleave(grid.width)
        key_rows = torch.arange(0, grid.height, grid.step, device=q.device)
        columns = -(-grid.width // grid.step)
        key_rows = key_rows.repeat_interleave(columns) + (grid.step - 1) / 2
        return q, k, -(key_rows - rows[:, None]).abs()[None, None]


@pytest.mark.parametrize('build', [pcpvt, svt])
def test_an_encoding_of_ones_own(build):
    """It changes the features, and in a padded batch an image keeps those that it has alone."""
    model = build().eval()
    image = torch.randn(2, 3, 70, 50)
    with torch.no_grad():
        before = model(image)[0]
        for module in model.modules():
            if isinstance(module, Attention):
                module.position = Distance()
        assert not torch.allclose(model(image)[0], before)
        alone = model(image[:1, :, :41, :33])
        together = model(image, torch.tensor([[41, 33], [70, 50]]))
    for a, b in zip(alone, together):
        torch.testing.assert_close(b[:1, :, : a.shape[2], : a.shape[3]], a)


def test_blocks_that_a_peg_follows():
    assert PEGConfig().indices(12, 12) == [0]
    assert PEGConfig(after='all').indices(3, 12) == [0, 1, 2]
    assert PEGConfig(after=range(6)).indices(3, 12) == [0, 1, 2]
    assert PEGConfig(after=[3, -1]).indices(12, 12) == [-1, 3]
    for after in (12, -2, (), (0, 12), 'some'):
        with pytest.raises(ValueError, match='from -1 to 11'):
            PEGConfig(after=after).indices(3, 12)


class Continuous(nn.Module):
    """A bias of scores from the offset of key and query, by an MLP (as in Swin V2)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, heads))

    @classmethod
    def at(cls, site):
        if not site.all_attentions('keys_have_places'):
            raise ValueError('a continuous bias needs keys at places')
        return cls(site.heads)

    def forward(self, q, k, grid):
        queries, keys = (
            torch.cartesian_prod(
                centers(grid.height, step, q.device, q.dtype),
                centers(grid.width, step, q.device, q.dtype),
            )
            for step in (1, grid.step)
        )
        bias = self.mlp(keys - queries[:, None]).permute(2, 0, 1)[None]
        first = grid.class_tokens
        return q, k, F.pad(bias, (first, 0, first, 0))


def test_an_encoding_is_one_row_and_one_class(monkeypatch):
    """Inside of each attention, which has its parameters, of every kind of model."""
    monkeypatch.setitem(POSITIONS, 'continuous', Encoding('scores', Continuous))
    image = torch.randn(1, 3, 50, 70, dtype=torch.double)
    batch = F.pad(image, (0, 10, 0, 14))
    for model in (
        CPVTPyramid('pcpvt_nano', position='continuous'),
        CPVTPyramid(TINY_SVT, position='continuous+peg'),
        DenseCPVT(ColumnarArch(16, 2, 2), out_channels=8, position='continuous'),
    ):
        randomize(model.double())
        maps = model(image)
        sum(x.square().sum() for x in maps).backward()
        inside = [p for name, p in model.named_parameters() if '.attn.position.' in name]
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
        assert len(inside) == 4 * len(attentions)
        assert all(parameter.grad.any() for parameter in inside[::2])
        with torch.no_grad():
            for alone, joint in zip(maps, model(batch, torch.tensor([[50, 70]]))):
                torch.testing.assert_close(joint[..., : alone.shape[2], : alone.shape[3]], alone)
    with pytest.raises(ValueError, match='needs keys at places'):
        CPVTPyramid('pvt_v2_b2_li', position='continuous')
