"""Accelerated layers in everything that PyTorch does with layers: they do what plain ones do."""

import copy
import functools
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import attention, conv_mlp, products, windows
from cpvt_pyramid.acceleration.blocks import FusedBlock
from cpvt_pyramid.acceleration.conv_mlp import FusedConvMLP
from cpvt_pyramid.acceleration.embeddings import FusedOverlapPatchEmbed, FusedPatchEmbed
from cpvt_pyramid.acceleration.norms import FastLayerNorm
from cpvt_pyramid.acceleration.patches import PatchConv
from cpvt_pyramid.acceleration.pegs import FusedPosCNN
from cpvt_pyramid.acceleration.products import FusedMLP, OneDNNLinear
from cpvt_pyramid.acceleration.winograd import FEWEST_CHANNELS, WinogradConv2d
from cpvt_pyramid.grid import Grid, grid_of_windows, weights_of_means
from cpvt_pyramid.layers import LayerNorm
from cpvt_pyramid.model import (
    MLP,
    Block,
    ConvMLP,
    GlobalAttention,
    LinearAttention,
    OverlapPatchEmbed,
    PatchEmbed,
    PosCNN,
    WindowAttention,
)
from tests.models.ports import randomize


def plain_attention():
    """Attention that can be differentiated twice and in forward mode: fused kernels cannot."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # newer than the oldest torch

    return sdpa_kernel(SDPBackend.MATH)


class OnMap(nn.Module):
    """A layer that is called with tokens and their grid, on tokens alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        grid = Grid(*x.shape[1:3])
        if isinstance(self.layer, WindowAttention):
            grid.windows = grid_of_windows(x, None, self.layer.window)
        if isinstance(self.layer, LinearAttention):
            grid.means = weights_of_means(x, None)
        return self.layer(x, grid)


class SecondBranch(nn.Module):
    """The second branch of a block, of its norm and MLP."""

    def __init__(self, mlp):
        super().__init__()
        self.block = Block(4, nn.Identity(), mlp)
        self.block.norm1 = nn.Identity()
        self.block.norm2 = LayerNorm(4, eps=1)

    def forward(self, x):
        return self.block.normed_mlp(x, Grid(*x.shape[1:3]))


def conv3x3():
    return nn.Conv2d(FEWEST_CHANNELS, FEWEST_CHANNELS, 3, padding=1)


def normalized_linear():
    return nn.Sequential(nn.Linear(4, 4), LayerNorm(4, eps=1))


# A layer, the shape of its input, and the class of the layer that makes it fast.
LAYERS = {
    'linear': (lambda: nn.Linear(4, 4), (2, 3, 4), OneDNNLinear),
    'linear on rows': (lambda: nn.Linear(4, 4), (5, 4), OneDNNLinear),
    'without bias': (lambda: nn.Linear(4, 4, bias=False), (2, 3, 5, 4), OneDNNLinear),
    'MLP': (lambda: OnMap(MLP(4, 8)), (2, 3, 5, 4), FusedMLP),
    'MLP, recomputed': (lambda: OnMap(MLP(4, 8, recompute_gelu=True)), (2, 3, 5, 4), FusedMLP),
    'ConvMLP': (lambda: OnMap(ConvMLP(4, 8, recompute_gelu=True)), (2, 3, 5, 4), FusedConvMLP),
    'ConvMLP, ReLU': (lambda: OnMap(ConvMLP(4, 8, relu=True)), (2, 3, 5, 4), FusedConvMLP),
    'norm and MLP': (lambda: SecondBranch(MLP(4, 8)), (2, 3, 5, 4), FusedBlock),
    'norm and ConvMLP': (lambda: SecondBranch(ConvMLP(4, 8)), (2, 3, 5, 4), FusedBlock),
    'patches': (lambda: PatchEmbed(3, 4, 2, norm=False), (2, 4, 6, 3), PatchConv),
    'patch embedding': (lambda: PatchEmbed(3, 4, 2), (2, 5, 6, 3), FusedPatchEmbed),
    'overlapping patches': (
        lambda: OverlapPatchEmbed(3, 4, 2),
        (2, 5, 6, 3),
        FusedOverlapPatchEmbed,
    ),
    'layer norm': (normalized_linear, (2, 3, 5, 4), FastLayerNorm),
    '3x3': (conv3x3, (1, FEWEST_CHANNELS, 2, 3), WinogradConv2d),
    'attention': (
        lambda: OnMap(GlobalAttention(4, 2, sr_ratio=1)),
        (2, 3, 5, 4),
        attention.FusedGlobalAttention,
    ),
    'linear attention': (
        lambda: OnMap(LinearAttention(4, 2)),
        (2, 9, 8, 4),
        attention.FusedLinearAttention,
    ),
    'PEG': (lambda: PosCNN(4), (2, 3, 5, 4), FusedPosCNN),
    'windows': (
        lambda: OnMap(WindowAttention(4, 2, 2)),
        (2, 3, 5, 4),
        windows.BorderWindowAttention,
    ),
}


@pytest.fixture(params=LAYERS)
def layers(request, monkeypatch):
    """A plain layer, the same accelerated, and an input. Large ones are computed in parts."""
    monkeypatch.setattr(attention, 'fused_attention_is_slow', lambda dtype: True)
    monkeypatch.setattr(attention, 'is_worth_products', lambda q, k: True)
    monkeypatch.setattr(windows, 'FEWEST_IN_WINDOW', 1)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    monkeypatch.setattr(attention, 'SCORES_AT_A_TIME', 40)
    monkeypatch.setattr(conv_mlp, 'AT_A_TIME', 40)
    monkeypatch.setattr(conv_mlp, 'FEWEST_ROWS', 1)
    build, shape, kind = LAYERS[request.param]
    plain = randomize(build())
    fast = accelerate(copy.deepcopy(plain))
    assert any(isinstance(module, kind) for module in fast.modules())
    return plain, fast, torch.randn(shape, generator=torch.manual_seed(0))


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def same(layers, function):
    plain, fast, x = layers
    assert_same(function(fast, x), function(plain, x))


def gradients(layer, out):
    return torch.autograd.grad(out.square().sum(), list(layer.parameters()))


def add_itself(y):
    y += 1
    return y


IN_PLACE = {
    'relu': lambda y: F.relu_(y),
    'add': add_itself,
    'first': lambda y: y[:1].mul_(2).new_zeros(()) + y,
    'transposed': lambda y: y.transpose(0, 1).mul_(3).transpose(0, 1),
    'fill': lambda y: y.masked_fill_(y > 0, 0.5),
}


@pytest.mark.parametrize('change', IN_PLACE)
def test_results_can_be_changed_in_place(layers, change):
    def run(layer, x):
        return gradients(layer, IN_PLACE[change](layer(x)))

    same(layers, run)


@pytest.mark.parametrize('frozen', [False, True])
def test_inputs_can_be_changed_in_place_where_they_can_in_a_plain_layer(layers, frozen):
    """A frozen layer needs its input no longer; of another, a changed input is an error."""

    def run(layer, x):
        layer.requires_grad_(not frozen)
        leaf = x.clone().requires_grad_()
        given = leaf * 1
        out = layer(given)
        given.mul_(2)
        try:
            return torch.autograd.grad(out.square().sum(), leaf)
        except RuntimeError as error:
            return 'inplace' in str(error)

    plain, fast, x = layers
    expected = run(plain, x)
    found = run(fast, x)
    if isinstance(found, bool) and not isinstance(expected, bool):
        # What recomputes a map from its input needs it longer.
        assert not isinstance(fast, nn.Linear)
    else:
        assert_same(found, expected)


def test_gradients_of_gradients(layers):
    def run(layer, x):
        x = x.clone().requires_grad_()
        with plain_attention():
            out = layer(x)
            inputs = (x, *layer.parameters())
            (grad, *_) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
            second = torch.autograd.grad(grad.square().sum(), inputs, allow_unused=True)
        return grad, second

    same(layers, run)


@pytest.mark.parametrize('create_graph', [False, True])
def test_hooks_of_tensors_are_called_once(layers, create_graph):
    """Those of weights, and of the input."""

    def run(layer, x):
        counts = []

        def hook(grad):
            counts.append(1)
            return 2 * grad

        leaf = x.clone().requires_grad_()
        given = leaf * 1
        weights = list(layer.parameters())
        handles = [tensor.register_hook(hook) for tensor in (given, *weights)]
        with plain_attention():
            out = layer(given).square().sum()
        found = torch.autograd.grad(out, [leaf, *weights], create_graph=create_graph)
        for handle in handles:
            handle.remove()
        assert len(counts) == len(handles)
        return found

    same(layers, run)


NOT_FINITE = {'nan': float('nan'), 'infinite': float('inf')}


OTHER_STRIDES = {
    'a column of a matrix': lambda bias: torch.stack([bias, bias + 7], 1)[:, 0],
    'one value': lambda bias: bias[:1].expand(len(bias)),
    'inside a vector': lambda bias: torch.cat([bias[:1] + 7, bias])[1:],
}


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('kind', OTHER_STRIDES)
def test_parameters_of_any_stride(layers, kind, grad):
    """oneDNN and our own functions get the address of a bias, without its stride."""
    plain, fast, x = layers
    for each in (plain, fast):
        for parameter in each.parameters():
            if parameter.dim() == 1:
                parameter.data = OTHER_STRIDES[kind](parameter.detach())
    with nullcontext() if grad else torch.no_grad():
        out = [each(x) for each in (fast, plain)]
        assert_same(*out)
        if grad:
            assert_same(gradients(fast, out[0]), gradients(plain, out[1]))


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('index', [0, None], ids=['one value', 'a row'])
def test_biases_of_other_shapes(layers, index, grad):
    """`F.linear` takes all that can be broadcast, others do not."""
    plain, fast, x = layers
    for each in (plain, fast):
        for name, parameter in each.named_parameters():
            if name.endswith('bias'):
                parameter.data = parameter.detach()[index]
    with torch.set_grad_enabled(grad):
        found, expected = [results_or_error(each, x) for each in (fast, plain)]
        assert_same_result(found, expected)
        if grad and isinstance(expected, torch.Tensor):
            assert_same(gradients(fast, found), gradients(plain, expected))


def test_methods_that_others_keep(layers):
    """As the hooks of Hugging Face's accelerate, which replace `forward` by a function that calls
    what it was before; also after the acceleration is undone."""
    plain, fast, x = layers
    kept = {}

    def call_kept(module, *args):
        return kept[module](*args)

    for module in fast.modules():
        kept[module] = module.forward
        module.forward = functools.partial(call_kept, module)
    with torch.no_grad():
        assert_same(fast(x), plain(x))
        accelerate(fast, False)
        assert torch.equal(fast(x), plain(x))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('value', NOT_FINITE)
def test_values_that_are_not_finite_stay_so(layers, value, dtype):
    """They must not become numbers, which would hide that a training diverges."""
    plain, fast, x = layers
    x = x.to(dtype)
    x.flatten()[:1] = NOT_FINITE[value]
    expected = plain.to(dtype)(x)
    found = fast.to(dtype)(x)
    assert not expected.isfinite().all()
    assert not found[~expected.isfinite()].isfinite().any()


@pytest.mark.parametrize('way', ['is_grads_batched', 'vmap'])
@pytest.mark.filterwarnings('ignore:There is a performance drop')
def test_several_gradients_at_once(layers, way):
    def run(layer, x):
        with plain_attention():
            out = layer(x)
            many = torch.stack([torch.ones_like(out), out.detach()])
            weights = list(layer.parameters())
            if way == 'is_grads_batched':
                return torch.autograd.grad(out, weights, many, is_grads_batched=True)
            return torch.vmap(lambda grad: torch.autograd.grad(out, weights, grad))(many)

    same(layers, run)


TRANSFORMS = {
    'vmap': lambda f, x, t: torch.vmap(f)(torch.stack([x, t])),
    'grad': lambda f, x, t: torch.func.grad(lambda x: f(x).square().sum())(x),
    'grad of each': lambda f, x, t: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(
        torch.stack([x, t])
    ),
    'vjp': lambda f, x, t: torch.func.vjp(f, x)[1](f(x)),
    'jvp': lambda f, x, t: torch.func.jvp(f, (x,), (t,)),
    'jacrev': lambda f, x, t: torch.func.jacrev(lambda x: f(x).square().flatten()[:2])(x),
    'functionalize': lambda f, x, t: torch.func.functionalize(f)(x),
}


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('transform', TRANSFORMS)
@pytest.mark.filterwarnings('ignore:There is a performance drop')
def test_functions_of_torch_func(layers, transform, grad):
    if transform == 'functionalize':
        grad = False  # it has no rule for any autograd.Function, and MLPs may recompute their GELU

    def run(layer, x):
        t = torch.linspace(-1, 1, x.numel()).view(x.shape)
        with torch.set_grad_enabled(grad), plain_attention():
            return TRANSFORMS[transform](layer, x, t)

    same(layers, run)


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
def test_forward_mode(layers, grad):
    """A tangent must not get lost."""

    def run(layer, x):
        tangent = torch.linspace(-1, 1, x.numel()).view(x.shape)
        with torch.set_grad_enabled(grad), plain_attention(), forward_ad.dual_level():
            return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent

    plain, fast, x = layers
    expected = run(plain, x)
    assert expected is not None
    assert_same(run(fast, x), expected)


def test_forward_mode_of_the_gradient_of_a_result(layers):
    """As in products with the Hessian of a loss, whose gradient has a tangent."""

    def run(layer, x):
        x = x.clone().requires_grad_()
        with plain_attention():
            out = layer(x)
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(torch.ones_like(out), out.detach())
            found = torch.autograd.grad(out, [x, *layer.parameters()], grad)
            return [forward_ad.unpack_dual(each).tangent for each in found]

    plain, fast, x = layers
    expected = run(plain, x)
    assert all(tangent is not None for tangent in expected)
    assert_same(run(fast, x), expected)


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('kind', ['global', 'windows'])
@pytest.mark.parametrize('index', range(3), ids=['queries', 'keys', 'values'])
def test_forward_mode_of_one_input_of_attention(monkeypatch, index, kind, grad):
    monkeypatch.setattr(attention, 'fused_attention_is_slow', lambda dtype: True)
    monkeypatch.setattr(attention, 'is_worth_products', lambda q, k: True)
    layer = GlobalAttention(8, 2, sr_ratio=1) if kind == 'global' else WindowAttention(8, 2, 4)
    inputs = torch.randn(3, 1, 2, 16, 4).unbind(0)
    found = []
    for accelerated in (False, True):
        accelerate(layer, accelerated)
        with torch.set_grad_enabled(grad), plain_attention(), forward_ad.dual_level():
            given = list(inputs)
            tangent = torch.linspace(-1, 1, 128).view(given[index].shape)
            given[index] = forward_ad.make_dual(given[index], tangent)
            out = layer.attend(*given, Grid(4, 4))
            found.append(forward_ad.unpack_dual(out).tangent)
    assert found[0] is not None
    assert_same(found[1], found[0])


class Seen(TorchFunctionMode):
    """Records the functions that are called."""

    def __init__(self):
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(getattr(function, '__name__', ''))
        return function(*args, **(kwargs or {}))


def test_modes_see_the_functions_of_a_plain_layer(layers):
    def run(layer, x):
        with Seen() as mode:
            layer(x)
        return [name for name in mode.names if name in ('linear', 'conv2d', 'gelu')]

    plain, fast, x = layers
    assert run(plain, x) == run(fast, x) != []


def test_flops_are_counted(layers):
    def run(layer, x):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x)
        return counter.get_total_flops()

    plain, fast, x = layers
    assert run(plain, x) == run(fast, x) > 0


@pytest.mark.filterwarnings('ignore')
def test_traced_layers_serve_other_sizes():
    """`torch.jit.trace` records PyTorch's operations, not those of one size."""
    plain = randomize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    fast = torch.jit.trace(accelerate(copy.deepcopy(plain)).eval(), torch.randn(2, 3, 4))
    x = torch.randn(3, 7, 4)
    assert_same(fast(x), plain(x))


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
def test_compiled_layers(layers, grad):
    """As one graph."""

    def run(layer, x):
        torch._dynamo.reset()
        return torch.compile(layer, backend='eager', fullgraph=True)(x)

    with torch.set_grad_enabled(grad):
        same(layers, run)


INPUTS = {
    'transposed': lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    'strided': lambda x: x.repeat_interleave(2, -1)[..., ::2],
    'expanded': lambda x: x[:1].expand_as(x),
    'empty': lambda x: x[:0],
    'inference': lambda x: inference_copy(x),
}


def inference_copy(x):
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize('mode', [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize('kind', INPUTS)
def test_inputs_of_every_kind(layers, kind, mode):
    if kind == 'inference' and mode is torch.enable_grad:
        mode = torch.no_grad  # such a tensor cannot be saved for a gradient

    def run(layer, x):
        with mode():
            out = layer(INPUTS[kind](x))
            return [out, *gradients(layer, out)] if out.requires_grad else [out]

    same(layers, run)


def results_or_error(layer, x):
    """The values of a layer's result, or the kind of error."""
    try:
        out = layer(x)
        if out.is_nested:
            return torch.cat([part.flatten() for part in out.unbind()])
        return out.to_dense()
    except (RuntimeError, ValueError) as error:
        return type(error)


def assert_same_result(found, expected):
    """Of two that `results_or_error` returns."""
    if isinstance(expected, torch.Tensor):
        assert_same(found, expected)
    else:
        assert found is expected


# Tensors whose memory does not have their values as they are, and most of which few layers take.
OTHER_MEMORY = {
    'nested': lambda x: torch.nested.as_nested_tensor(list(x)),
    'oneDNN': lambda x: x.to_mkldnn(),
    'sparse': lambda x: x.to_sparse(),
    'sparse rows': lambda x: x.to_sparse_csr(),
    'negated': lambda x: x._neg_view(),
    'zero': lambda x: torch._efficientzerotensor(x.shape),
}


@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors', 'ignore:Sparse CSR')
@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('kind', OTHER_MEMORY)
def test_inputs_in_other_memory(layers, kind, grad):
    plain, fast, x = layers
    if kind == 'sparse rows' and x.dim() > 2:
        kind = 'sparse'
    with torch.set_grad_enabled(grad):
        expected, found = [results_or_error(each, OTHER_MEMORY[kind](x)) for each in (plain, fast)]
    assert_same_result(found, expected)


@pytest.mark.parametrize('kind', ['negated', 'zero'])
@torch.no_grad()
def test_a_layer_norm_of_inputs_in_other_memory(kind):
    """It reads the memory itself."""
    plain = randomize(LayerNorm(8))
    fast = accelerate(copy.deepcopy(plain))
    assert type(fast) is FastLayerNorm
    x = OTHER_MEMORY[kind](torch.randn(3, 8))
    assert torch.equal(fast(x), plain(x))


@pytest.mark.filterwarnings('ignore:Sparse CSR')
@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('kind', ['sparse', 'sparse rows'])
@torch.no_grad()
def test_sparse_weights(kind, when):
    """For weights of kind 'sparse', the plain layer of PyTorch 2.7 raises, and so does ours."""
    model = randomize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    plain, fast = copy.deepcopy(model), copy.deepcopy(model)
    if when == 'after':
        accelerate(fast)
    for each in (plain, fast):
        for layer in (each[0], each[2]):
            weight = OTHER_MEMORY[kind](layer.weight.detach())
            layer.weight = nn.Parameter(weight, requires_grad=False)
    accelerate(fast)
    x = torch.randn(2, 3, 4)
    assert_same_result(results_or_error(fast, x), results_or_error(plain, x))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
def test_autocast(layers, grad, dtype):
    """Bit-identical but for the memory format of convolutions: it computes as before."""

    def run(layer, x):
        with torch.set_grad_enabled(grad), torch.autocast('cpu', dtype):
            out = layer(x)
        return [out, *gradients(layer, out.float())] if grad else [out]

    plain, fast, x = layers
    torch.testing.assert_close(run(fast, x), run(plain, x), rtol=0.03, atol=0.1)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_of_a_backward_pass_alone(layers, dtype):
    """What a forward pass in float32 saves has not the dtype of autocast."""

    def run(layer, x):
        x = x.clone().requires_grad_()
        loss = layer(x).square().sum()
        with torch.autocast('cpu', dtype):
            return torch.autograd.grad(loss, [x, *layer.parameters()])

    plain, fast, x = layers
    torch.testing.assert_close(run(fast, x), run(plain, x), rtol=0.03, atol=0.1)


@pytest.mark.parametrize('name', ['weight', 'bias'])
def test_pruned_after(layers, name):
    """A pruned weight or bias is computed before each call, in training and in inference."""

    def run(layer, x):
        layer = copy.deepcopy(layer)
        for module in layer.modules():
            if getattr(module, name, None) is not None:
                prune.random_unstructured(module, name, 0.5)
                mask = getattr(module, f'{name}_mask')
                mask.copy_(torch.arange(mask.numel()).view(mask.shape) % 2)
        optimizer = torch.optim.SGD(layer.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.1)
            inferred = layer(x)
        return inferred, layer(x)

    same(layers, run)


@pytest.mark.parametrize('shared', [False, True], ids=['own', 'shared'])
def test_weights_that_serve_twice(layers, shared):
    """A layer that is called twice, and two layers with one weight."""

    def run(layer, x):
        second = layer
        if shared:
            second = copy.deepcopy(layer)
            others = dict(layer.named_modules())
            for name, module in second.named_modules():
                for key in module._parameters:
                    module._parameters[key] = others[name]._parameters[key]
        return gradients(layer, layer(x) + second(2 * x).relu())

    same(layers, run)


def test_copies_are_independent(layers):
    plain, fast, x = layers
    copied = copy.deepcopy(fast)
    expected = fast(x)
    with torch.no_grad():
        for parameter in itertools.chain(copied.parameters(), plain.parameters()):
            parameter.zero_()
    assert torch.equal(copied(x), plain(x))
    assert torch.equal(fast(x), expected)


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
def test_functional_calls(layers, grad):
    """Other tensors in the place of parameters."""

    def run(layer, x):
        given = {n: (p.detach() * 2).requires_grad_(grad) for n, p in layer.named_parameters()}
        with torch.set_grad_enabled(grad):
            out = torch.func.functional_call(layer, given, (x,))
            return torch.autograd.grad(out.square().sum(), list(given.values())) if grad else out

    same(layers, run)


def test_what_a_linear_layer_saves():
    """No more than a plain one: of a frozen layer no input, of the first one no weight."""
    for trained, given in itertools.product((False, True), repeat=2):
        sizes = []
        for accelerated in (False, True):
            layer = nn.Linear(4, 3).requires_grad_(trained)
            if accelerated:
                accelerate(layer)
            x = torch.randn(5, 7, 4, requires_grad=given)
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
                layer(x)
            sizes.append(sorted(y.numel() for y in saved))
        assert sizes[0] == sizes[1]


def test_results_of_one_time_are_those_of_another(layers):
    """Without gradient, with it, and in `inference_mode`."""
    _, fast, x = layers
    expected = fast(x)
    for mode in (torch.no_grad, torch.inference_mode, nullcontext):
        with mode():
            assert_same(fast(x), expected)


def test_a_large_mlp_is_differentiated_twice(monkeypatch):
    monkeypatch.setattr(products, 'AT_A_TIME', 16)
    monkeypatch.setattr(products, 'LARGEST_SAVED', 16)
    plain = randomize(OnMap(MLP(4, 8)))
    fast = accelerate(copy.deepcopy(plain))
    found = []
    for layer in (plain, fast):
        x = torch.linspace(-1, 1, 40).view(1, 2, 5, 4).requires_grad_()
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [x, *layer.parameters()][:-1]))
    assert_same(*found)


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('shape', [(2, 300, 8), (300, 8), (1, 2, 15, 20, 8)])
def test_attention_of_tokens_that_are_no_map(shape, grad):
    plain = randomize(GlobalAttention(8, 2, sr_ratio=1))
    fast = accelerate(copy.deepcopy(plain))
    x = torch.randn(shape)
    with torch.set_grad_enabled(grad):
        expected, found = [
            results_or_error(functools.partial(each, grid=Grid(15, 20)), x)
            for each in (plain, fast)
        ]
    assert_same_result(found, expected)


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('method', ['_conv_forward', 'contract'])
def test_methods_of_parts_that_are_replaced(layers, method, grad):
    """A convolution's is a common way to give it other borders."""

    def doubled(function, *args):
        return 2 * function(*args)

    plain, fast, x = layers
    for model in (plain, fast):
        for module in model.modules():
            if hasattr(module, method):
                setattr(module, method, functools.partial(doubled, getattr(module, method)))
    with torch.set_grad_enabled(grad):
        same(layers, lambda layer, x: layer(x))


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize(
    ('build', 'method'),
    [
        (GlobalAttention, 'attend'),
        (GlobalAttention, 'by_head'),
        (GlobalAttention, 'split_by_head'),
        (WindowAttention, 'attend'),
        (WindowAttention, 'split_by_head'),
    ],
)
def test_methods_of_an_attention_that_are_replaced(build, method, grad):
    """They are a way to look at queries, keys and weights."""

    def doubled(function, *args):
        found = function(*args)
        return 2 * found if isinstance(found, torch.Tensor) else [2 * part for part in found]

    plain = randomize(OnMap(build(8, 2, 3)))
    fast = accelerate(copy.deepcopy(plain))
    x = torch.randn(2, 9, 7, 8)
    results = []
    for model in (plain, fast):
        setattr(model.layer, method, functools.partial(doubled, getattr(model.layer, method)))
        with torch.set_grad_enabled(grad):
            results.append(model(x))
    assert_same(*results)
