"""Convolutions in bfloat16 on a CPU: float32 where oneDNN is wrong on some processors.

The weight gradients of some are wrong on a processor with avx512_bf16. On any other, the dtypes of
the convolutions show what is avoided.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from support import poison_memory
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

from cpvt_pyramid.acceleration.patches import PatchConv
from cpvt_pyramid.acceleration.winograd import WinogradConv2d
from cpvt_pyramid.bfloat16 import (
    CorrectedBFloat16,
    has_few_channels,
    safe_conv2d,
    sees_padding_alone,
)
from cpvt_pyramid.layers import PointwiseConv2d, convolve
from cpvt_pyramid.tasks.detectors import faster_rcnn, fcos, retinanet
from cpvt_pyramid.tasks.segmentors import segformer, semantic_fpn, upernet
from tests.models.ours import pcpvt, pvt_v2


class Convolutions(TorchDispatchMode):
    """Records the dtypes of the convolutions that are computed."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


def computed(function, *args, **kwargs):
    """The dtype in which the one convolution of a call is computed."""
    with Convolutions() as mode:
        function(*args, **kwargs)
    (dtype,) = mode.dtypes
    return dtype


# Input and output channels, kernel, stride, padding, height and width.
WRONG = {
    'few channels': (16, 16, 8, 8, 0, 24, 16),
    'few channels, one patch wide': (16, 64, 4, 4, 0, 16, 4),
    'few outputs': (3, 16, 4, 4, 0, 24, 16),
    'bands': (10, 64, 4, 4, 0, 24, 16),
    'a band, one patch': (1, 64, 16, 16, 0, 16, 16),
    'two bands, one patch wide': (2, 192, 16, 16, 0, 64, 16),
    'four bands, one patch': (4, 192, 32, 32, 0, 32, 32),
    'narrow image': (3, 64, 7, 4, 3, 28, 3),
    'flat image': (3, 64, 7, 4, 3, 3, 28),
    'one token': (64, 128, 3, 2, 1, 1, 1),
    'two tokens': (64, 128, 3, 2, 1, 1, 2),
    'one column': (64, 64, 3, 1, 1, 7, 1),
    'wide kernel': (64, 64, 5, 1, 2, 1, 9),
}
RIGHT = {
    'patches of RGB': (3, 64, 4, 4, 0, 24, 16),
    'patches': (64, 128, 2, 2, 0, 4, 4),
    'overlapping patches': (3, 64, 7, 4, 3, 28, 28),
    'keys': (64, 64, 8, 8, 0, 16, 16),
    'map': (64, 64, 3, 1, 1, 3, 2),
    'half': (64, 128, 3, 2, 1, 3, 4),
}


@pytest.mark.parametrize('autocast', [False, True], ids=['bfloat16', 'autocast'])
@pytest.mark.parametrize('case', [*WRONG, *RIGHT])
def test_what_is_computed_in_float32(case, autocast):
    i, o, k, stride, padding, height, width = {**WRONG, **RIGHT}[case]
    conv = nn.Conv2d(i, o, k, stride, padding)
    x = torch.randn(1, i, height, width)
    if not autocast:
        conv, x = conv.bfloat16(), x.bfloat16()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast), CorrectedBFloat16():
        assert computed(conv, x) == (torch.float32 if case in WRONG else torch.bfloat16)
        assert conv(x).dtype == torch.bfloat16
        assert computed(conv.double(), x.double()) == torch.float64
    assert computed(conv.float(), x.float()) == torch.float32


@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('case', [*WRONG, *RIGHT])
def test_gradients_are_right(case, channels_last):
    i, o, k, stride, padding, height, width = {**WRONG, **RIGHT}[case]
    torch.manual_seed(0)
    x = torch.randn(2, i, height, width).bfloat16()
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    given = [x, torch.randn(o, i, k, k).bfloat16(), torch.randn(o).bfloat16()]
    results = []
    for function, dtype in ((safe_conv2d, torch.bfloat16), (F.conv2d, torch.float64)):
        inputs = [y.detach().to(dtype).requires_grad_() for y in given]
        poison_memory()
        out = function(*inputs, stride, padding)
        poison_memory()
        out.backward(torch.ones_like(out))
        results.append([out, *(y.grad for y in inputs)])
    for found, expected in zip(*results):
        assert (found.double() - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize('channels', [(16, 16), (64, 64)], ids=str)
def test_transposed_convolutions(channels):
    layer = nn.ConvTranspose2d(*channels, 4, stride=2, padding=1, output_padding=1, groups=2)
    x = torch.randn(1, channels[0], 5, 6)
    expected = layer(x)
    with CorrectedBFloat16(), torch.autocast('cpu', torch.bfloat16):
        assert computed(layer, x) == (torch.float32 if channels == (16, 16) else torch.bfloat16)
        torch.testing.assert_close(layer(x).float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize('padding', ['same', 'valid', (1, 0)], ids=str)
@pytest.mark.parametrize('sides', [(1, 9), (9, 1), (9, 9)], ids=str)
def test_arguments_of_every_form(padding, sides):
    x = torch.randn(64, *sides).bfloat16()  # without a batch
    weight = torch.randn(64, 32, 1, 3).bfloat16()
    if sides[1] == 1 and padding in ('valid', (1, 0)):
        weight = weight.mT.contiguous()
    options = dict(padding=padding, dilation=(1, 1), groups=2)
    expected = F.conv2d(x, weight, **options)
    with CorrectedBFloat16():
        torch.testing.assert_close(F.conv2d(x, weight, **options), expected)


class Adapted(nn.Conv2d):
    """A convolution with a branch of few channels, as LoRA has."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.branch = branch_of_few_channels()

    def forward(self, input):
        return super().forward(input) + self.branch(input)


def branch_of_few_channels():
    return nn.Sequential(nn.Conv2d(64, 8, 3, padding=1), nn.Conv2d(8, 64, 1))


def conv(*args, **kwargs):
    return nn.Conv2d(*(args or (64, 64, 3)), **{'padding': 1, **kwargs})


def hooked():
    layer = conv()
    layer.branch = branch_of_few_channels()
    layer.register_forward_hook(lambda module, args, out: out + module.branch(args[0]))
    return layer


def hooked_before():
    layer = conv()
    layer.branch = branch_of_few_channels()
    layer.register_forward_pre_hook(lambda module, args: (module.branch(args[0]),))
    return layer


def patched():
    layer = conv()
    layer.branch = branch_of_few_channels()
    layer.forward = lambda x: layer.branch(x)
    return layer


def cut():
    """With other channels and another kernel than those that it was built with."""
    layer = conv()
    layer.weight = nn.Parameter(layer.weight[:16].detach())
    layer.bias = nn.Parameter(layer.bias[:16].detach())
    return layer


def with_another_kernel():
    layer = conv(64, 64, 1, padding=2)
    layer.weight = nn.Parameter(torch.randn(64, 64, 5, 5))
    return layer


def pruned():
    return prune.l1_unstructured(conv(), 'weight', 0.5)


MODULES = {
    'plain': conv,
    'subclass': lambda: Adapted(64, 64, 3, padding=1),
    'hooked': hooked,
    'hooked before': hooked_before,
    'patched': patched,
    'few outputs': cut,
    'another kernel': with_another_kernel,
    'pruned': pruned,
    'weight norm': lambda: parametrizations.weight_norm(conv()),
    'lazy': lambda: nn.LazyConv2d(64, 3, padding=1),
    'lazy with few outputs': lambda: nn.LazyConv2d(16, 3, padding=1),
    'pointwise': lambda: PointwiseConv2d(64, 64, 1),
    'patches': lambda: PatchConv(64, 64, 1),
    'winograd': lambda: WinogradConv2d(64, 64, 3, padding=1),
    'sequence': branch_of_few_channels,
    'transposed': lambda: nn.ConvTranspose2d(64, 16, 3, padding=1),
    'circular': lambda: conv(padding_mode='circular'),
    'reflected': lambda: conv(64, 16, (3, 1), padding=(1, 0), padding_mode='reflect'),
    'replicated': lambda: conv(padding_mode='replicate'),
    'same': lambda: conv(padding='same', dilation=2),
    'valid': lambda: conv(64, 64, 1, padding='valid'),
    'dilated': lambda: conv(padding=2, dilation=2),
    'depthwise': lambda: conv(groups=64),
    'few channels in groups': lambda: conv(64, 16, 3, groups=8),
}


@pytest.mark.parametrize('autocast', [False, True], ids=['bfloat16', 'autocast'])
@pytest.mark.parametrize('sides', [(6, 5), (6, 2), (2, 2), (6, 1)], ids=str)
@pytest.mark.parametrize('case', MODULES)
def test_whatever_convolves_is_right(case, sides, autocast):
    """`convolve` computes what the mode computes, and in its dtypes."""
    torch.manual_seed(0)
    x = torch.randn(2, 64, *sides)
    if not autocast:
        x = x.bfloat16()
    x = x.contiguous(memory_format=torch.channels_last)
    results = []
    for call in (with_mode, on_tokens):
        torch.manual_seed(0)
        module = MODULES[case]().to(x.dtype)
        given = x.clone().requires_grad_()
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast), Convolutions() as mode:
            out = call(module, given)
            out.float().square().sum().backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        results.append((mode.dtypes, {'out': out, 'x': given.grad, **gradients}))
    (dtypes, expected), (found_dtypes, found) = results
    assert found_dtypes == dtypes
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def with_mode(module, x):
    with CorrectedBFloat16():
        return module(x)


def on_tokens(module, x):
    return convolve(module, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_traces_have_no_warning_of_it():
    """Nothing is chosen by the size of a map."""
    model = pvt_v2(out_indices=(0,)).eval().bfloat16()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        torch.jit.trace(model, torch.randn(1, 3, 64, 64).bfloat16(), check_trace=False)
    assert not [warning for warning in found if 'bfloat16.py' in warning.filename]


@pytest.mark.parametrize('way', ['bfloat16', 'autocast', 'checkpointed'])
@pytest.mark.parametrize('build', [pcpvt, pvt_v2])
def test_a_model_on_a_narrow_image(build, way):
    """Its gradients are finite and near those in float32."""
    model = build(out_indices=(0, 1, 2, 3), with_cp=way == 'checkpointed').train()
    image = torch.randn(1, 3, 40, 3)
    grads = []
    for half in (False, True):
        each = copy.deepcopy(model)
        given = image
        if half and way == 'bfloat16':
            each, given = each.bfloat16(), image.bfloat16()
        poison_memory()
        with torch.autocast('cpu', torch.bfloat16, enabled=half and way != 'bfloat16'):
            maps = each(given)
        poison_memory()
        sum(y.float().square().mean() for y in maps).backward()
        grads.append(torch.cat([p.grad.float().flatten() for p in each.parameters()]))
    assert (grads[1] - grads[0]).norm() < 0.1 * grads[0].norm()


@pytest.mark.parametrize('way', ['compiled', 'exported'])
def test_graphs_have_the_convolutions_of_the_model(way):
    """One graph, in which nothing is chosen by the size of a map."""
    model = pvt_v2(out_indices=(0,)).eval().bfloat16()
    image = torch.randn(1, 3, 64, 64).bfloat16()
    if way == 'compiled':
        torch._dynamo.reset()
        with torch.no_grad():
            graph = torch.compile(model, backend='eager', fullgraph=True)
            found = graph(image)[0]
            with torch.autocast('cpu', torch.bfloat16):
                graph(image.float())
    else:
        exported = torch.export.export(model, (image,))
        assert not any('float32' in str(node.meta.get('val')) for node in exported.graph.nodes)
        found = exported.module()(image)[0]
    torch.testing.assert_close(found, model(image)[0], rtol=0.05, atol=0.05)


MODELS = {
    'semantic_fpn': lambda: semantic_fpn('pcpvt_nano', num_classes=5, channels=8, fpn_channels=16),
    'upernet': lambda: upernet('pcpvt_nano', num_classes=5, channels=8, auxiliary_channels=8),
    'segformer': lambda: segformer('mit_b0', num_classes=5, channels=8),
    'retinanet': lambda: retinanet('pcpvt_nano', num_classes=2, out_channels=16, min_size=33),
    'fcos': lambda: fcos('pcpvt_nano', num_classes=2, out_channels=64, min_size=33),
    'faster_rcnn': lambda: faster_rcnn('pcpvt_nano', num_classes=2, out_channels=16, min_size=33),
}


class TrustedConvolutions(TorchDispatchMode):
    """Asserts that each convolution in bfloat16 is one that is known to be right."""

    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default and args[0].dtype == torch.bfloat16:
            x, weight, _, stride, padding, dilation, transposed, _, groups = args
            self.seen += 1
            assert not transposed
            assert not has_few_channels(weight.shape[1] * groups, weight.shape[0])
            sides = x.shape[-2:], weight.shape[-2:]
            assert not sees_padding_alone(*sides, stride, padding, dilation)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize('autocast', [False, True], ids=['bfloat16', 'autocast'])
@pytest.mark.parametrize('name', MODELS)
@torch.no_grad()
def test_heads_of_segmentors_and_detectors(name, autocast):
    """On a narrow image, whose coarse maps are one pixel wide."""
    model = MODELS[name]().eval()
    image = torch.rand(3, 96, 33)
    if not autocast:
        model, image = model.bfloat16(), image.bfloat16()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast), TrustedConvolutions() as mode:
        model(image[None] if name in ('semantic_fpn', 'upernet', 'segformer') else [image])
        if name == 'upernet':
            model.auxiliary_head(model.backbone(image[None]))
    assert mode.seen > 5
