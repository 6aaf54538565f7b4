"""Position tables at the size of each image, against F.interpolate image by image."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cpvt_pyramid import CPVTPyramid, ops

side = st.integers(1, 40)


@pytest.mark.parametrize('mode', ['bilinear', 'bicubic'])
@settings(deadline=None, max_examples=40)
@given(entries=st.tuples(side, side), sizes=st.lists(st.tuples(side, side), min_size=1, max_size=3))
def test_each_image_has_the_table_at_its_size(mode, entries, sizes):
    table = torch.randn(1, *entries, 3, dtype=torch.float64)
    height, width = (max(sides) + 2 for sides in zip(*sizes))
    heights, widths = torch.tensor(sizes).T
    out = ops.resize_table_each(table, heights, widths, (height, width), mode)
    assert out.shape == (len(sizes), height, width, 3)
    for one, (h, w) in zip(out, sizes):
        alone = F.interpolate(table.permute(0, 3, 1, 2), (h, w), mode=mode)[0].permute(1, 2, 0)
        torch.testing.assert_close(one[:h, :w], alone)
        assert not one[h:].any() and not one[:, w:].any()


def test_sizes_are_not_read_on_the_host():
    """As they would be on a GPU, at the cost of waiting for it: meta tensors have no values."""
    model = CPVTPyramid('pvt_tiny').to('meta')
    maps = model(torch.empty(2, 3, 64, 96, device='meta'), torch.empty(2, 2, device='meta'))
    assert [tuple(x.shape[2:]) for x in maps] == [(16, 24), (8, 12), (4, 6), (2, 3)]


@pytest.fixture
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize('padded', [False, True])
def test_a_default_dtype_changes_nothing(double_by_default, padded):
    """Large enough for attention by oneDNN."""
    model = CPVTPyramid('pcpvt_nano').float().eval()
    image = torch.randn(1, 3, 512, 512, dtype=torch.float32)
    valid = torch.tensor([(500, 300)]) if padded else None
    loss = sum(x.square().mean() for x in model(image, valid))
    loss.backward()
    torch.set_default_dtype(torch.float32)
    expected = sum(x.square().mean() for x in model(image, valid))
    assert torch.equal(loss, expected)


@pytest.mark.parametrize('padded', [False, True])
def test_a_default_device_changes_nothing(padded):
    model = CPVTPyramid('pvt_tiny').eval()
    image = torch.randn(1, 3, 512, 512)
    valid = torch.tensor([(500, 300)]) if padded else None
    with torch.no_grad():
        expected = model(image, valid)
        with torch.device('meta'):
            maps = model(image, valid)
    assert all(torch.equal(a, b) for a, b in zip(maps, expected))
