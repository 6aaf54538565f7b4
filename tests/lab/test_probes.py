"""Probes on models whose knowledge of position is known."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpvt_pyramid import CPVTPyramid, ops
from cpvt_pyramid.lab import probes
from cpvt_pyramid.lab.probes import Subject, images_of, photographs
from experiments.position.models import LabModel


class Returns(nn.Module):
    """Returns what a function makes of the image."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, image):
        return self.make(image)


def pool(image):
    return F.avg_pool2d(image, 8)


def coordinates(image, strength):
    """Pooled images, and where each cell is, scaled."""
    x = pool(image)
    where = probes.positions_like(x).permute(0, 3, 1, 2).float() * strength
    return torch.cat([x, where + 0.01 * torch.randn_like(where)], dim=1)


class Convolution(nn.Module):
    """One 3x3 convolution at stride 8, with zero or replicated padding."""

    def __init__(self, padding_mode: str = 'zeros') -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode=padding_mode)

    def forward(self, image):
        return [self.conv(pool(image))]


@pytest.mark.parametrize('kind', ['noise', 'constant', 'natural'])
def test_known_positions_are_found_and_nothing_else(kind):
    images = images_of(kind, 24, 64)
    models = (Returns(partial(coordinates, strength=strength)) for strength in (1, 0))
    (knows,), (does_not,) = (probes.probe_position(Subject('', m), images) for m in models)
    assert knows.r2 > 0.99 and min(r for r in knows.rings if r == r) > 0.9
    assert abs(does_not.r2) < 0.1


def test_r_squared_is_that_of_held_out_images():
    """More features than tokens fit any images. Photographs do not tell their orientation."""
    random = Returns(lambda image: torch.randn(len(image), 200, 4, 4))
    (found,) = probes.probe_position(Subject('random', random), images_of('noise', 12, 32))
    assert found.r2 < 0.2
    images = photographs(200, 48, 0, 'test')
    (found,) = probes.probe_position(Subject('pixels', Returns(pool)), images)
    assert abs(found.r2) < 0.05


def test_zero_padding_tells_position_and_replicated_does_not():
    # A border's sign is that of the color: with both signs a linear probe could not read it.
    images = images_of('constant', 40, 64).abs()
    zero_padded, expected = Convolution(), Convolution('replicate')
    model = probes.with_replicated_borders(zero_padded)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected(images))
    (zeros,), (replicated,) = (
        probes.probe_position(Subject('', m), images) for m in (zero_padded, model)
    )
    assert zeros.r2 > 0.2 > 0.01 > abs(replicated.r2)
    # Only the outermost ring of 8 x 8 cells differs from the rest.
    assert zeros.rings[0] > 0.2 and abs(zeros.rings[2]) < 0.2
    assert probes.has_padded_convolutions(zero_padded)
    assert not probes.has_padded_convolutions(expected)


def test_replicated_borders_of_a_peg_are_its_own():
    model = LabModel(position='peg').eval()
    replicated = LabModel(position='peg', peg={'zero_padding': False}).eval()
    replicated.load_state_dict(model.state_dict())
    models = model, replicated, probes.with_replicated_borders(model)
    scene = torch.rand(2, 3, 48, 48)
    with torch.no_grad():
        zeros, expected, found = (each(scene).readings for each in models)
    torch.testing.assert_close(found, expected)
    assert (zeros - expected).abs().max() > 1e-4


def test_padding_pattern_by_hand():
    """On constant images the difference at a border is the weight that falls on the zeros."""
    model = Convolution()
    color = torch.tensor([1.0, -2.0, 0.5])
    images = color.view(1, 3, 1, 1).expand(4, 3, 96, 96) + 1e-6 * torch.randn(4, 3, 96, 96)
    (found,) = probes.padding_pattern(Subject('conv', model), images, margin=32)
    assert found.map.shape == (4, 4)
    weight = model.conv.weight.detach()
    top = -(weight[:, :, 0] * color.view(1, 3, 1)).sum((1, 2))  # what row 0 of the kernel lacks
    maps = Subject('conv', model).maps(images)[0]
    spread = maps[:, :, 4:8, 4:8].std()
    assert found.map[0, 1] == pytest.approx(float(top.square().mean().sqrt() / spread), rel=1e-3)
    assert found.map[1:3, 1:3].max() < 1e-3 * found.map[0, 1]
    assert found.snr > 1e6  # the same in every image
    (found,) = probes.padding_pattern(Subject('pool', Returns(pool)), images, margin=32)
    assert (found.mae, found.snr) == (0, 0)  # nothing is padded
    # A difference in every image, but not the same one: no pattern.
    noisy = Returns(lambda image: pool(image) + torch.randn_like(pool(image)))
    (noise,) = probes.padding_pattern(Subject('noise', noisy), torch.randn(100, 3, 144, 144), 8)
    assert noise.snr < 0.01 and noise.mae == pytest.approx(noise.chance, rel=0.15)


def test_features_of_a_convolution_move_with_the_picture():
    images = photographs(4, 128 + 32, 0, 'test')
    subject = Subject('conv', Convolution())
    (at_stride,) = probes.shift_drift(subject, images, 128, 16)
    (between,) = probes.shift_drift(subject, images, 128, 12)
    assert at_stride.interior < 1e-5 < 1e-2 < at_stride.border
    assert between.interior > 0.01
    (still,) = probes.shift_drift(subject, images, 128, 0)
    assert still == (0, 0)
    with pytest.raises(ValueError, match='side \\+ shift = 192'):
        probes.shift_drift(subject, images, 160, 32)


def test_masked_padding_changes_nothing_and_unmasked_does():
    torch.manual_seed(0)
    model = LabModel(position='peg').eval()
    subject = Subject('peg', model.backbone)
    images = photographs(4, 48, 0, 'test')
    fitted = [probes.fit_probe(m) for m in subject.maps(images)]
    masked = probes.padding_drift(subject, images, (64, 80), True, fitted)[-1]
    unmasked = probes.padding_drift(subject, images, (64, 80), False, fitted)[-1]
    assert masked.features < 1e-5 < 1e-3 < unmasked.features
    assert masked.displacement < 1e-4 < unmasked.displacement
    with pytest.raises(ValueError, match='does not take the valid sizes'):
        probes.padding_drift(Subject('conv', Convolution()), images, (64, 64), True, fitted)


def test_padded_sizes_are_what_models_take():
    for side, step in ((224, 32), (48, 8), (64, 32)):
        for share in np.linspace(0, 0.6, 7):
            size = probes.canvas_size((side, side), share, step)
            assert not any((s - side) % step for s in size) and min(size) >= side
            assert 1 - side**2 / (size[0] * size[1]) == pytest.approx(share, abs=0.14)
    assert probes.canvas_size((224, 224), 0.6, 32) == (352, 352)


def test_recorded_weights_give_what_the_attention_gives():
    subject = Subject('ours', LabModel(position='relative').backbone)
    weights = probes.attention_weights(subject, torch.randn(1, 3, 48, 48))
    assert [w.shape for w in weights] == [(4, 37, 37)] * 4  # of every block
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    for mask in (None, torch.arange(9) < torch.tensor([4, 9]).view(2, 1, 1, 1)):
        with probes.AttentionRecorder() as recorder:
            out = ops.attend(q, k, v, mask, 0.0)
        mixed = (recorder.found[0] @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(mixed, out.view_as(mixed))


def test_known_similarities_and_norms():
    rows = torch.linspace(-1, 1, 6).view(1, 1, 6, 1).expand(3, 1, 6, 6)
    found = probes.position_similarity(rows)
    assert found[0, 0, 1, 5] == pytest.approx(1) and found[0, 0, 5, 0] == pytest.approx(-1)
    map_ = torch.ones(2, 4, 8, 8)
    map_[:, :, 2, 3] = 10
    subject = Subject('x', Returns(lambda image: map_))
    (found,) = probes.token_norms(subject, torch.zeros(2, 3, 64, 64))
    assert found.largest == pytest.approx(10) and found.share == pytest.approx(1 / 64)


@pytest.mark.parametrize('size', [(64, 64), (64, 96), (65, 65), (48, 80)])
def test_maps_with_channels_last_are_recognized(size):
    """Also where one map has as many channels as rows and columns; odd sizes are rounded up."""

    def first(image):
        pooled = [F.avg_pool2d(image, s, ceil_mode=True) for s in (4, 8)]
        return [x.mean(1, keepdim=True).expand(-1, 16, -1, -1) for x in pooled]

    images = torch.randn(2, 3, *size)
    last = Subject('last', Returns(lambda x: [m.permute(0, 2, 3, 1) for m in first(x)]))
    for model in (last, Subject('first', Returns(first))):
        assert all(torch.equal(*pair) for pair in zip(model.maps(images), first(images)))


def test_what_models_return():
    image = torch.zeros(2, 3, 32, 32)
    nested = {'maps': (image, [image[:, :1]]), 'hidden_states': None, 'one': image}
    maps = Subject('nested', Returns(lambda x: nested)).maps(image)
    assert [m.shape[1] for m in maps] == [3, 1, 3]
    for wrong, complaint in (
        ([], r'must return maps \(B, C, h, w\) of finite numbers, got \(\)'),
        (image[0], r'got \(3, 32, 32\)'),
        (image[:1], r'got \(1, 3, 32, 32\)'),
        (image / 0, 'wrong must return maps .* of finite numbers'),
    ):
        with pytest.raises(ValueError, match=complaint):
            Subject('wrong', Returns(lambda x, wrong=wrong: wrong)).maps(image)
    pyramid = Subject('ours', CPVTPyramid('pcpvt_nano'))
    assert pyramid.masks and len(pyramid.maps(torch.zeros(2, 3, 64, 64))) == 4
    assert not Subject('conv', Convolution()).masks
    fixed = Subject('fixed', nn.Sequential(nn.Flatten(2), nn.Linear(64, 4)))
    with pytest.raises(ValueError, match='fixed fails on images of 32x32 pixels'):
        fixed.maps(image)


def test_strides():
    assert [probes.stride_of(64, n) for n in (32, 16, 4)] == [2, 4, 16]
    assert probes.stride_of(224, 16) == 14  # a patch
    assert [probes.stride_of(65, n) for n in (33, 17, 5)] == [2, 4, 16]  # rounded up
    assert probes.stride_of(224, 32) == 7
    assert [probes.stride_of(64, n) for n in (29, 14, 7)] == [2, 4, 8]  # without padding
    fixed = Subject('fixed', nn.AdaptiveAvgPool2d(8))
    with pytest.raises(ValueError, match='larger images must have larger maps, got 8 and 8'):
        probes.padding_pattern(fixed, torch.randn(2, 3, 128, 128), 32)
