"""Random programs on padded batches: what claims a region is right, in values and in gradients.

A program is a list of steps, each a function of PyTorch or a layer, applied to earlier results. It
runs on a padded batch and on each image alone. Wherever the result in the batch has a region, its
cells inside each image, and the gradients that flow back from them, must be those of the image
alone. Nothing is said of results that have lost the region.
"""

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import get_testing_overrides, resolve_name
from torch.utils.checkpoint import checkpoint

from cpvt_pyramid.masked_map import cells_of, padded_batch
from cpvt_pyramid.regions import compiler_is_used

FUZZ = settings.get_profile('fuzz')
PROGRAMS = 10  # in each case

RANDOM = """
    rand dropout bernoulli multinomial normal uniform exponential rrelu poisson cauchy geometric
    gumbel fractional empty resize_ set_ native_ _sobol fake_quant fused_moving
""".split()
LEFT_OUT = """
    backward register cuda hpu xpu ipu mkldnn cudnn miopen storage data_ptr share_memory module_load
    grad sparse __setstate__ numpy __array from_file is_shared quantize rnn lstm gru dlpack names
    rename align_ refine __deepcopy__ __reduce reinforce pin_memory version detach_ tolist item
    __contains__ __len__ __iter__ unflatten requires_ unsafe stft view_as_ map_ apply_ type_ to_
    interpolate upsample
""".split()


# The functions of PyTorch that take tensors, but random ones and those not about values. A size in
# numbers that is given to `F.interpolate` is meant to be that of a map.
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    NAMED = {resolve_name(function) or '': function for function in get_testing_overrides()}
FUNCTIONS = [
    NAMED[name]
    for name in sorted(NAMED)
    if name and not any(part in name.lower() for part in (*RANDOM, *LEFT_OUT))
]
LAYERS: list[Callable[[random.Random, int], nn.Module]] = [
    lambda r, c: nn.Conv2d(
        c, r.choice([1, 4]), r.choice([1, 2, 3, (1, 3)]), r.choice([1, 2, 3]), r.choice([0, 1, 2]),
        r.choice([1, 2]),
    ),
    lambda r, c: nn.Conv2d(c, c, 3, padding=r.choice(['same', 1]), groups=c),
    lambda r, c: nn.Conv2d(c, c, 3, padding=1, padding_mode=r.choice(['reflect', 'replicate'])),
    lambda r, c: nn.ConvTranspose2d(c, 4, r.choice([2, 3]), 2, r.choice([0, 1])),
    lambda r, c: nn.MaxPool2d(r.choice([2, 3]), r.choice([1, 2]), r.choice([0, 1]),
                              ceil_mode=r.random() < 0.5),
    lambda r, c: nn.AvgPool2d(r.choice([2, 3]), r.choice([1, 2]), r.choice([0, 1]),
                              r.random() < 0.5, r.random() < 0.5),
    lambda r, c: nn.AdaptiveAvgPool2d(r.choice([1, 2, (1, 2), (None, 1)])),
    lambda r, c: nn.AdaptiveMaxPool2d(r.choice([1, 2, 3])),
    lambda r, c: nn.GroupNorm(r.choice([1, c]), c),
    lambda r, c: nn.InstanceNorm2d(c, affine=True),
    lambda r, c: nn.BatchNorm2d(c).eval(),
    lambda r, c: nn.Upsample(scale_factor=r.choice([2, 3, 0.5, 1.5, 1.2]),
                             mode=r.choice(['nearest', 'bilinear', 'bicubic', 'area'])),
    lambda r, c: nn.Upsample(scale_factor=2, mode='bilinear', align_corners=True),
    lambda r, c: nn.ReLU(inplace=r.random() < 0.5),
    lambda r, c: nn.Sequential(nn.Conv2d(c, c, 1), nn.BatchNorm2d(c).eval(), nn.SiLU()),
    lambda r, c: nn.PReLU(),
    lambda r, c: nn.ZeroPad2d(r.choice([1, (0, 1, 0, 1), (1, 0, 2, 0), -1])),
    lambda r, c: nn.ConstantPad2d(1, 0.3),
    lambda r, c: nn.PixelShuffle(2),
    lambda r, c: nn.ChannelShuffle(2),
    lambda r, c: nn.Softmax2d(),
    lambda r, c: nn.LocalResponseNorm(2),
    lambda r, c: nn.LPPool2d(2, 2),
    lambda r, c: nn.Unfold(2),
    lambda r, c: SqueezeExcitation(c, c),
    lambda r, c: OwnBackward(c, c, 3, bias=False),
]  # fmt: skip


class SqueezeExcitation(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(x.mean((2, 3))).sigmoid()[:, :, None, None]


class OwnConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = F.conv2d(x.as_subclass(Tensor), weight, padding=1)
        return torch.autograd.grad(y, (x, weight), gradient)


class OwnBackward(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return OwnConv.apply(x, self.weight)


def layer(r: random.Random, x: Tensor, parameters: list) -> tuple[str, Callable]:
    module = r.choice(LAYERS)(r, x.shape[1]).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    for name, buffer in module.named_buffers():
        if name.endswith(('mean', 'var')):
            nn.init.uniform_(buffer, 0.5, 1.5)
    parameters += module.parameters()
    text = repr(module)
    way = r.choice(['plain', 'plain', 'hook', 'backward hook', 'checkpoint', 'reentrant'])
    if way == 'hook':
        module.register_forward_hook(lambda *of: of[2])
    elif way == 'backward hook' and not any(getattr(m, 'inplace', 0) for m in module.modules()):
        module.register_full_backward_hook(lambda *of: None)
    elif way in ('checkpoint', 'reentrant'):
        reentrant = way == 'reentrant'
        return f'{way}({text})', lambda x: checkpoint(module, x, use_reentrant=reentrant)
    return f'{way}({text})', module


HAND = [
    ('resize', lambda x, y: F.interpolate(x, y.shape[2:])),
    ('resize bilinear', lambda x, y: F.interpolate(x, size=y.shape[-2:], mode='bilinear')),
    ('double', lambda x, y: F.interpolate(x, (x.shape[2] * 2, x.shape[3] * 2), mode='bilinear')),
    ('pool to', lambda x, y: F.adaptive_avg_pool2d(x, y.shape[2:])),
    ('pool to half', lambda x, y: F.adaptive_max_pool2d(x, (x.shape[2] // 2, x.size(3) // 2))),
    ('cat', lambda x, y: torch.cat(tensors=[x, y], dim=1)),
    ('cat 2', lambda x, y: torch.cat([x, y], dim=2)),
    ('stack', lambda x, y: torch.stack([x, y], 1).flatten(1, 2)),
    ('where', lambda x, y: torch.where(x > 0, x, y)),
    ('crop', lambda x, y: x[:, :, 1:]),
    ('crop to', lambda x, y: x[..., : y.shape[2], : y.shape[3]]),
    ('channels', lambda x, y: x[:, 1:]),
    ('gate', lambda x, y: x * F.adaptive_avg_pool2d(y, 1).sigmoid()),
    ('own gate', lambda x, y: x * y.mean((2, 3), keepdim=True)),
    ('wrong gate', lambda x, y: x * y.var((2, 3), keepdim=True)),
    ('total gate', lambda x, y: x * y.mean()),
    ('std gate', lambda x, y: x / (1 + y.flatten(2).norm(dim=-1)[:, :, None, None])),
    ('GRN', lambda x, y: x * (g := x.norm(p=2, dim=(2, 3), keepdim=True)) / (g.mean(1, True) + 1)),
    ('strips', lambda x, y: x * x.mean(3, keepdim=True).sigmoid() + x.amax(2, keepdim=True)),
    ('flip', lambda x, y: x + x.flip(3)),
    ('transposed', lambda x, y: x.transpose(2, 3).contiguous()),
    ('self-attention', lambda x, y: (x.flatten(2) @ x.flatten(2).mT).softmax(-1)[:, :, :1, None]),
    ('layer norm', lambda x, y: F.layer_norm(x.mT, x.shape[2:3]).mT),
    ('accumulate', lambda x, y: torch.zeros(1, 1, 1, 1).double() + x),
    ('in place', lambda x, y: (x * 1).add_(y).mul_(2).sub_(y.mean((2, 3), keepdim=True))),
    ('transpose_', lambda x, y: (x * 1).transpose_(2, 3)),
    ('setitem', lambda x, y: set_first(x * 1)),
    ('out', lambda x, y: torch.add(x.detach(), y.detach(), out=x.detach() * 1)),
    ('view in place', lambda x, y: fill_view(x * 1)),
    ('half', lambda x, y: x.to(torch.bfloat16).to(x)),
    ('log', lambda x, y: (x * x).log() + x.sqrt().nan_to_num()),
    ('coordinates', lambda x, y: x + torch.linspace(-1, 1, x.shape[3]).double()),
    ('grid', lambda x, y: x * torch.ones_like(x).cumsum(3)),
    ('expand', lambda x, y: x + y.mean((2, 3), keepdim=True).expand_as(x)),
    ('einsum', lambda x, y: torch.einsum('bchw,bc->bchw', x, y.mean((2, 3)))),
    ('batch', lambda x, y: x - x.mean(0, keepdim=True)),
    ('split', lambda x, y: torch.cat([part * 2 for part in x.split(1, dim=1)], 1)),
]  # fmt: skip


def set_first(x: Tensor) -> Tensor:
    x[:, :, -1] = 3
    return x


def fill_view(x: Tensor) -> Tensor:
    x[:, :, :, -1:].fill_(2)
    x.flatten()[-1:].zero_()
    return x


def generic(r: random.Random) -> tuple[str, Callable]:
    """A function of PyTorch with likely arguments."""
    function = r.choice(FUNCTIONS)
    name = resolve_name(function)
    number, dim = r.choice([0.7, 2, 1]), r.choice([0, 1, 2, 3, -1])
    dims = r.choice([(2, 3), (1,), (0, 2, 3)])
    calls: dict[str, Callable] = {
        'x': lambda x, y: function(x),
        'xy': lambda x, y: function(x, y),
        'xn': lambda x, y: function(x, number),
        'xd': lambda x, y: function(x, dim),
        'xdk': lambda x, y: function(x, dim=dim, keepdim=True),
        'xm': lambda x, y: function(x, dims),
        'xmk': lambda x, y: function(x, dim=dims, keepdim=True),
        'xx': lambda x, y: function(x, y, y),
        'list': lambda x, y: function([x, y], dim),
        'dim': lambda x, y: function(x, dim=dim),
        'self': lambda x, y: function(input=x),
    }
    pattern = r.choice(['x', *calls])  # the first one twice as often
    call = calls[pattern]
    if name.rstrip(')').endswith('_'):
        return f'{name} {pattern}', lambda x, y: call(x * 1, y)
    return f'{name} {pattern} {number} {dim} {dims}', call


def tensor_of(value: Any) -> Any:
    """The first tensor of floating-point numbers in a result."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.numel() else None
    if isinstance(value, (tuple, list)):
        return next((x for part in value if (x := tensor_of(part)) is not None), None)
    return None


def forget_compiler() -> None:
    """Where it was used, by an earlier test or a function of PyTorch, sizes mean something else."""
    if compiler_is_used():
        torch._dynamo.reset()


class Program:
    """A random program, run on a padded batch and on each image alone."""

    def __init__(self, seed: int) -> None:
        r = random.Random(seed)
        torch.manual_seed(seed)
        images, channels = r.choice([1, 2, 3]), r.choice([2, 4])
        size = r.choice([8, 12, 13]), r.choice([8, 12, 11])
        self.valid = [(r.randint(3, size[0]), r.randint(3, size[1])) for _ in range(images)]
        leaf = torch.randn(images, channels, *size).double()
        for x, (height, width) in zip(leaf, self.valid):
            x[:, height:], x[:, :, width:] = 50, -70
        self.leaf = leaf.requires_grad_()
        valid = torch.tensor(self.valid)
        batch: list[Any] = [padded_batch(self.leaf * 1, valid)]
        alone: list[list[Any]] = [
            [(self.leaf * 1)[i : i + 1, :, :h, :w].contiguous()]
            for i, (h, w) in enumerate(self.valid)
        ]
        if r.random() < 0.3:  # a second stream
            batch.append(padded_batch(self.leaf.sin(), valid.clone()))
            for own in alone:
                own.append(own[0].sin())
        self.parameters: list[Tensor] = []
        self.texts: list[str] = []
        for _ in range(r.randint(1, 6)):
            forget_compiler()
            self.step(r, batch, alone)
        forget_compiler()
        self.check(batch, alone)

    def step(self, r: random.Random, batch: list, alone: list) -> None:
        maps = [i for i, x in enumerate(alone[0]) if x.dim() == 4]
        i = r.choice(maps) if r.random() < 0.9 else r.randrange(len(batch))
        j = r.choice(maps)
        kind = r.random()
        with suppress(Exception):
            if kind < 0.4 and alone[0][i].dim() == 4:
                text, module = layer(r, alone[0][i], self.parameters)
                call = lambda x, y: module(x * 1)  # noqa: E731
            elif kind < 0.65:
                text, call = r.choice(HAND)
            else:
                text, call = generic(r)
            with torch.no_grad() if r.random() < 0.05 else nullcontext():
                own = [tensor_of(call(x[i], x[j])) for x in alone]
                if any(x is None or x.numel() > 50_000 or not x.isfinite().all() for x in own):
                    return
                together = tensor_of(call(batch[i], batch[j]))
            if together is None or together.numel() > 200_000:
                return
            batch.append(together)
            for x, y in zip(alone, own):
                x.append(y)
            self.texts.append(f'{len(batch) - 1}: {text} ({i}, {j})')

    def check(self, batch: list, alone: list) -> None:
        for k, x in enumerate(batch):
            extent = cells_of(x)
            if extent is None:
                continue
            where = f'result {k} of {self.valid} in {tuple(self.leaf.shape)}'
            where = '\n'.join([where, *self.texts])
            plain = x.as_subclass(Tensor)
            ours, theirs = [], []
            for i, own in enumerate(alone):
                rows, columns = (int(side[i]) for side in extent.sides)
                got = plain[i : i + 1]
                if x.dim() == 4:
                    got = got[:, :, :rows, :columns]
                want = own[k].as_subclass(Tensor)
                if got.numel() == 0 and want.numel():
                    continue  # nothing is claimed of this image
                assert got.shape == want.shape, f'{got.shape} {want.shape} {where}'
                close(got, want, where)
                weight = torch.randn(got.shape, generator=torch.manual_seed(k)).to(got.dtype)
                ours.append((got * weight).sum())
                theirs.append((want * weight).sum())
            if ours and sum(theirs).requires_grad:
                assert sum(ours).requires_grad, where
                try:
                    expected = self.gradients(sum(theirs))
                except RuntimeError:  # the program itself has no backward pass
                    continue
                for a, b in zip(self.gradients(sum(ours)), expected):
                    if b.isfinite().all():
                        close(a, b, 'gradient of ' + where)

    def gradients(self, total: Tensor) -> list[Tensor]:
        """Of the pixels inside the images, and of all parameters."""
        leaves = [self.leaf, *self.parameters]
        for x in leaves:
            x.grad = None
        total.backward(retain_graph=True)
        found = [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in leaves]
        for x, (height, width) in zip(found[0], self.valid):
            x[:, height:], x[:, :, width:] = 0, 0
        return [x.as_subclass(Tensor) for x in found]


def close(got: Tensor, want: Tensor, text: str) -> None:
    # A step in half precision rounds the gradients of those before it, too.
    rounded = any(step in text for step in (': half ', 'Tensor.half', 'bfloat16'))
    exact = want.dtype == torch.float64 and not rounded
    rtol = 1e-5 if exact else 0.05
    atol = rtol * (1 + want.detach().abs().nan_to_num(0, 0, 0).max().item())
    options = dict(rtol=rtol, atol=atol, equal_nan=True)
    torch.testing.assert_close(got, want, **options, msg=lambda m: f'{m}\n{text}')


@FUZZ
@given(seed=st.integers(0, 2**32 - PROGRAMS))
def test_what_claims_a_region_is_right(seed):
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(False):
        warnings.simplefilter('ignore')
        for i in range(PROGRAMS):
            Program(seed + i)
