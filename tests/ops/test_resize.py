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


@pytest.mark.parametrize('padded', [False, True])
@pytest.mark.parametrize('arch', ['pcpvt_nano', 'pvt_tiny'])
def test_a_default_dtype_or_device_changes_nothing(arch, padded):
    """Large enough for attention by oneDNN."""
    model = CPVTPyramid(arch, out_indices=(0, 1)).eval()
    image = torch.randn(1, 3, 512, 512)
    valid = torch.tensor([(500, 300)]) if padded else None
    expected = model(image, valid)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device('meta'):
            maps = model(image, valid)
            sum(x.square().mean() for x in maps).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(maps, expected))
