"""Counts for the table of models."""

import pytest

from benchmarks.model_table import count, multiply_additions, pyramid_row
from cpvt_pyramid import ARCHS, CPVTPyramid


def test_published_flops():
    """Those of Twins' paper. Attention counts, with and without windows."""
    for arch, published in (('svt_small', '2.9'), ('pcpvt_small', '3.8')):
        assert pyramid_row(arch)[3] == published


def test_blocks_of_a_stage_cost_the_same_in_pairs():
    """From which the table's numbers of deep models are made."""
    row = ARCHS['svt_small']._replace(depths=(2, 2, 4, 2))
    small, _ = count(CPVTPyramid, row._replace(depths=(2, 2, 2, 2)))
    whole, _ = count(CPVTPyramid, row)
    blocks = [f'CPVTPyramid.blocks.2.{j}' for j in (0, 1)]
    pair = sum(multiply_additions(small, block) for block in blocks)
    assert pair > 0
    total = multiply_additions(small, 'Global') + pair
    assert total == pytest.approx(multiply_additions(whole, 'Global'), abs=0)
