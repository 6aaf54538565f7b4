"""Semantic segmentors in plain PyTorch; `tests/mm/foreign/test_trained.py` compares them with
MMSegmentation's."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.tasks.segmentors import (
    IGNORED,
    SemanticSegmentor,
    segformer,
    semantic_fpn,
    upernet,
    window_starts,
)

BUILDERS = {
    'semantic_fpn': lambda body: semantic_fpn(body, num_classes=5, channels=8, fpn_channels=16),
    'upernet': lambda body: upernet(body, num_classes=5, channels=8, auxiliary_channels=8),
    'segformer': lambda body: segformer(body, num_classes=5, channels=8),
}


def build(name: str, body: object = 'pcpvt_nano') -> SemanticSegmentor:
    torch.manual_seed(0)
    return BUILDERS[name](body)


@pytest.mark.parametrize('name', BUILDERS)
def test_they_train(name):
    """Every parameter gets a gradient, and some steps reduce the loss."""
    model = build(name)
    image = torch.rand(2, 3, 64, 64)
    labels = torch.full((2, 64, 64), 3)
    labels[:, :8] = IGNORED
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        loss = model.loss(image, labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize('name', BUILDERS)
@torch.no_grad()
def test_the_loss_is_the_cross_entropy_of_the_scores(name):
    model = build(name).eval()
    image = torch.rand(1, 3, 50, 70)
    labels = torch.randint(5, (1, 50, 70))
    expected = F.cross_entropy(model(image), labels)
    if name == 'upernet':
        maps = model.backbone(model.normalized(image))
        scores = F.interpolate(model.auxiliary_head(maps), (50, 70), mode='bilinear')
        expected = expected + 0.4 * F.cross_entropy(scores, labels)
    torch.testing.assert_close(model.loss(image, labels), expected)


@pytest.mark.parametrize('body', ['mit_b0', 'svt_small', 'pvt_tiny', 'cpvt_tiny'])
@torch.no_grad()
def test_any_backbone_and_size(body):
    model = build('segformer', body).eval()
    for height, width in ((33, 70), (1, 1), (64, 64)):
        assert model(torch.rand(1, 3, height, width)).shape == (1, 5, height, width)


def test_backbones_without_all_strides_are_refused():
    with pytest.raises(ValueError, match='strides of the backbone must be'):
        build('upernet', CPVTPyramid('pcpvt_nano', out_indices=(1, 2, 3)))


@pytest.mark.parametrize('name', BUILDERS)
@torch.no_grad()
def test_images_are_normalized(name):
    model = build(name).eval()
    image = torch.rand(1, 3, 40, 40)
    expected = model(image)
    model.image_mean, model.image_std = (0.0,) * 3, (1.0,) * 3
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]
    torch.testing.assert_close(model((image - mean) / std), expected)


@torch.no_grad()
def test_windows_cover_the_image_and_are_averaged():
    model = build('segformer').eval()
    image = torch.rand(1, 3, 100, 70)
    whole = model(image)
    model.window = 64, 48
    total, count = torch.zeros_like(whole), torch.zeros_like(whole)
    for top in (0, 36):
        for left in (0, 6):
            part = slice(top, top + 64), slice(left, left + 64)
            scores = model.scores(image[:, :, part[0], part[1]])
            total[:, :, part[0], part[1]] += F.interpolate(scores, (64, 64), mode='bilinear')
            count[:, :, part[0], part[1]] += 1
    torch.testing.assert_close(model(image), total / count)
    small = image[:, :, :60, :40]
    found = model(small)
    model.window = None
    torch.testing.assert_close(found, model(small))
    model.train().window = 64, 48
    assert model(image).shape == whole.shape  # as a whole


@pytest.mark.parametrize(
    'length, side, step, expected',
    [(50, 64, 48, [0]), (64, 64, 48, [0]), (65, 64, 48, [0, 1]), (160, 64, 48, [0, 48, 96])],
)
def test_window_starts(length, side, step, expected):
    assert window_starts(length, side, step) == expected


@torch.no_grad()
def test_an_image_of_a_padded_batch_has_its_own_maps():
    model = build('segformer').eval()
    image = torch.rand(1, 3, 64, 64)
    batch = F.pad(image, (0, 32, 0, 32), value=0.5)
    scores = model.scores(batch, torch.tensor([[64, 64]]))
    # At the border the resizing of the coarsest map reads a cell of the padding.
    torch.testing.assert_close(scores[..., :12, :12], model.scores(image)[..., :12, :12])


@torch.no_grad()
def test_windows_of_a_padded_batch_ignore_its_padding():
    """Each window has the scores of its part of the image, whatever the padding holds."""
    model = build('segformer').eval()
    batch = torch.rand(2, 3, 100, 70)
    valid = torch.tensor([[40, 70], [100, 30]])  # windows wholly in the padding, and in part
    other = batch.clone()
    other[0, :, 40:] = 9
    other[1, :, :, 30:] = 9
    model.window = 64, 48
    found = model(batch, valid)
    torch.testing.assert_close(model(other, valid), found)
    total, count = torch.zeros_like(found), torch.zeros_like(found)
    for top in (0, 36):
        for left in (0, 6):
            part = ..., slice(top, top + 64), slice(left, left + 64)
            sizes = [[max(min(h - top, 64), 0), max(min(w - left, 64), 0)] for h, w in valid]
            scores = model.scores(batch[part], torch.tensor(sizes))
            total[part] += F.interpolate(scores, (64, 64), mode='bilinear')
            count[part] += 1
    torch.testing.assert_close(found, total / count)
    with pytest.raises(ValueError, match=r'from 0 to those of the batch, \(100, 70\)'):
        model(batch, valid + 100)


def test_one_class_has_nothing_to_be_told_from():
    with pytest.raises(ValueError, match='at least 2, got 1: .*Count the background as a class'):
        segformer('pcpvt_nano', num_classes=1)
    with pytest.raises(ValueError, match='at least 2, got 1'):
        build('upernet').replace_classifiers(1)


def test_labels_without_a_class():
    model = build('upernet')
    image = torch.rand(2, 3, 32, 32)
    loss = model.loss(image, torch.full((2, 32, 32), IGNORED))
    loss.backward()
    assert loss == 0 and not any(parameter.grad.any() for parameter in model.parameters())
    with pytest.raises(ValueError, match='ignore_index=4 is the label of one of the 5 classes'):
        model.loss(image, torch.zeros(2, 32, 32, dtype=torch.long), ignore_index=4)
    model.replace_classifiers(256)
    with pytest.raises(ValueError, match='ignore_index=255 is the label of one of the 256'):
        model.loss(image, torch.zeros(2, 32, 32, dtype=torch.long))


@pytest.mark.parametrize('name', BUILDERS)
def test_bands_need_their_means_and_others_are_refused(name):
    body = dict(arch='pcpvt_nano', in_channels=4)
    with pytest.raises(ValueError, match=r'image_mean must have .* 4 channels .* got 3: \(0.485'):
        build(name, body)
    with pytest.raises(ValueError, match='image_std must have a value for each of the 4 channels'):
        segformer(body, num_classes=2, image_mean=[0.5] * 4)
    model = segformer(body, num_classes=2, image_mean=[0.5] * 4, image_std=[0.2] * 4).eval()
    assert model(torch.rand(1, 4, 32, 32)).shape == (1, 2, 32, 32)
    for window in (None, (16, 12)):
        rgb = build(name)
        rgb.window = window
        with pytest.raises(ValueError, match='must have in_channels=3 channels, got 1'):
            rgb.eval()(torch.rand(1, 1, 32, 32))


def test_classifiers_are_replaced_and_the_rest_stays():
    model = build('upernet')
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.replace_classifiers(3)
    assert model.num_classes == 3
    after = model.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        f'{head}.conv_seg.{part}'
        for head in ('decode_head', 'auxiliary_head')
        for part in ('weight', 'bias')
        if not (part == 'bias' and before[f'{head}.conv_seg.bias'].shape == (3,))
    }


def test_new_classifiers_have_the_precision_of_the_model():
    model = build('upernet').bfloat16()
    model.replace_classifiers(3)
    model.loss(torch.rand(2, 3, 64, 64).bfloat16(), torch.zeros(2, 64, 64).long()).backward()


def test_torch_alone_is_needed():
    code = """
import sys
import cpvt_pyramid.tasks.segmentors, cpvt_pyramid.tasks.trained
assert not {'torchvision', 'mmengine', 'numpy.testing', 'timm', 'cv2', 'PIL'} & sys.modules.keys()
"""
    subprocess.run([sys.executable, '-c', code], check=True)
