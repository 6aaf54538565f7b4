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
def test_in_a_padded_batch_they_are_those_of_mm_alone(arch):
    theirs = BUILDERS[arch](arch)
    options = dict(window_padding='mmseg', drop_border=True)
    ours = CPVTPyramid(TINY[arch], stage_norm=arch != 'pcpvt', **options).eval()
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(2, 3, 75, 113)
    for i, (height, width) in enumerate([(75, 96), (56, 100)]):  # windows fit in none, and in one
        alone = theirs(image[i : i + 1, :, :height, :width])
        for a, b in zip(ours(image, torch.tensor([[height, width]] * 2)), alone):
            a = a[i : i + 1, :, : b.shape[2], : b.shape[3]]
            torch.testing.assert_close(a / b.std(), b / b.std(), rtol=0, atol=5e-3)
