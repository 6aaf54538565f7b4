"""Each rule of `MaskedMap` against the same operation on each image's own cells alone."""

import copy
import io
import multiprocessing.reduction
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from cpvt_pyramid import masked_map, regions
from cpvt_pyramid.masked_map import cells_of, masked, on_region_loss, padded_batch
from cpvt_pyramid.regions import Extent, Region

SIZES = ((50, 70), (97, 41), (64, 96), (7, 3))
MAP = (28, 24)  # a batch of 112 x 96 pixels at stride 4


def map_of(sizes: Sequence[tuple[int, int]] = SIZES, dtype: torch.dtype = torch.float32) -> Tensor:
    """A map with large values in the padding, of which nothing may be seen."""
    extent = Region(torch.tensor(sizes), (112, 96)).at_stride(4)
    x = torch.randn(len(sizes), 4, *MAP, dtype=dtype)
    return masked(x.masked_fill(extent.outside(MAP), 1e4).requires_grad_(), extent)


def own(x: Tensor, extent: Extent, i: int) -> Tensor:
    """The cells of an image in a map."""
    rows, columns = (int(side[i]) for side in extent.sides)
    return x.as_subclass(Tensor)[i : i + 1, :, :rows, :columns]


def assert_as_alone(f: Callable[[Tensor], Tensor], x: Tensor, **tolerance: float) -> Tensor:
    """The result, inside each image, and its gradient are those of the image's cells alone."""
    together, extent = f(x), x.extent
    assert cells_of(together) and together.as_subclass(Tensor).isfinite().all()
    totals = [0, 0]
    for i in range(len(x)):
        alone = own(x, extent, i).contiguous()
        if alone.numel():
            pair = own(together, together.extent, i), f(alone)
            torch.testing.assert_close(*pair, **tolerance)
            weight = torch.rand_like(pair[0])
            totals = [total + (y * weight).sum() for total, y in zip(totals, pair)]
    ours, theirs = (
        torch.autograd.grad(total, x, retain_graph=True)[0].as_subclass(Tensor) for total in totals
    )
    torch.testing.assert_close(ours, theirs, **tolerance)
    return together


CEIL = lambda x: nn.MaxPool2d(3, 2, ceil_mode=True)(x)  # noqa: E731


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    'f',
    [
        nn.Conv2d(4, 3, 2, padding='same'),
        nn.Conv2d(4, 3, 3, (1, 2), 1, 2),
        nn.ConvTranspose2d(4, 3, 3, 2, 1, 1),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        lambda x: torch.max_pool2d(x, 2),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.BatchNorm2d(4).eval(),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode='bilinear', align_corners=True),
        nn.Upsample(scale_factor=0.5, mode='bilinear'),
        nn.Upsample(scale_factor=1.5, mode='bicubic'),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Upsample(scale_factor=1.2, mode='bilinear')),
        nn.AdaptiveAvgPool2d((None, 2)),
        nn.AdaptiveAvgPool2d((5, 3)),
        lambda x: F.adaptive_max_pool2d(x + (x.round() - x).detach(), 3),  # equal maxima
        nn.Softmax2d(),
        nn.ZeroPad2d((0, 1, 2, 0)),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, 1, 1)),
        lambda x: F.adaptive_max_pool2d(x, (x.shape[2] // 2, x.size(3) // 2)),
        lambda x: F.adaptive_avg_pool2d(x, CEIL(x).shape[2:]),
        lambda x: F.interpolate(nn.MaxPool2d(2, ceil_mode=True)(x), x.shape[2:]) + x,
        lambda x: F.interpolate(CEIL(x), x.shape[2:], mode='bilinear') + x,
        lambda x: F.interpolate(nn.AdaptiveAvgPool2d(2)(x), x.shape[2:], mode='bilinear') * x,
        lambda x: x.mean((2, 3), keepdim=True) + x.amax((2, 3), keepdim=True) - x.amin(3, True),
        lambda x: x * x.mean((2, 3)).softmax(1)[:, :, None, None],
        lambda x: x * x.mean(2, keepdim=True) + x.sum(3, keepdim=True),
        lambda x: (x * x).log() + x.abs().sqrt(),
        lambda x: x[:, 1:2] + x[:, :3:2].mean(1, keepdim=True),
        lambda x: x[..., : CEIL(x).shape[2], : CEIL(x).shape[3]] + CEIL(x),
        lambda x: torch.cat(tensors=[x, x.relu()], dim=1)[:, 2:6],
        lambda x: torch.concatenate([y * 2 for y in x.split(2, dim=1)], axis=1).chunk(2, 1)[1],
        lambda x: torch.nan_to_num(x) + torch.zeros_like(x) + torch.clone(input=x),
    ],
)
def test_operation(f):
    f = f.double() if isinstance(f, nn.Module) else f
    x = map_of((*SIZES[:3], (16, 20), (0, 0)), torch.float64)
    assert_as_alone(f, x, rtol=1e-9, atol=1e-9)


def test_poles_in_the_padding_reach_no_weight():
    """Also where they come from a map without gradient."""
    x, norm = map_of().detach(), nn.BatchNorm2d(4).eval()
    x = torch.where(x > 1e3, -70, x)  # only the padding
    norm(x.digamma()).sum(1).nan_to_num().sum().backward()
    y = own(x, x.extent, 0)
    assert y.digamma().isfinite().all() and norm.weight.grad.isfinite().all()


def square(x: Tensor) -> Tensor:
    return padded_batch(x.as_subclass(Tensor)[..., :24, :24].clone(), torch.tensor([[9, 9]] * 4))


class OwnConv(torch.autograd.Function):
    """Its backward pass reads what the forward pass of a rule would have cleared."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return F.conv2d(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:, :1], (ctx.saved_tensors[0] * gradient).sum().reshape(1, 1, 1, 1)


def view_is_filled(x: Tensor) -> Tensor:
    x[:, :, 0].fill_(2)
    return x


@pytest.mark.parametrize(
    'f',
    [
        nn.Conv2d(4, 3, 3, padding=1, padding_mode='reflect'),
        nn.MaxPool2d(3, 2, 1, return_indices=True),
        nn.Upsample(scale_factor=4.6),  # 25 rows to 114, 24 to 110
        lambda x: x.permute(0, 2, 3, 1),
        lambda x: x.mean(1),
        lambda x: x[:, :, :5],
        lambda x: x[..., ::2, 1::2],
        lambda x: x + torch.zeros(4, 4, 4, *MAP),
        lambda x: x + torch.zeros(MAP),  # for the image alone it would be another
        lambda x: x + map_of(OTHER),  # of another batch
        lambda x: F.interpolate(F.adaptive_avg_pool2d(x, 2), (5, 5), mode='bilinear'),
        lambda x: (lambda y: F.adaptive_avg_pool2d(y, 24) + y)(square(x)),
        lambda x: torch.cat([x, x], dim=2),
        lambda x: F.unfold(x, 2),
        # Without a batch axis, images are channels.
        lambda x: F.conv2d(x.mean((2, 3))[:, :, None], torch.ones(4, 4, 1, 1)),
        # What has lost its region takes that of others.
        lambda x: x * x.mean(),
        lambda x: x * x.var((2, 3), keepdim=True),
        lambda x: x + x.roll(1, 3),
        lambda x: F.conv2d(x, torch.ones(1, 4, 1, 1) * x.sum()),
        lambda x: torch.zeros(4, 1, 1, 1).add_(x.std()) * x,
        # In place, without a rule.
        lambda x: (x * 1).copy_(map_of(OTHER)),
        lambda x: square(x).transpose_(2, 3),
        lambda x: (x * 1).cumsum_(3),
        lambda x: view_is_filled(x * 1),
        lambda x: torch.add(x.detach(), 1, out=x.detach() * 1),
        # Known only when it has run.
        lambda x: OwnConv.apply(x[:, :1], torch.ones(1, 1, 1, 1, requires_grad=True)),
    ],
)
def test_other_operations_lose_the_region(f):
    y = f(map_of())
    assert cells_of(y[0] if isinstance(y, tuple) else y) is None


def test_lost_regions_are_reported():
    x = map_of()
    with on_region_loss('warn'):
        nn.Conv2d(4, 4, 3)(x).relu()
        with pytest.warns(UserWarning, match=r'fft_fft2.*depends? on the padding'):
            torch.fft.fft2(x)
        with on_region_loss('raise'):
            with pytest.raises(RuntimeError, match='cumsum_ has no rule'):
                (x * 1).cumsum_(3)
            y = OwnConv.apply(x[:, :1], torch.ones(1, 1, 1, 1, requires_grad=True))
            with pytest.raises(RuntimeError, match='OwnConv has no rule'):
                y.relu()
    torch.fft.fft2(x)
    with pytest.raises(ValueError, match="'ignore', 'warn' or 'raise', got 'stop'"):
        on_region_loss('stop')
    with pytest.raises(ValueError, match=r'images must be a batch .* got \(3, 64, 64\)'):
        padded_batch(torch.randn(3, 64, 64), torch.tensor([[30, 40]]))


def test_hooks_keep_the_region_or_report_its_loss():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    seen = []
    conv.register_full_backward_hook(lambda module, into, out: seen.append(out[0].shape))
    masked_map.hooks_keep_regions.cache_clear()
    with on_region_loss('raise'):
        if not masked_map.hooks_keep_regions():  # torch 2.1
            with pytest.raises(RuntimeError, match='BackwardHookFunction has no rule'):
                conv(map_of())
            return
        y = assert_as_alone(conv, map_of(), rtol=1e-4, atol=1e-4)
    assert seen and cells_of(y)


def test_lengths_after_many_fusions():
    """Each fusion contains the one before it twice."""
    formula = regions.PIXELS
    for _ in range(60):
        halves = (regions.then(formula, 1, addend, 2) for addend in (0, 1))
        formula = regions.joint(*halves)
    assert regions.length(formula, 2**70 + 1) == 2**10


def test_inference_mode():
    """Tensors of inference mode do not count their changes; their region serves gradients, too."""
    with torch.inference_mode():
        x = map_of()
        y = nn.Conv2d(4, 4, 3)(x)
        assert cells_of(y) is not None
        y.cumsum_(3)
        assert cells_of(y) is None
        total = torch.zeros(4, 4, *MAP)
        total += x
        assert cells_of(total) is None
        extent = Region(torch.tensor(SIZES), (112, 96)).at_stride(4)
        extent.outside(MAP)
    x = masked(torch.randn(4, 4, *MAP).requires_grad_(), extent)
    nn.Conv2d(4, 4, 3, padding=1)(x).sum().backward()


def test_sizes_without_cells():
    pool, batch = nn.AvgPool2d(29), padded_batch(torch.ones(0, 1, 29, 40), torch.ones(0, 2))
    assert pool(batch).shape == (0, 1, 1, 1)
    with pytest.raises(RuntimeError, match='Output size is too small'):
        pool(map_of())


def test_batch_norm_in_training_has_statistics_of_the_images():
    x, ours, theirs = map_of(), nn.BatchNorm2d(4), nn.BatchNorm1d(4)
    cells = [own(x, x.extent, i).flatten(2) for i in range(len(x))]
    expected = theirs(torch.cat([x[0].T for x in cells]))
    y = ours(x)
    got = torch.cat([own(y, y.extent, i).flatten(2)[0].T for i in range(len(x))])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(list(ours.buffers()), list(theirs.buffers()))


def test_functions_of_other_subclasses_are_called():
    class Weight(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            assert not any(type(x) is masked_map.MaskedMap for x in args)
            return super().__torch_function__(function, (cls,), args, kwargs)

    x, weight = map_of(), torch.ones(1, 4, 1, 1).as_subclass(Weight)
    assert type(F.conv2d(x, weight)) is Weight


def test_tracing_bakes_no_region_in():
    net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)).eval()
    x, plain = map_of().detach(), torch.randn(4, 4, *MAP)
    for graph in (torch.jit.trace(net, x, check_trace=False), make_fx(net)(x)):
        torch.testing.assert_close(graph(plain), net(plain))


def test_names_of_functions():
    names = regions.ELEMENT_WISE + regions.WITH_POLES + regions.CASTS
    assert all(regions.named([name]) for name in names)
    kinds = {type(function).__name__ for function in regions.RULES}
    assert not kinds & {'dtype', 'module', 'type'}
    x = map_of().detach().to(torch.uint8)
    assert cells_of(F.max_pool2d(x, 3, 2, 1)) and cells_of(x > 3)


@pytest.mark.parametrize('autocast', [False, True])
def test_bfloat16(autocast):
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(3)
    )
    x = map_of().detach()
    expected = net(x)
    if not autocast:
        net, x = net.bfloat16(), x.bfloat16()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        y, plain = net(x), net(x.as_subclass(Tensor))
    assert y.dtype == plain.dtype
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)


def test_copies_and_files():
    x = map_of().detach()
    for y in (copy.deepcopy(x), pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(x))):
        assert torch.equal(y.as_subclass(Tensor), x.as_subclass(Tensor))
        assert y.extent.rows == x.extent.rows and cells_of(F.conv2d(y, torch.ones(1, 4, 1, 1)))
    file = io.BytesIO()
    torch.save({'map': x}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)['map']) is Tensor
    assert 'MaskedMap' in repr(x) and x.numpy().shape == x.shape
    with pytest.raises(RuntimeError, match='deepcopy'):
        copy.deepcopy(map_of() * 2)


def test_what_remains_of_a_batch_is_plain():
    """Once it is gone, readers that take nothing but tensors read its results from files."""
    x = map_of().detach()
    results = [x.sort(3).values, x.relu().median()]
    assert type(x.cumsum(3).relu()) is masked_map.MaskedMap
    del x
    assert type(results[0].relu()) is Tensor
    for result in results:
        found = pickle.dumps((result.cpu(), result, result.sigmoid()))
        assert b'rebuild_from_type' not in found and b'MaskedMap' not in found


def test_maps_move_together_and_their_region_dies_with_them():
    """Lightning moves what a collate function makes; the maps still belong together."""
    x = map_of()
    there = [x.to('meta'), (x * 2).to('meta')]
    assert there[0].extent.region.valid.is_meta and cells_of(there[0] + there[1])
    region = weakref.ref(x.extent.region)
    y = nn.Conv2d(4, 4, 3, padding=1)(x).relu()
    y.sum().backward()
    assert region() is not None
    del x, y, there
    assert region() is None


def neck() -> nn.Module:
    torch.manual_seed(0)
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


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(
            a.as_subclass(Tensor), b.as_subclass(Tensor), rtol=1e-5, atol=1e-4
        )


OTHER = ((112, 96), (12, 9), (1, 50), (64, 64))


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('thread', [False, True])
def test_activation_checkpointing(reentrant, thread):
    """Recomputation sees the region of its own batch, after other batches and in any thread."""
    found = []
    for call in (nn.Module.__call__, partial(checkpoint, use_reentrant=reentrant)):
        net, x = neck().eval(), map_of()
        total = call(net, x).square().sum()
        call(net, map_of(OTHER))
        if thread:
            worker = threading.Thread(target=total.backward)
            worker.start()
            worker.join()
        else:
            total.backward()
        found.append([x.grad, *(parameter.grad for parameter in net.parameters())])
    assert_equal(*found)


@pytest.mark.parametrize('training', [False, True])
def test_compiled_neck(training):
    """On padded batches it runs in eager mode, and gives the eager result."""
    net = neck().train(training)
    compiled = torch.compile(copy.deepcopy(net), backend='aot_eager')
    for x in (map_of(), map_of(OTHER)):
        ours, theirs = ([y := f(x), *torch.autograd.grad(y.sum(), x)] for f in (compiled, net))
        assert_equal(ours, theirs)
    out = compiled(plain := x.detach().as_subclass(Tensor))
    assert type(out) is Tensor
    torch.testing.assert_close(out, net(plain), rtol=1e-5, atol=1e-4)
