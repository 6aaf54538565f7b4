"""The encodings by themselves: against torch's convolutions and interpolation, and loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from ports import randomize

from cpvt_pyramid import PEG, PosCNN
from cpvt_pyramid.position import (
    Grid,
    LearnedPosition,
    NoPosition,
    RelativePosition,
    SinCosPosition,
)

SIZES = [(7, 4), (3, 9)]


def convolved(x: torch.Tensor, conv: torch.nn.Conv2d, **options: int) -> torch.Tensor:
    """`F.conv2d` of (B, H, W, C)."""
    x = F.conv2d(x.permute(0, 3, 1, 2), conv.weight, conv.bias, groups=conv.groups, **options)
    return x.permute(0, 2, 3, 1)


def mask_of(sizes: list, height: int, width: int) -> torch.Tensor:
    mask = torch.zeros(len(sizes), height, width, 1, dtype=torch.bool)
    for cell, (h, w) in zip(mask, sizes):
        cell[:h, :w] = True
    return mask


@pytest.mark.parametrize('kernel_size', [1, 3, 27])
def test_peg_adds_a_depthwise_convolution(kernel_size):
    peg = randomize(PosCNN(8, kernel_size))
    assert peg.proj[0].weight.shape == (8, 1, kernel_size, kernel_size)  # of the published name
    x = torch.randn(2, 5, 6, 8)
    torch.testing.assert_close(peg(x), x + convolved(x, peg.proj[0], padding=kernel_size // 2))


@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('conv', ['depthwise', 'separable', 'dense'])
def test_gradients_have_the_strides_of_their_weights(conv, memory_format):
    """Otherwise DDP warns: "Grad strides do not match bucket view strides"."""
    peg = PosCNN(8, conv=conv).to(memory_format=memory_format)
    peg(torch.randn(2, 5, 6, 8, requires_grad=True)).sum().backward()
    for name, parameter in peg.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name


def test_separable_and_dense_pegs():
    x = torch.randn(2, 5, 6, 8)
    dense = randomize(PosCNN(8, conv='dense'))
    torch.testing.assert_close(dense(x), x + convolved(x, dense.proj[0], padding=1))
    separable = randomize(PosCNN(8, conv='separable'))
    depthwise, pointwise = separable.proj[0]
    expected = x + convolved(convolved(x, depthwise, padding=1), pointwise)
    torch.testing.assert_close(separable(x), expected)
    # The paper's count (section 4.2) is l * (d^2 + k^2 d); biases come on top.
    assert sum(p.numel() for p in separable.parameters() if p.dim() > 1) == 8 * 8 + 9 * 8


def test_pegs_in_a_row_are_each_added():
    pegs = randomize(PosCNN(8, layers=3))
    x = expected = torch.randn(1, 5, 6, 8)
    for conv in pegs.proj:
        expected = expected + convolved(expected, conv, padding=1)
    torch.testing.assert_close(pegs(x), expected)


@pytest.mark.parametrize('stride', [2, 3])
@pytest.mark.parametrize('zero_padding', [True, False])
def test_stride_gives_position_alone_at_ceil_size(stride, zero_padding):
    peg = randomize(PosCNN(8, stride=stride, zero_padding=zero_padding))
    for height, width in ((1, 1), (6, 7), (8, 9)):
        x = torch.randn(2, height, width, 8)
        out = peg(x)
        assert out.shape == (2, math.ceil(height / stride), math.ceil(width / stride), 8)
        mode = 'constant' if zero_padding else 'replicate'
        padded = F.pad(x.permute(0, 3, 1, 2), (1, 1, 1, 1), mode).permute(0, 2, 3, 1)
        torch.testing.assert_close(out, convolved(padded, peg.proj[0], stride=stride))


def test_without_zero_padding_the_border_is_not_seen():
    """What CPVT's table on zero padding compares: a constant map stays constant."""
    x = torch.randn(8).expand(1, 6, 5, 8)
    zeros, repeated = (randomize(PosCNN(8, zero_padding=z))(x) for z in (True, False))
    torch.testing.assert_close(repeated, repeated[:, :1, :1].expand_as(repeated))
    assert (zeros[:, 0] - zeros[:, 2]).abs().max() > 0.1


@pytest.mark.parametrize('kernel_size', [3, 5])
@pytest.mark.parametrize('zero_padding', [True, False])
@pytest.mark.parametrize('conv', ['depthwise', 'separable', 'dense'])
def test_border_in_a_batch_is_each_image_s_own(conv, zero_padding, kernel_size):
    peg = randomize(PosCNN(8, kernel_size, conv=conv, layers=2, zero_padding=zero_padding))
    batch = torch.randn(2, 8, 10, 8)
    together = peg(batch, mask_of(SIZES, 8, 10))
    for joint, image, (h, w) in zip(together, batch, SIZES):
        torch.testing.assert_close(joint[:h, :w], peg(image[None, :h, :w])[0])


@pytest.mark.parametrize('mode', ['bilinear', 'bicubic'])
def test_learned_table_is_interpolated_for_each_image(mode):
    learned = randomize(LearnedPosition(8, (5, 5), mode))

    def at(height: int, width: int) -> torch.Tensor:
        table = learned.table.permute(0, 3, 1, 2)
        return F.interpolate(table, (height, width), mode=mode).permute(0, 2, 3, 1)

    for height, width in ((1, 1), (5, 5), (8, 3)):
        x = torch.randn(2, height, width, 8)
        torch.testing.assert_close(learned(x), x + at(height, width))
    x = torch.randn(2, 8, 10, 8)
    together = learned(x, mask_of(SIZES, 8, 10))
    for joint, image, (h, w) in zip(together, x, SIZES):
        torch.testing.assert_close(joint[:h, :w], image[:h, :w] + at(h, w)[0])


def test_sines_and_cosines():
    x = torch.zeros(1, 3, 40, 16)
    out = SinCosPosition(16)(x)[0]
    for row, column in ((0, 0), (1, 0), (2, 39), (1, 17)):
        for i in range(4):
            frequency = 10_000 ** (-i / 4)
            expected = [f(at * frequency) for at in (row, column) for f in (math.sin, math.cos)]
            torch.testing.assert_close(out[row, column, i::4], torch.tensor(expected))
    assert SinCosPosition(16)(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match='multiple of 4'):
        SinCosPosition(18)


@pytest.mark.parametrize('height, width', [(1, 1), (3, 4), (11, 2)])
def test_relative_position(height, width):
    """Equation 4 of Shaw et al., a query and a key at a time."""
    relative = randomize(RelativePosition(6))
    q = torch.randn(2, 3, height * width, 6)
    _, _, scores = relative(q, q, Grid(height, width))
    cells = [(y, x) for y in range(height) for x in range(width)]
    for i, (y, x) in enumerate(cells):
        for j, (of_key_y, of_key_x) in enumerate(cells):
            row = max(-8, min(8, of_key_y - y)) + 8
            column = max(-8, min(8, of_key_x - x)) + 8
            vector = relative.rows[row] + relative.columns[column]
            torch.testing.assert_close(scores[:, :, i, j], q[:, :, i] @ vector / math.sqrt(6))


def test_no_position():
    x = torch.randn(1, 2, 3, 4)
    assert NoPosition()(x) is x


def test_class_token_is_kept_apart():
    peg = randomize(PosCNN(8))
    x = torch.randn(2, 13, 8)
    out = Grid(3, 4, class_tokens=1).encode(peg, x)
    assert torch.equal(out[:, 0], x[:, 0])
    torch.testing.assert_close(out[:, 1:], peg(x[:, 1:].view(2, 3, 4, 8)).flatten(1, 2))


def test_blocks_that_a_peg_follows():
    assert PEG().indices(12) == [0]
    assert PEG(after='all').indices(3) == [0, 1, 2]
    assert PEG(after=range(6)).indices(12) == [0, 1, 2, 3, 4, 5]
    assert PEG(after=[3, -1]).indices(12) == [-1, 3]
    for after in (12, -2, (), (0, 12), 'some'):
        with pytest.raises(ValueError, match='from -1 to 11'):
            PEG(after=after).check(12)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(kernel_size=4), 'must be odd, got'),
        (dict(conv='sparse'), 'depthwise, separable, dense'),
        (dict(layers=0), 'layers=0'),
        (dict(layers=2, stride=2), 'layers=2, stride=2'),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PosCNN(8, **arguments)
