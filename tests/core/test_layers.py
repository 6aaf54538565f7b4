"""What an MLP saves for its gradient, means of linear attention, and masks of windows."""

import re

import pytest
import torch
import torch.nn.functional as F

from cpvt_pyramid.grid import Grid, grid_of_windows, weights_of_means
from cpvt_pyramid.model import WindowAttention
from cpvt_pyramid.padding.mask import Padding
from tests.models.ours import VALID, images, svt


@pytest.mark.parametrize('size', [(7, 7), (3, 20), (1, 1), (15, 8)], ids=str)
def test_means_are_those_of_adaptive_pooling(size):
    x = torch.randn(2, *size, 4)
    padding = Padding.of_batch(torch.empty(2, 1, 20, 20), torch.tensor([size, (20, 20)]))
    padded = torch.empty(2, 20, 20, 4)
    for weights in (weights_of_means(x, None), weights_of_means(padded, padding)):
        rows, columns = (w[:1, :, :side] for w, side in zip(weights, size))
        found = torch.einsum('bih,bjw,bhwc->bijc', rows, columns, x[:1])
        expected = F.adaptive_avg_pool2d(x[:1].permute(0, 3, 1, 2), 7).permute(0, 2, 3, 1)
        torch.testing.assert_close(found, expected)


def test_windows_have_a_mask_only_where_they_are_filled_up():
    assert grid_of_windows(torch.empty(1, 14, 21, 8), None, 7).key_bias is None
    assert grid_of_windows(torch.empty(1, 14, 20, 8), None, 7).key_bias.any()
    assert grid_of_windows(torch.empty(1, 14, 20, 8), None, 7, 'zero').key_bias is None


@pytest.mark.parametrize('shape', [(2, 4, 1, 9), (2, 1, 9, 9), (2, 9), (1, 1, 9)])
def test_a_bias_of_keys_is_that_of_all_heads_and_queries(shape):
    """What reads it may take (B, M) of it."""
    with pytest.raises(ValueError, match=re.escape(f'must be (B, 1, 1, M), got {shape}')):
        Grid(3, 3, key_bias=torch.zeros(shape))


@pytest.mark.parametrize('valid', [None, VALID], ids=['', 'valid'])
@pytest.mark.parametrize('options', [dict(), dict(position='rope')], ids=['', 'rope'])
def test_windows_beyond_the_limit_of_a_kernel_are_attended_to_in_parts(monkeypatch, options, valid):
    model = svt(**options).eval()
    batch = images()
    with torch.no_grad():
        whole = model(batch, valid)

    counts = []
    attend = WindowAttention.attend

    def counted(attention, q, *rest):
        counts.append(len(q))
        return attend(attention, q, *rest)

    monkeypatch.setattr(WindowAttention, 'attend', counted)
    monkeypatch.setattr('cpvt_pyramid.model.MAX_BATCH', 3)
    with torch.no_grad():
        in_parts = model(batch, valid)
    assert len(counts) > 8 and max(counts) == 3
    for a, b in zip(in_parts, whole):
        torch.testing.assert_close(a, b)
