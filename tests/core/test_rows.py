"""One contract for every row of `ARCHS` and `COLUMNAR_ARCHS`, and for every way to build its model.

A row that is added is tested without a change of this file. What the tables have in common but
numbers is tested once: rows are made small, and equal ones are tested once.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from reference import padded
from torch import Tensor, nn

from cpvt_pyramid import ARCHS, COLUMNAR_ARCHS, CPVT, Arch, CPVTPyramid, DenseCPVT, model
from cpvt_pyramid.acceleration.accelerate import accelerate, is_accelerated, what_is_missing
from cpvt_pyramid.acceleration.attention import AttentionInParts
from cpvt_pyramid.hub import HubModel
from cpvt_pyramid.layers import convolve
from cpvt_pyramid.mm.backbone import CPVTPyramid as Backbone
from cpvt_pyramid.mm.backbone import DenseCPVT as DenseBackbone
from cpvt_pyramid.mm.valid_region import with_validity
from cpvt_pyramid.model import Block, set_checkpointing
from cpvt_pyramid.tasks.detectors import retinanet
from cpvt_pyramid.tasks.segmentors import segformer, semantic_fpn, upernet
from cpvt_pyramid.timm_models import ColumnClassifier, PyramidClassifier
from tests.models.ours import cropped, maps_and_gradients, outputs
from tests.models.ports import randomize

CHANNELS = 8  # of a head
SIZES = [(61, 40), (33, 90)]  # pixels; every patch, window and sub-sampling is padded
MORE = (3, 2)  # rows and columns of padding for all


def small(arch):
    """A row with few channels, and a block of each kind in each stage."""
    if not isinstance(arch, Arch):
        return arch._replace(dim=CHANNELS * 2, heads=2, depth=2, patch_size=8)
    heads = tuple(min(heads, 2) for heads in arch.heads)
    return arch._replace(
        dims=tuple(CHANNELS * count for count in heads),
        heads=heads,
        mlp_ratios=(2,) * len(heads),
        depths=(max(len(arch.attentions), 2),) * len(heads),
    )


PYRAMIDS = {small(arch): name for name, arch in reversed(ARCHS.items())}
COLUMNS = {small(arch): name for name, arch in reversed(COLUMNAR_ARCHS.items())}
PYRAMIDS = {name: arch for arch, name in reversed(PYRAMIDS.items())}
COLUMNS = {name: arch for arch, name in reversed(COLUMNS.items())}


class WithValidity(nn.Module):
    """A backbone of OpenMMLab, which reads the sizes of images from a channel."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, image: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        return self.backbone(with_validity(image, [tuple(size) for size in valid.tolist()]))


class Intermediate(nn.Module):
    """A classifier of timm, which returns the maps of its stages."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, image: Tensor, valid: Tensor) -> list[Tensor]:
        return self.classifier.forward_intermediates(image, intermediates_only=True, valid=valid)


class Scores(nn.Module):
    """A segmentor before it resizes its scores to the image."""

    def __init__(self, segmentor: nn.Module) -> None:
        super().__init__()
        self.segmentor = segmentor.eval()  # with the means of its batch norms

    def forward(self, image: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.segmentor.backbone(image, valid))


class Hubs(nn.Module):
    def __init__(self, hub_model: nn.Module) -> None:
        super().__init__()
        self.model = hub_model

    def forward(self, image: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        return self.model(image, valid)


# Each way to build a model of a row, whose result is called with a batch and the sizes of images.
OF_PYRAMIDS: dict[str, Callable[[object], nn.Module]] = {
    'CPVTPyramid': CPVTPyramid,
    'mm': lambda arch: WithValidity(Backbone(arch)),
    'timm': lambda arch: Intermediate(PyramidClassifier(arch, num_classes=3)),
    'hub': lambda arch: Hubs(HubModel('CPVTPyramid', arch=arch)),
    'semantic_fpn': lambda arch: Scores(semantic_fpn(dict(arch=arch), num_classes=3)),
    'upernet': lambda arch: Scores(upernet(dict(arch=arch), num_classes=3)),
    'segformer': lambda arch: Scores(segformer(dict(arch=arch), num_classes=3)),
}
OF_COLUMNS: dict[str, Callable[[object], nn.Module]] = {
    'DenseCPVT': lambda arch: DenseCPVT(arch, out_channels=8),
    'CPVT': lambda arch: CPVT(arch, num_classes=3),
    'mm': lambda arch: WithValidity(DenseBackbone(arch, out_channels=8)),
    'timm': lambda arch: Intermediate(ColumnClassifier(arch, num_classes=3)),
}
WAYS = {
    f'{name}, {way}': (build, arch)
    for rows, ways in ((PYRAMIDS, OF_PYRAMIDS), (COLUMNS, OF_COLUMNS))
    for name, arch in rows.items()
    for way, build in ways.items()
}
every_way = pytest.mark.parametrize(('build', 'arch'), WAYS.values(), ids=WAYS)
MODELS = {f'{name}': (CPVTPyramid, arch) for name, arch in PYRAMIDS.items()} | {
    name: (DenseCPVT, arch) for name, arch in COLUMNS.items()
}
every_model = pytest.mark.parametrize(('build', 'arch'), MODELS.values(), ids=MODELS)


def same_alone(build: Callable, arch: object, gradients: bool = True) -> None:
    """The outputs of images alone and in a padded batch, and what parameters learn from them."""
    built = randomize(build(arch)).double()
    images = [torch.randn(3, *size, dtype=torch.double) for size in SIZES]
    batch = padded(images, MORE).requires_grad_()
    together = outputs(built, batch, torch.tensor(SIZES))
    totals = 0
    for i, (image, size) in enumerate(zip(images, SIZES)):
        alone = outputs(built, image[None], torch.tensor([size]))
        for a, b in zip(alone, together):
            torch.testing.assert_close(cropped(b[i : i + 1], a), a)
        totals = totals + sum(x.square().sum() for x in alone)
    if not gradients:
        return
    parameters = list(built.parameters())
    options = dict(allow_unused=True, materialize_grads=True)
    of_batch = torch.autograd.grad(sum(x.square().sum() for x in together), parameters, **options)
    of_images = torch.autograd.grad(totals, parameters, **options)
    for a, b in zip(of_batch, of_images):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9 * max(1, b.abs().max().item()))


@every_way
def test_an_image_alone_and_in_a_padded_batch(build, arch):
    is_the_model = build in (CPVTPyramid, *OF_COLUMNS.values())
    with torch.set_grad_enabled(is_the_model):
        same_alone(build, arch, gradients=is_the_model)


# --- a row that breaks the promise fails --------------------------------------------------------


@contextmanager
def without_fills(cls: type) -> Iterator[None]:
    """A class that does not set the padding to zero before it reads its neighbors."""
    fill_outside = model.fill_outside

    def fill(x: Tensor, padding: object, value: float = 0) -> Tensor:
        return fill_outside(x, None, value)

    def forward(self: nn.Module, *inputs: object) -> Tensor:
        with mock.patch.object(model, 'fill_outside', fill):
            return whole(self, *inputs)

    whole = cls.forward
    with mock.patch.object(cls, 'forward', forward):
        yield


@pytest.mark.parametrize(
    ('cls', 'name'),
    [
        (model.PosCNN, 'pcpvt_small'),
        (model.ConvMLP, 'mit_b0'),
        (model.GlobalAttention, 'pvt_tiny'),
    ],
)
def test_a_row_whose_class_reads_the_padding_fails(cls, name):
    with without_fills(cls), pytest.raises(AssertionError):
        same_alone(CPVTPyramid, PYRAMIDS.get(name, small(ARCHS[name])))


class Blind(model.GlobalAttention):
    """A new attention that forgot to hide the keys of the padding."""

    @classmethod
    def describe(cls, grid, *others):
        pass


class Stem(model.OverlapPatchEmbed):
    """A new stem, of two convolutions, that forgot the padding between them."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        dim = self.proj.out_channels
        self.second = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x):
        return convolve(self.second, super().forward(x))


@pytest.mark.parametrize('parts', [dict(attention=Blind), dict(patch_embed=Stem)], ids=str)
def test_a_new_family_that_reads_the_padding_fails(parts):
    arch = small(ARCHS['pcpvt_small'])._replace(**parts)
    with pytest.raises(AssertionError):
        same_alone(CPVTPyramid, arch)


# --- what else all of them promise ---------------------------------------------------------------


@every_way
def test_a_state_dict_loads_strictly(build, arch):
    first = randomize(build(arch)).eval()
    second = build(arch).eval()
    second.load_state_dict(first.state_dict(), strict=True)
    inputs = torch.randn(1, 3, 50, 60), torch.tensor([[50, 60]])
    with torch.no_grad():
        for a, b in zip(outputs(first, *inputs), outputs(second, *inputs)):
            assert torch.equal(a, b)


@every_model
def test_accelerated_it_computes_the_same(build, arch, nothing_is_small):
    if reason := what_is_missing():
        pytest.fail(f'not accelerated: {reason}')
    plain = randomize(build(arch)).eval()
    fast = randomize(build(arch)).eval()
    fast.load_state_dict(plain.state_dict())
    fast = accelerate(fast)
    assert any(type(a) is not type(b) for a, b in zip(plain.modules(), fast.modules()))
    image = torch.randn(2, 3, 61, 90)
    for valid in (None, torch.tensor(SIZES)):
        expected = maps_and_gradients(plain, image, valid)
        found = maps_and_gradients(fast, image, valid)
        with torch.no_grad():
            inferred = outputs(fast, image, *(() if valid is None else (valid,)))
        for a, b in zip(inferred, expected[0]):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        for a, b in zip([*found[0], *found[1]], [*expected[0], *expected[1]]):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1, b.abs().max().item()))


class OfSome(model.GlobalAttention):
    """A new attention, which attends to every second key."""

    def subsample(self, x, grid):
        return super().subsample(x, grid)[:, ::2]

    @classmethod
    def describe(cls, grid, *others):
        super().describe(grid, *others)
        if grid.key_bias is not None:
            height = -(-grid.height // grid.step)
            bias = grid.key_bias.unflatten(3, (height, -1))[:, :, :, ::2]
            grid.key_bias = bias.flatten(3)


def test_a_new_attention_is_hidden_from_the_padding_and_accelerated(tmp_path, nothing_is_small):
    arch = small(ARCHS['pcpvt_small'])._replace(attention=OfSome)
    same_alone(CPVTPyramid, arch)
    plain = randomize(CPVTPyramid(arch)).eval()
    fast = accelerate(copy.deepcopy(plain))
    kinds = [type(module) for module in fast.modules() if isinstance(module, OfSome)]
    assert all(kind is not OfSome and issubclass(kind, AttentionInParts) for kind in kinds)
    image = torch.randn(2, 3, 61, 90)
    torch.save(fast, tmp_path / 'model.pt')
    again = torch.load(tmp_path / 'model.pt', weights_only=False)
    with torch.no_grad():
        for valid in (None, torch.tensor(SIZES)):
            for built in (fast, again, copy.deepcopy(fast)):
                for a, b in zip(built(image, valid), plain(image, valid)):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    accelerate(fast, enable=False)
    assert [type(a) for a in fast.modules()] == [type(a) for a in plain.modules()]


def test_a_filter_says_what_is_accelerated():
    fast = CPVTPyramid('pcpvt_nano')
    accelerate(fast, filter_fn=lambda module, name: name.startswith('blocks.0.'))
    changed = {name for name, module in fast.named_modules() if is_accelerated(module)}
    assert changed and all(name.startswith('blocks.0.') for name in changed)
    accelerate(fast, enable=False)
    assert not any(is_accelerated(module) for module in fast.modules())


@every_model
def test_exported_it_computes_the_same_at_other_sizes(build, arch):
    """Of one stage, or level: symbolic sizes take seconds for each."""
    index = 1 if build is DenseCPVT else 0
    exported = randomize(build(arch, out_indices=(index,))).eval()
    dynamic = torch.export.Dim.DYNAMIC
    inputs = torch.randn(2, 3, 75, 90), torch.tensor([[60, 70], [75, 90]])
    shapes = ({0: dynamic, 2: dynamic, 3: dynamic}, {0: dynamic})
    with torch.no_grad():
        program = torch.export.export(exported, inputs, dynamic_shapes=shapes)
        graph = program.module()
        for batch, height, width in ((1, 64, 64), (3, 70, 45), (2, 33, 129)):
            image = torch.randn(batch, 3, height, width)
            valid = torch.tensor([[height, width - 5], [9, width], [height - 1, 30]])[:batch]
            for a, b in zip(graph(image, valid), exported(image, valid)):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every_model
def test_checkpointed_it_computes_the_same(build, arch):
    built = randomize(build(arch)).train()
    image = torch.randn(2, 3, 61, 90)
    expected = maps_and_gradients(built, image)
    set_checkpointing(built, True)
    with mock.patch.object(model, 'checkpoint', wraps=model.checkpoint) as checkpoint:
        found = maps_and_gradients(built, image)
    assert checkpoint.call_count == sum(isinstance(part, Block) for part in built.modules())
    for a, b in zip([*found[0], *found[1]], [*expected[0], *expected[1]]):
        assert torch.equal(a, b)


@pytest.mark.parametrize('name', PYRAMIDS)
def test_frozen_stages_do_not_train(name):
    stages = len(PYRAMIDS[name].dims)
    frozen = randomize(CPVTPyramid(PYRAMIDS[name], frozen_stages=stages - 1)).train()
    frozen(torch.randn(1, 3, 64, 64))[-1].square().sum().backward()
    for i, stage in enumerate(frozen.stages()):
        for part in stage.parts():
            assert all(module.training == (i == stages - 1) for module in part.modules())
            assert all(
                (parameter.grad is not None) == (i == stages - 1) for parameter in part.parameters()
            )


@every_model
@pytest.mark.parametrize('channels', [1, 4])
def test_weights_for_rgb_load_into_models_of_other_channels(build, arch, channels):
    """With `rgb_weights`, an image of equal bands has the features of a gray one."""
    rgb = randomize(build(arch)).eval()
    other = build(arch, in_channels=channels, rgb_weights='mean').eval()
    other.load_state_dict(rgb.state_dict())
    with pytest.raises(ValueError, match=f'in_channels={channels} channels, got 3'):
        other(torch.randn(1, 3, 40, 50))
    gray = torch.randn(1, 1, 40, 50)
    with torch.no_grad():
        for a, b in zip(rgb(gray.expand(-1, 3, -1, -1)), other(gray.expand(-1, channels, -1, -1))):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', [*PYRAMIDS, *COLUMNS])
def test_as_a_classifier_of_timm_its_head_can_be_replaced(name):
    if name in PYRAMIDS:
        classifier = PyramidClassifier(PYRAMIDS[name], num_classes=5)
    else:
        classifier = ColumnClassifier(COLUMNS[name], num_classes=5)
    image = torch.randn(2, 3, 64, 64)
    assert classifier(image).shape == (2, 5)
    classifier.reset_classifier(7)
    assert classifier(image).shape == (2, 7)
    assert classifier.get_classifier().out_features == 7


@pytest.mark.parametrize('name', PYRAMIDS)
def test_as_a_detector_of_torchvision_it_trains_and_predicts(name):
    detector = retinanet(dict(arch=PYRAMIDS[name]), num_classes=2, min_size=64, max_size=96)
    targets = [dict(boxes=torch.tensor([[4.0, 4, 40, 40]]), labels=torch.tensor([1]))] * 2
    images = [torch.rand(3, *size) for size in SIZES]
    losses = detector.train()(images, targets)
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in detector.backbone.body.parameters())
    with torch.no_grad():
        assert len(detector.eval()(images)) == 2


def test_the_rows_are_all_that_there_are():
    """Each row differs from one of those that are tested in numbers alone."""
    tested = {*PYRAMIDS.values(), *COLUMNS.values()}
    assert {small(arch) for arch in (*ARCHS.values(), *COLUMNAR_ARCHS.values())} == tested
