"""Maps whose sides neither sub-sampling nor windows divide, as the backbones of mm treat them."""

import pytest
import torch
from foreign import TINY, of_mmdet, of_mmseg

from cpvt_pyramid import CPVTPyramid

BUILDERS = {'pcpvt': of_mmseg, 'svt': of_mmseg, 'mit': of_mmseg, 'pvt_v2': of_mmdet}


# Tokens of stage 1: 8 divides both, neither, or one side; 7 (SVT) neither, one side, or both.
@pytest.mark.parametrize('size', [(96, 96), (75, 113), (100, 224), (224, 252)], ids=str)
@pytest.mark.parametrize('arch', BUILDERS)
@torch.no_grad()
def test_borders_are_those_of_mm(arch, size):
    theirs = BUILDERS[arch](arch)
    options = dict(window_padding='mmseg', drop_border=True)
    ours = CPVTPyramid(TINY[arch], stage_norm=arch != 'pcpvt', **options).eval()
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(2, 3, *size)
    for a, b in zip(ours(image), theirs(image)):
        torch.testing.assert_close(a / b.std(), b / b.std(), rtol=0, atol=5e-3)


@pytest.mark.parametrize('arch', BUILDERS)
@torch.no_grad()
def test_in_a_padded_batch_they_are_ours(arch):
    model = CPVTPyramid(TINY[arch], window_padding='mmseg', drop_border=True).eval()
    ours = CPVTPyramid(TINY[arch]).eval()
    ours.load_state_dict(model.state_dict())
    image = torch.randn(2, 3, 75, 113)
    valid = torch.tensor([[75, 113], [40, 90]])
    torch.testing.assert_close(list(model(image, valid)), list(ours(image, valid)))
