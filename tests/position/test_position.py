"""The encodings by themselves: against torch's convolutions and interpolation, timm, and loops."""

import math

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from reference import same_maps
from timm.layers import apply_rot_embed_cat

from benchmarks.models.ports import randomize
from cpvt_pyramid import PEGConfig, PosCNN
from cpvt_pyramid.position import FIRE, ALiBi, Grid, LookHere, RelativePosition, RoPE


@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('conv', ['depthwise', 'separable', 'dense'])
def test_gradients_have_the_strides_of_their_weights(conv, memory_format):
    """Otherwise DDP warns: "Grad strides do not match bucket view strides"."""
    peg = PosCNN(8, conv=conv).to(memory_format=memory_format)
    peg(torch.randn(2, 5, 6, 8, requires_grad=True)).sum().backward()
    for name, parameter in peg.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name


@pytest.mark.parametrize('stride', [2, 3])
@pytest.mark.parametrize('zero_padding', [True, False])
def test_stride_gives_position_alone_at_ceil_size(stride, zero_padding):
    peg = randomize(PosCNN(8, stride=stride, zero_padding=zero_padding))
    for height, width in ((1, 1), (6, 7), (8, 9)):
        x = torch.randn(2, height, width, 8)
        out = peg(x)
        assert out.shape == (2, math.ceil(height / stride), math.ceil(width / stride), 8)
        mode = 'constant' if zero_padding else 'replicate'
        padded, conv = F.pad(x.permute(0, 3, 1, 2), (1, 1, 1, 1), mode), peg.proj[0]
        expected = F.conv2d(padded, conv.weight, conv.bias, stride, groups=8)
        torch.testing.assert_close(out, expected.permute(0, 2, 3, 1))


@pytest.mark.parametrize('height, width', [(1, 1), (5, 7), (14, 3)])
@pytest.mark.parametrize('kind', ['Cat', 'DinoV3', 'Mixed'])
def test_rope_is_timms(kind, height, width):
    """RoPE-ViT's axial and mixed frequencies, and DINOv3's coordinates."""
    size = dict(feat_shape=(height, width), grid_indexing='xy')
    ours = RoPE(3, 16, mixed=kind == 'Mixed', normalized=kind == 'DinoV3')
    if kind == 'Cat':
        theirs = timm.layers.RotaryEmbeddingCat(16, temperature=100, in_pixels=False, **size)
    elif kind == 'DinoV3':
        theirs = timm.layers.RotaryEmbeddingDinoV3(16, rotate_half=False, **size)
    else:
        theirs = timm.layers.RotaryEmbeddingMixed(48, 1, 3, **size)
        ours.frequencies = torch.nn.Parameter(theirs.freqs.detach()[:, 0])
    embed = theirs.get_embed()[0] if kind == 'Mixed' else theirs.get_embed()
    q, k = torch.randn(2, 2, 3, height * width, 16)
    for mine, x in zip(ours(q, k, Grid(height, width)), (q, k)):
        torch.testing.assert_close(mine, apply_rot_embed_cat(x, embed))


def test_mixed_frequencies_start_as_axial_ones_turned():
    rope = RoPE(4, 16, mixed=True)
    radii = rope.frequencies.square().sum(0).sqrt()  # (heads, d / 2)
    expected = torch.tensor([10 ** (-i / 4) for i in range(4)])
    torch.testing.assert_close(radii, expected.repeat(2).expand(4, -1))
    f_x, f_y = rope.frequencies.unflatten(2, (2, 4)).unbind()  # two axes at right angles
    torch.testing.assert_close((f_x * f_y)[:, 0], -(f_x * f_y)[:, 1])
    assert not torch.equal(rope.frequencies[:, 0], rope.frequencies[:, 1])


@pytest.mark.parametrize('view', [180, 45])
def test_the_edge_of_a_view_is_seen_however_far(view):
    """Along a diagonal of 1,000 tokens, in single precision."""
    down = right = torch.arange(1000.0)
    heads = LookHere(12, 0, view)
    edges = [head for head in range(8) if (head * 45 - 315) % 360 in (0, 360 - view)]
    assert len(edges) == 2  # the diagonal is the first edge of one view and the last of another
    for head in edges:
        assert heads.penalty(head, down, right).min() > LookHere.HIDDEN / 2
        off = heads.penalty(head, down[1:], right[:-1]), heads.penalty(head, down[:-1], right[1:])
        assert sum(bool((side == LookHere.HIDDEN).all()) for side in off) == 1


ENCODINGS = {
    'rope': lambda: RoPE(4, 8),
    'normalized': lambda: RoPE(4, 8, normalized=True),
    'rope-mixed': lambda: RoPE(4, 8, mixed=True),
    'relative': lambda: RelativePosition(8),
    'fire': lambda: FIRE(4),
    'alibi': lambda: ALiBi(4),
    'lookhere': lambda: LookHere(4, depth=0),
}


@pytest.mark.parametrize('name', ENCODINGS)
@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16])
def test_inside_attention_in_half_precision(name, dtype):
    """Angles and distances are computed in single precision: at the far end of a long map an angle
    in half precision would be anywhere."""
    encoding = randomize(ENCODINGS[name]())
    for parameter in encoding.parameters():
        parameter.data = parameter.data.to(dtype).float()  # representable in both
    q, k = torch.randn(2, 1, 4, 600, 8).to(dtype)
    grid = Grid(2, 300)
    exact = encoding(q.float(), k.float(), grid)
    half = encoding.to(dtype)(q, k, grid)
    for a, b in zip(half, exact):
        assert a is None and b is None or a.dtype == dtype
        if a is not None:
            torch.testing.assert_close(a, b.to(dtype), rtol=2e-2, atol=2e-2)


def test_inside_attention_exports():
    """With dynamic batch, height and width."""

    class Inside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inside = RoPE(2, 8, mixed=True, normalized=True), RelativePosition(8), FIRE(2)
            self.encodings = torch.nn.ModuleList([*inside, LookHere(2, 0)])

        def forward(self, x: torch.Tensor) -> list:
            grid = Grid(x.shape[1], x.shape[2], mask=x[..., :1] > 0)
            q = x.flatten(1, 2).unflatten(2, (2, 8)).transpose(1, 2)
            found = [encoding(q, q, grid) for encoding in self.encodings]
            return [x for of_one in found for x in of_one if x is not None]

    model = randomize(Inside()).eval()
    sizes = dict.fromkeys((0, 1, 2), torch.export.Dim.DYNAMIC)
    graph = torch.export.export(model, (torch.ones(2, 5, 6, 16),), dynamic_shapes=(sizes,)).module()
    for size in ((1, 4, 4), (3, 9, 2), (2, 2, 7)):
        x = torch.randn(*size, 16)
        with torch.no_grad():
            same_maps(graph(x), model(x))


def test_blocks_that_a_peg_follows():
    assert PEGConfig().indices(12, 12) == [0]
    assert PEGConfig(after='all').indices(3, 12) == [0, 1, 2]
    assert PEGConfig(after=range(6)).indices(3, 12) == [0, 1, 2]
    assert PEGConfig(after=[3, -1]).indices(12, 12) == [-1, 3]
    for after in (12, -2, (), (0, 12), 'some'):
        with pytest.raises(ValueError, match='from -1 to 11'):
            PEGConfig(after=after).indices(3, 12)
