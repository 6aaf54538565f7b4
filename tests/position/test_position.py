"""The encodings by themselves: against torch's convolutions and interpolation, timm, and loops."""

import pytest
import timm.layers
import torch
from timm.layers import apply_rot_embed_cat

from cpvt_pyramid import PEGConfig
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.model import Attention
from cpvt_pyramid.position import RoPE, rotate
from cpvt_pyramid.position.added import SinCosPosition
from tests.models.ours import pcpvt, svt


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
