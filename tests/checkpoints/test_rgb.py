"""Checkpoints for RGB in models of other channels."""

import re

import pytest
import torch

from cpvt_pyramid import CPVT, ColumnarArch, CPVTPyramid
from tests.models.ports import randomize

TINY_COLUMN = ColumnarArch(dim=16, heads=2, depth=2, patch_size=4)


@pytest.mark.parametrize(
    'make',
    [
        lambda **options: CPVTPyramid('pcpvt_nano', **options),
        lambda **options: CPVT(TINY_COLUMN, **options),
    ],
    ids=['pyramid', 'column'],
)
@pytest.mark.parametrize(
    'rgb_weights, weights_of',
    [
        ('mean', ['mean'] * 5),
        ('repeat', ['red', 'green', 'blue', 'red', 'green']),
        (('nir', 'red', 'swir', 'green', 'blue'), ['mean', 'red', 'mean', 'green', 'blue']),
    ],
)
def test_weights_of_rgb_for_other_channels(make, rgb_weights, weights_of, caplog):
    rgb = randomize(make())
    model = make(in_channels=5, rgb_weights=rgb_weights)
    with caplog.at_level('INFO'):
        model.load_state_dict(rgb.state_dict())
    (name,) = (n for n in rgb.state_dict() if re.match(r'patch_embed(s.0)?.proj.weight', n))
    said = ', '.join(weights_of).replace('mean', 'their mean')
    assert f'{name} made for 5 channels from RGB: {said}' in caplog.text
    weight = rgb.state_dict()[name]
    of = dict(zip(('red', 'green', 'blue', 'mean'), [*weight.unbind(1), weight.mean(1)]))
    expected = torch.stack([of[band] * 0.6 for band in weights_of], dim=1)
    torch.testing.assert_close(model.state_dict()[name], expected)
    # Its own weights, of 5 channels, come back as they are.
    again = make(in_channels=5, rgb_weights=rgb_weights)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.state_dict()[name], model.state_dict()[name])
    # Bands that are alike give what grey gives.
    model, grey = make(in_channels=4, rgb_weights='mean').eval(), torch.randn(1, 1, 40, 50)
    model.load_state_dict(rgb.state_dict())
    found, expected = model(grey.expand(-1, 4, -1, -1)), rgb.eval()(grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(in_channels=3, rgb_weights='mean'), 'needs in_channels other than 3'),
        (dict(in_channels=4, rgb_weights='middle'), "'mean', 'repeat' or the different names"),
        (
            dict(in_channels=4, rgb_weights=('red', 'green', 'blue')),
            "got .'red', .* for 4 channels",
        ),
        (dict(in_channels=2, rgb_weights=('vv', 'vh')), 'some of them red, green, blue'),
        (dict(in_channels=2, rgb_weights=('red', 'red')), 'different names'),
    ],
)
def test_mistakes_about_channels_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CPVTPyramid('pcpvt_nano', **options)
