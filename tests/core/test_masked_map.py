"""Each rule of `MaskedMap` against the same operation on each image's own cells alone."""

import copy
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cpvt_pyramid import masked_map
from cpvt_pyramid.masked_map import ELEMENT_WISE, Cells, MaskedMap, Region, masked, padded_batch

FEW = settings(max_examples=40, deadline=None)
SIZES = ((50, 70), (97, 41), (64, 96), (7, 3))


def map_of(
    sizes: Sequence[tuple[int, int]] = SIZES,
    stride: int = 4,
    channels: int = 4,
    size: tuple[int, int] = (112, 96),
) -> MaskedMap:
    """A map with large values in the padding, of which nothing may be seen."""
    region = Region(torch.tensor(sizes), size)
    x = torch.randn(len(sizes), channels, *region.map_size(stride))
    x = x.masked_fill(region.outside(stride), 1e4)
    return masked(x.requires_grad_(), Cells(region, stride))


def crop(x: Tensor, i: int, size: tuple[int, int], stride: int) -> Tensor:
    """The cells of an image in a plain map."""
    height, width = (-(-side // stride) for side in size)
    return x.as_subclass(Tensor)[i : i + 1, :, :height, :width]


def assert_as_alone(
    f: Callable[[Tensor], Tensor], x: MaskedMap, sizes: Sequence = SIZES, **tolerance: float
) -> Tensor:
    """The result, inside each image, and its gradient are those of the image's cells alone."""
    together = f(x)
    assert isinstance(together, MaskedMap) and together.isfinite().all()
    cells = together.cells
    weight = torch.rand(together.shape)
    total = 0
    pairs = []
    for i, size in enumerate(sizes):
        if 0 in size:
            continue
        own = crop(x, i, size, x.cells.stride).contiguous()
        alone = f(own)
        ours = together.as_subclass(Tensor)[i : i + 1]
        if not cells.pooled:
            ours = crop(ours, 0, size, cells.stride)
        torch.testing.assert_close(ours, alone, **tolerance)
        pairs.append((alone * weight[i : i + 1, :, : ours.shape[2], : ours.shape[3]]).sum())
        total = total + (ours * weight[i : i + 1, :, : ours.shape[2], : ours.shape[3]]).sum()
    expected = torch.autograd.grad(sum(pairs), x, retain_graph=True)[0]
    gradient = torch.autograd.grad(total, x)[0]
    torch.testing.assert_close(gradient, expected, **tolerance)
    assert not gradient.as_subclass(Tensor)[
        x.cells.region.outside(x.cells.stride).expand_as(x)
    ].any()
    return together


sides = st.integers(1, 9)


@FEW
@given(
    kernel=st.sampled_from([(1, 1), (3, 3), (5, 5), (3, 1), (1, 7)]),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    heights=st.lists(sides, min_size=2, max_size=2),
    widths=st.lists(sides, min_size=2, max_size=2),
    unit=st.sampled_from([1, 4, 6]),
    seed=st.integers(0, 99),
)
def test_convolution(kernel, stride, dilation, heights, widths, unit, seed):
    torch.manual_seed(seed)
    sizes = [(h * unit, w * unit) for h, w in zip(heights, widths)]
    padding = tuple(dilation * (k // 2) for k in kernel)
    conv = nn.Conv2d(4, 3, kernel, stride, padding, dilation)
    x = map_of(sizes, unit, size=(10 * unit, 9 * unit))
    y = assert_as_alone(conv, x, sizes, rtol=1e-4, atol=1e-4)
    assert y.cells == Cells(x.cells.region, unit * stride)


def name_of(value: object) -> str:
    """The same in every process, which the address of a function is not."""
    return getattr(value, '__name__', str(value)[:40]).strip('<>')


@pytest.mark.parametrize(
    'conv, stride',
    [
        (nn.Conv2d(4, 3, 2, 2), 8),
        (nn.Conv2d(4, 3, 3, padding='same'), 4),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), 4),
        (nn.ConvTranspose2d(4, 3, 2, 2), 2),
        (nn.AvgPool2d(2), 8),
        (nn.AvgPool2d(3, 2, 1), 8),
        (nn.AvgPool2d(3, 1, 1, count_include_pad=False), 4),
        (nn.AvgPool2d(3, 1, 1, divisor_override=2), 4),
        (nn.MaxPool2d(2), 8),
        (nn.MaxPool2d(2, ceil_mode=True), 8),
        (nn.MaxPool2d(1, 2), 8),
        (nn.MaxPool2d(3, 2, 1), 8),
        (nn.GroupNorm(2, 4), 4),
        (nn.GroupNorm(4, 4, affine=False), 4),
        (nn.InstanceNorm2d(4, affine=True), 4),
        (nn.InstanceNorm2d(4, track_running_stats=True).eval(), 4),
        (nn.BatchNorm2d(4).eval(), 4),
        (nn.Upsample(scale_factor=2), 2),
        (nn.Upsample(scale_factor=4, mode='bilinear'), 1),
        (nn.Upsample(scale_factor=0.5, mode='bilinear'), 8),
        (nn.Upsample(scale_factor=0.5), 8),
        (nn.AdaptiveAvgPool2d(1), None),
        (nn.AdaptiveAvgPool2d((1, 1)), None),
        (nn.AdaptiveAvgPool2d(3), None),
        (nn.AdaptiveAvgPool2d(6), None),
        (nn.AdaptiveMaxPool2d(1), None),
        (nn.AdaptiveMaxPool2d(3), None),
        (nn.Softmax(dim=1), 4),
        (nn.Softmax2d(), 4),
        (nn.GELU(), 4),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, 1, 1)), 4),
        (lambda x: x.mean((2, 3), keepdim=True), None),
        (lambda x: x - x.mean(1, keepdim=True), 4),
        (lambda x: F.normalize(x, dim=1), 4),
        (lambda x: 2 - x / 3 + 1, 4),
        (lambda x: x * x.mean((-2, -1), True).sigmoid(), 4),
        (lambda x: x * F.adaptive_avg_pool2d(x, 1).sigmoid() + x.detach(), 4),
        (lambda x: torch.cat([x, x.relu()], dim=1)[:, 2:6], 4),
        (lambda x: torch.cat([part * 2 for part in x.split(2, dim=1)], 1).chunk(2, 1)[1], 4),
    ],
    ids=name_of,
)
def test_operation(conv, stride):
    sizes = ((48, 72), (96, 40), (64, 96), (8, 16), (0, 0))  # whole cells at each of the strides
    x = map_of(sizes, size=(96, 96))
    y = assert_as_alone(conv, x, sizes, rtol=1e-4, atol=1e-4)
    if stride:
        assert y.cells == Cells(x.cells.region, stride)
    else:
        assert y.cells == Cells(x.cells.region, 4, pooled=True)


@FEW
@given(
    bins=st.integers(1, 7),
    heights=st.lists(sides, min_size=2, max_size=2),
    widths=st.lists(sides, min_size=2, max_size=2),
    align_corners=st.booleans(),
)
def test_pooled_pyramid(bins, heights, widths, align_corners):
    """As in PSPNet and UPerNet: to bins and back to the size of the map."""

    def pyramid(x: Tensor) -> Tensor:
        pooled = conv(F.adaptive_avg_pool2d(x, bins)).relu()
        return F.interpolate(pooled, x.shape[2:], mode='bilinear', align_corners=align_corners)

    sizes = list(zip(heights, widths))
    conv = nn.Conv2d(4, 4, 1)
    x = map_of(sizes, 1, size=(10, 12))
    y = assert_as_alone(pyramid, x, sizes, rtol=1e-4, atol=1e-4)
    assert y.cells == x.cells
    assert_as_alone(lambda x: F.adaptive_max_pool2d(x, bins), x, sizes)


@FEW
@given(
    heights=st.lists(st.integers(1, 40), min_size=2, max_size=2),
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=2),
    mode=st.sampled_from(['nearest', 'bilinear']),
)
def test_resizing_does_not_depend_on_the_batch(heights, widths, mode):
    """Images that end in the middle of a cell, alone in their own multiple of 8 pixels."""

    def resized(sizes: list, x: Tensor) -> Tensor:
        size = [-(-max(side) // 8) * 8 for side in zip(*sizes)]
        region = Region(torch.tensor(sizes), size)
        height, width = region.map_size(8)
        x = masked(x[: len(sizes), :, :height, :width].clone(), Cells(region, 8))
        return F.interpolate(x, size=region.map_size(2), mode=mode)

    sizes = list(zip(heights, widths))
    x = torch.randn(2, 3, 5, 5)
    one, two = resized(sizes[:1], x), resized(sizes, x)
    assert one.cells.stride == two.cells.stride == 2
    torch.testing.assert_close(crop(one, 0, sizes[0], 2), crop(two, 0, sizes[0], 2))


@FEW
@given(side=st.integers(2, 30), valid=st.integers(1, 30))
def test_nearest_upsampling_to_odd_sizes(side, valid):
    """An FPN's: from ceil(n / 2) cells to n."""
    assume(valid <= side)
    region = Region(torch.tensor([[valid, valid]]), (side, side))
    x = torch.arange(float((side + 1) // 2)).repeat(1, 1, (side + 1) // 2, 1)
    x = masked(x, Cells(region, 2))
    y = F.interpolate(x, size=(side, side))
    assert y.cells == Cells(region, 1)
    assert y[0, 0, 0, :valid].tolist() == [i // 2 for i in range(valid)]


def square(x: Tensor) -> Tensor:
    region = Region(torch.tensor(SIZES), (96, 96))
    return masked(x[..., :24, :24].clone(), Cells(region, 4))


@pytest.mark.parametrize(
    'f',
    [
        nn.Conv2d(4, 3, 3),
        nn.Conv2d(4, 3, 3, padding=1, padding_mode='reflect'),
        nn.Conv2d(4, 3, 2, padding='same'),
        nn.Conv2d(4, 3, 3, (1, 2), 1),
        nn.Conv2d(4, 3, 4, 2, 1),
        nn.ConvTranspose2d(4, 3, 3, 2),
        nn.ConvTranspose2d(4, 3, 8, 8),
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(3, 2, 1, return_indices=True),
        nn.AvgPool2d(3, 2),
        nn.Upsample(scale_factor=2, mode='bicubic'),
        nn.Upsample(scale_factor=2, mode='bilinear', align_corners=True),
        nn.Upsample(scale_factor=1.5),
        nn.Upsample((10, 10)),
        nn.Softmax(dim=3),
        lambda x: x.flatten(2),
        lambda x: x.permute(0, 2, 3, 1),
        lambda x: x.mean(),
        lambda x: x.mean(1),
        lambda x: x.sum((2, 3)),
        lambda x: x[0],
        lambda x: x[:, :, 1:],
        lambda x: x[:1],
        lambda x: x.new_zeros(4, 3, 28, 24),
        lambda x: x + torch.zeros(4, 4, 4, 28, 24),
        lambda x: x + map_of(),  # of another batch
        lambda x: F.adaptive_avg_pool2d(x, (None, 2)),
        lambda x: F.adaptive_avg_pool2d(x, (14, 24)),
        lambda x: F.adaptive_max_pool2d(x, (5, 5)),
        lambda x: F.conv2d(F.adaptive_avg_pool2d(x, 3), torch.ones(1, 4, 3, 3), padding=1),
        lambda x: F.interpolate(F.adaptive_avg_pool2d(x, 2), (5, 5), mode='bilinear'),
        lambda x: (lambda y: F.adaptive_avg_pool2d(y, 6) + F.avg_pool2d(y, 4))(square(x)),
        lambda x: F.adaptive_avg_pool2d(F.avg_pool2d(x, 2), 3) + F.adaptive_avg_pool2d(x, 3),
        lambda x: torch.cat([x, x], dim=2),
        lambda x: torch.stack([x]),
        lambda x: F.unfold(x, 2),
    ],
    ids=name_of,
)
def test_other_operations_give_plain_tensors(f):
    y = f(map_of())
    assert type(y[0] if isinstance(y, tuple) else y) is Tensor


def test_adaptive_pooling_to_the_size_of_a_coarser_map():
    """As BFP brings finer levels to one size: cells must stay where they are."""
    sizes = ((48, 72), (96, 40), (64, 96))
    x = map_of(sizes, size=(96, 96))
    for f in (F.adaptive_max_pool2d, F.adaptive_avg_pool2d):
        y = assert_as_alone(lambda x, f=f: f(x, (x.shape[2] // 2, x.shape[3] // 2)), x, sizes)
        assert y.cells == Cells(x.cells.region, 8)


def test_where_nothing_is_known_functions_are_pytorchs_own():
    x = map_of()
    plain = x.detach().as_subclass(Tensor)
    for f in (nn.MaxPool2d(3, 2), nn.AvgPool2d(3, 2), nn.Upsample(scale_factor=1.5)):
        assert torch.equal(f(x), f(plain))
    rois = masked(torch.randn(7, 4, 5, 5), x.cells)  # not a map of these cells
    assert type(rois) is Tensor


def test_in_place():
    x = map_of().detach()
    y = x.relu_()
    assert y is x and x.cells is not None
    x += 1
    x.mul_(2).clamp_(max=5)
    assert type(x) is MaskedMap and x.cells is not None
    x += map_of()  # of another batch
    assert type(F.relu(x)) is Tensor
    plain = torch.randn(x.shape)
    plain += map_of()
    assert type(plain) is Tensor


def test_names_of_element_wise_functions():
    assert all(masked_map.named([name]) for name in ELEMENT_WISE)


@pytest.mark.parametrize('autocast', [False, True])
def test_bfloat16(autocast):
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(3)
    )
    x = map_of().detach()
    expected = net(x)
    if autocast:
        with torch.autocast('cpu', torch.bfloat16):
            y = net(x)
            plain = net(x.as_subclass(Tensor))
    else:
        y, plain = net.bfloat16()(x.bfloat16()), net(x.as_subclass(Tensor).bfloat16())
    assert y.dtype == plain.dtype
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)


def test_copies_and_files():
    x = map_of().detach()
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert torch.equal(y.as_subclass(Tensor), x.as_subclass(Tensor))
        assert type(F.conv2d(y, torch.ones(1, 4, 1, 1))) is MaskedMap
    assert 'MaskedMap' in repr(x) and x.numpy().shape == x.shape


def test_a_batch_that_moves_to_another_device_keeps_its_sizes():
    """As Lightning moves what a collate function makes. Its maps still belong together."""
    x, y = map_of(), map_of()
    y.cells = x.cells
    x, y = x.to('meta'), y.to('meta')
    assert x.cells.region.valid.is_meta and type(x + y) is MaskedMap


def test_a_batch_must_be_one():
    with pytest.raises(ValueError, match=r'images must be a batch .* got \(3, 64, 64\)'):
        padded_batch(torch.randn(3, 64, 64), torch.tensor([[30, 40]]))


def test_an_inference_tensor_s_region_serves_gradients_too():
    with torch.inference_mode():
        region = Region(torch.tensor(SIZES), (112, 96))
        region.outside(4)
    x = masked(torch.randn(4, 4, 28, 24).requires_grad_(), Cells(region, 4))
    nn.Conv2d(4, 4, 3, padding=1)(x).sum().backward()


def test_the_region_dies_with_the_maps():
    x = map_of()
    region = weakref.ref(x.cells.region)
    y = nn.Conv2d(4, 4, 3, padding=1)(x).relu()
    y.sum().backward()
    assert region() is not None
    del x, y
    assert region() is None


def neck(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Upsample(scale_factor=2, mode='bilinear'),
        nn.Conv2d(8, 4, 3, padding=1),
    )


class Case:
    """A neck of its own and a map of images of these sizes."""

    def __init__(self, sizes: Sequence = SIZES) -> None:
        self.net = neck().eval()
        self.x = map_of(sizes)

    def output(self, run: Callable = lambda net, x: net(x)) -> Tensor:
        return run(self.net, self.x).square().sum()

    def gradients(self) -> list[Tensor]:
        return [self.x.grad, *(parameter.grad for parameter in self.net.parameters())]


def assert_equal(ours: list, theirs: list) -> None:
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(
            a.as_subclass(Tensor), b.as_subclass(Tensor), rtol=1e-5, atol=1e-4
        )


OTHER = ((112, 96), (12, 9), (1, 50), (64, 64))


def in_threads(*functions: Callable) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize('reentrant', [False, True])
def test_activation_checkpointing(reentrant):
    """Recomputation sees the region of its own batch, after other batches and in any thread."""

    def run(net: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(net, x, use_reentrant=reentrant)

    plain, other, case = Case(), Case(OTHER), Case()
    plain.output().backward()
    output = case.output(run)
    other.output(run)
    output.backward()
    assert_equal(case.gradients(), plain.gradients())

    elsewhere = Case()
    output = elsewhere.output(run)
    in_threads(output.backward)
    assert_equal(elsewhere.gradients(), plain.gradients())


def test_two_batches_in_two_threads():
    sizes = (SIZES, OTHER)
    plain, cases = [Case(size) for size in sizes], [Case(size) for size in sizes]
    for case in plain:
        case.output().backward()
    barrier = threading.Barrier(2)

    def work(case: Case) -> None:
        def run(net: nn.Module, x: Tensor) -> Tensor:
            for part in (net[:3], net[3:6], net[6:]):
                barrier.wait()  # the two take turns
                x = checkpoint(part, x, use_reentrant=False)
            return x

        case.output(run).backward()

    in_threads(*(lambda case=case: work(case) for case in cases))
    for case, expected in zip(cases, plain):
        assert_equal(case.gradients(), expected.gradients())


@pytest.mark.parametrize('training', [False, True])
def test_compiled_neck(training):
    """On padded batches it runs in eager mode, and gives the eager result."""
    torch._dynamo.reset()
    net = neck().train(training)
    compiled = torch.compile(copy.deepcopy(net), backend='aot_eager')
    for sizes in (SIZES, OTHER):
        x = map_of(sizes)
        assert_equal([compiled(x)], [net(x)])
        ours, theirs = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, net))
        assert_equal([ours], [theirs])
    plain = x.detach().as_subclass(Tensor)
    out = compiled(plain)
    assert type(out) is Tensor
    assert_equal([out], [net(plain)])
