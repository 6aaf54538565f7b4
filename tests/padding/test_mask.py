"""Masks of padded batches: their memory, means, and the sizes that they are made from."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from cpvt_pyramid.padding import mask
from cpvt_pyramid.padding.mask import BatchPadding, Padding, mean_inside
from cpvt_pyramid.position import LearnedPosition
from tests.models.ours import BACKBONES, VALID, classifier, images, outputs, pcpvt


@pytest.mark.parametrize('name', BACKBONES)
def test_masks_are_freed_with_their_batch(name, monkeypatch):
    """By reference counting: on a GPU, those of many batches would wait for the collector."""
    made = []
    init = Padding.__init__

    def noted(padding: Padding, *args: Tensor) -> None:
        init(padding, *args)
        made.append(weakref.ref(padding))

    monkeypatch.setattr(Padding, '__init__', noted)
    model = BACKBONES[name]()
    gc.collect()
    gc.disable()
    try:
        maps = model(images(), VALID)
        sum(x.square().mean() for x in maps).backward()
        assert len(made) > 1
        assert not [ref for ref in made if ref() is not None]
    finally:
        gc.enable()


def test_the_padding_of_each_map_is_made_once():
    batch = BatchPadding(torch.empty(2, 1, 100, 75), VALID)
    for finer, stride in ((1, 4), (4, 8), (4, 32), (8, 32), (32, 32)):
        padding = batch.at(stride, finer)
        height, width = padding.sizes()
        assert height.tolist() == [-(-side // stride) for side in VALID[:, 0].tolist()]
        assert width.tolist() == [-(-side // stride) for side in VALID[:, 1].tolist()]
        assert batch.at(stride, finer) is padding
    assert batch.at(32, 4) is batch.at(32, 8)
    none = BatchPadding(torch.empty(2, 1, 100, 75), None)
    assert none.at(1) is none.at(4) is none.at(4, 4) is None


@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16, torch.float])
def test_means_of_large_maps_in_any_precision(dtype):
    """Their sum is more than half precision holds."""
    x = torch.full((2, 96, 96, 3), 20, dtype=dtype)
    padding = Padding.of_batch(torch.empty(2, 1, 96, 96), torch.tensor([(96, 96), (80, 96)]))
    for found in (mean_inside(x, padding), mean_inside(x, None)):
        assert found.dtype == dtype
        torch.testing.assert_close(found, x[:, 0, 0])


SIZES = {
    '(width, height)': [[75, 100], [61, 75]],
    'higher than the batch': [[101, 40], [61, 75]],
    'wider than the batch': [[100, 40], [61, 76]],
    'negative': [[100, 40], [-1, 75]],
    'NaN': [[100, 40], [float('nan'), 75]],
    'infinite': [[float('inf'), 40], [61, 75]],
}


@pytest.mark.parametrize('build', [pcpvt, classifier])
@pytest.mark.parametrize('wrong', SIZES)
def test_sizes_that_are_not_in_the_batch_are_refused(build, wrong):
    model = build()
    valid = torch.tensor(SIZES[wrong])
    with pytest.raises(ValueError, match=r'of the batch, \(100, 75\), got \(.*\) for image [01]$'):
        model(images(), valid)


@pytest.mark.parametrize('kind', [torch.bool, torch.complex64])
def test_sizes_are_numbers(kind):
    with pytest.raises(ValueError, match=f'valid must hold numbers of pixels, got .* {kind}'):
        pcpvt()(images(), VALID.to(kind))


@pytest.mark.parametrize('kind', [torch.uint8, torch.int32, torch.half, torch.double])
@torch.no_grad()
def test_sizes_of_any_type_are_the_same(kind):
    model = pcpvt(out_indices=(0,)).eval()
    (expected,) = model(images(), VALID)
    (found,) = model(images(), VALID.to(kind))
    assert torch.equal(found, expected)


def test_the_largest_and_the_smallest_sizes():
    model = pcpvt().eval()
    with torch.no_grad():
        maps = model(images(), torch.tensor([(100, 75), (0, 0)]))
        alone = model(images()[:1])
    for joint, single in zip(maps, alone):
        torch.testing.assert_close(joint[:1], single)
        assert not joint[1].any()


def refuse(*_: object) -> None:
    raise AssertionError('a value was read')


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')
@pytest.mark.filterwarnings('ignore:There is a performance drop')
@pytest.mark.parametrize('where', ['on another device', 'traced', 'compiled', 'vmap'])
@torch.no_grad()
def test_sizes_are_read_only_where_that_waits_for_nothing(where, monkeypatch):
    """A tensor of another device waits for it, and a graph would keep the values."""
    model = pcpvt(out_indices=(0,)).eval()
    if where == 'vmap':
        each = torch.func.vmap(lambda image, size: model(image[None], size[None])[0][0])
        torch.testing.assert_close(each(images(), VALID), model(images(), VALID)[0])
        return
    if where == 'on another device':
        model = model.to('meta')
        assert model(images().to('meta'), VALID.to('meta'))[0].shape == (2, 32, 25, 19)
        return
    (expected,) = model(images(), VALID.flip(0))
    if where == 'traced':
        graph = torch.jit.trace(model, (images(), VALID), check_trace=False)
        monkeypatch.setattr(mask, 'readable_sizes', refuse)  # in the graph it is not called
    else:
        torch._dynamo.reset()
        graph = torch.compile(model, backend='eager', fullgraph=True)
        graph(images(), VALID)
    torch.testing.assert_close(graph(images(), VALID.flip(0))[0], expected)


@pytest.mark.parametrize('shape', [(3, 40, 64), (40, 64), (1, 2, 3, 40, 64)], ids=str)
@pytest.mark.parametrize('build', [pcpvt, classifier])
@pytest.mark.parametrize('valid', [None, torch.tensor([[40, 64]])], ids=['', 'valid'])
def test_an_image_without_a_batch_is_said_to_be_one(build, shape, valid):
    with pytest.raises(ValueError, match=r'must be a batch \(B, 3, H, W\), got .* shape \('):
        build()(torch.rand(shape), valid)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.half])
@pytest.mark.parametrize('build', [pcpvt, partial(classifier, pretrain_img_size=40)])
@torch.no_grad()
def test_a_learned_position_under_autocast_is_that_of_the_image_alone(build, dtype):
    """The table is interpolated in float32, as `F.interpolate` does."""
    model = build(position='learned').eval()
    seen = []
    for module in model.modules():
        if isinstance(module, LearnedPosition):
            nn.init.normal_(module.table)
            module.register_forward_hook(lambda module, args, out: seen.append(out - args[0]))
    with torch.autocast('cpu', dtype):
        outputs(model, images(), VALID)
        together = seen[0]
        for i, (height, width) in enumerate(VALID):
            seen.clear()
            outputs(model, images()[i : i + 1, :, :height, :width])
            alone = seen[0]
            joint = together[i : i + 1, : alone.shape[1], : alone.shape[2]]
            torch.testing.assert_close(joint, alone, rtol=1e-5, atol=1e-2)
    assert together.dtype == alone.dtype == torch.float32
