"""Layer norms in bfloat16 on a CPU, whose gradients of weight and bias PyTorch sums in bfloat16."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from cpvt_pyramid import accelerate
from cpvt_pyramid.bfloat16 import CorrectedBFloat16, layer_norm
from cpvt_pyramid.layers import LayerNorm
from cpvt_pyramid.versions import VERSION
from tests.models.ours import classifier, dense, linear, pcpvt, pvt_v2, svt

# The dtype of tokens and that of parameters. Some older versions have no layer norm in float16.
DTYPES = {
    'bfloat16': (torch.bfloat16, torch.bfloat16),
    'autocast': (torch.bfloat16, torch.float32),
    'float16': (torch.float16, torch.float16),
}
ROUNDING = 0.01


def tensors(tokens, dtype=torch.bfloat16, of_parameters=torch.bfloat16, dim=16):
    """Tokens, weight, bias and the gradient of the result, whose mean is not zero."""
    torch.manual_seed(0)
    x = torch.randn(1, tokens, dim).to(dtype)
    weight = torch.randn(dim).to(of_parameters)
    bias = torch.randn(dim).to(of_parameters)
    return x, weight, bias, (torch.randn(1, tokens, dim) / 64 + 1 / 64).to(dtype)


def gradients(function, x, weight, bias, grad):
    """The result and the gradients of x, weight and bias."""
    inputs = [None if y is None else y.clone().requires_grad_() for y in (x, weight, bias)]
    out = function(inputs[0], weight.shape, *inputs[1:], 1e-6)
    out.backward(grad.to(out.dtype))
    return [out, *(y.grad for y in inputs if y is not None)]


def in_float32(values):
    return [None if y is None else y.float() for y in values]


def relative(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def assert_near(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert relative(a, b) < ROUNDING


def in_context(*args):
    with CorrectedBFloat16():
        return F.layer_norm(*args)


def as_a_module(x, shape, weight, bias, eps):
    parameters = {'weight': weight, 'bias': bias}
    return torch.func.functional_call(LayerNorm(shape, eps), parameters, (x,))


@pytest.mark.parametrize('function', [layer_norm, in_context, as_a_module])
@pytest.mark.parametrize('tokens', [0, 1, 300, 70_000])
@pytest.mark.parametrize('case', DTYPES)
def test_gradients(function, case, tokens):
    """A sum of 70,000 gradients; in PyTorch's, nine tenths of it are lost."""
    given = tensors(tokens, *DTYPES[case])
    found = gradients(function, *given)
    before = gradients(F.layer_norm, *given)
    assert [y.dtype for y in found] == [y.dtype for y in before]
    assert torch.equal(found[0], before[0])
    if tokens:
        assert_near(found, gradients(F.layer_norm, *in_float32(given)))
        assert relative(found[1], before[1]) < ROUNDING


def test_what_is_avoided():
    """If this fails with a new PyTorch, it may need no correction."""
    given = tensors(70_000)
    wrong = gradients(F.layer_norm, *given)[-1]
    assert relative(wrong, gradients(F.layer_norm, *in_float32(given))[-1]) > 0.1


@pytest.mark.parametrize('trains', [(0,), (1,), (2,), (0, 2), (0, 1)], ids=str)
def test_some_gradients(trains):
    *inputs, grad = tensors(5000)
    found = []
    for function, dtype in ((layer_norm, torch.bfloat16), (F.layer_norm, torch.float32)):
        values = [y.to(dtype) for y in inputs]
        chosen = [values[i].requires_grad_() for i in trains]
        out = function(values[0], (16,), *values[1:])
        found.append(torch.autograd.grad(out, chosen, grad.to(dtype)))
    assert_near(*found)


def test_other_shapes():
    """Without a bias, with two normalized axes, with memory in another order, without a batch."""
    x, weight, _, grad = tensors(4096)
    found = gradients(layer_norm, x, weight, None, grad)
    assert_near(found, gradients(F.layer_norm, *in_float32((x, weight, None, grad))))

    two = [y.unflatten(-1, (2, 8)) for y in tensors(4096)]
    assert_near(gradients(layer_norm, *two), gradients(F.layer_norm, *in_float32(two)))

    columns = tensors(4096)
    columns = [columns[0].mT.contiguous().mT, *columns[1:3], columns[3][:, :1].expand(1, 4096, 16)]
    assert_near(gradients(layer_norm, *columns), gradients(F.layer_norm, *in_float32(columns)))

    one = [y.flatten() for y in tensors(1)]
    assert_near(gradients(layer_norm, *one), gradients(F.layer_norm, *in_float32(one)))


MODELS = {
    'pcpvt': pcpvt,
    'svt': svt,
    'pvt_v2': pvt_v2,
    'linear': linear,
    'dense': dense,
    'classifier': classifier,
}


@pytest.mark.parametrize('build', MODELS)
def test_all_norms_of_our_models(build):
    norms = [part for part in MODELS[build]().modules() if isinstance(part, nn.LayerNorm)]
    assert {type(norm) for norm in norms} == {LayerNorm}


class Inputs:
    """What each norm of a model gets, and the gradient of what it returns."""

    def __init__(self, model):
        self.of = {}
        for name, part in model.named_modules():
            if isinstance(part, nn.LayerNorm):
                part.register_forward_hook(self.keep(name))

    def keep(self, name):
        def hook(norm, given, out):
            grads = []
            out.register_hook(grads.append)
            self.of[name] = (norm, given[0].detach(), grads)

        return hook


@pytest.mark.parametrize('padded', [False, True], ids=['', 'padded'])
@pytest.mark.parametrize('accelerated', [False, True], ids=['plain', 'accelerated'])
@pytest.mark.parametrize('way', ['bfloat16', 'autocast'])
def test_norms_of_a_model(way, accelerated, padded):
    """The gradients of each norm's parameters are the sums, over its tokens, in float32."""
    model = pcpvt(out_indices=(0, 3)).train()
    image = torch.randn(2, 3, 256, 320)
    if way == 'bfloat16':
        model, image = model.bfloat16(), image.bfloat16()
    if accelerated and VERSION >= (2, 7):
        accelerate(model)
    inputs = Inputs(model)
    valid = torch.tensor([[200, 320], [256, 250]]) if padded else None
    with torch.autocast('cpu', torch.bfloat16) if way == 'autocast' else nullcontext():
        maps = model(image, valid=valid)
    sum(y.float().mean() for y in maps).backward()
    assert len(inputs.of) > 8
    some = False
    for norm, x, (grad,) in inputs.of.values():
        some = some or x.dtype == torch.bfloat16
        normalized = F.layer_norm(x.float(), x.shape[-1:], eps=norm.eps)
        axes = tuple(range(x.dim() - 1))
        expected = (grad.float() * normalized).sum(axes), grad.float().sum(axes)
        size = grad.float().abs().sum(axes)  # sums may cancel
        for parameter, total in zip((norm.weight, norm.bias), expected):
            error = (parameter.grad.float() - total).abs()
            assert (error <= 1e-2 * total.abs() + 1e-4 * size).all()
    assert some


def test_double_backward():
    x, weight, bias, _ = tensors(50)
    results = []
    for function, dtype in ((layer_norm, torch.bfloat16), (F.layer_norm, torch.float32)):
        inputs = [y.to(dtype).requires_grad_() for y in (x, weight, bias)]
        out = function(inputs[0], (16,), *inputs[1:])
        grads = torch.autograd.grad(out.float().pow(3).mean(), inputs, create_graph=True)
        penalty = sum(y.float().square().sum() for y in grads)
        results.append(torch.autograd.grad(penalty, inputs))
    assert_near(*results)


TRANSFORMS = {
    'grad': lambda f, each: torch.func.grad(f, each),
    'per sample': lambda f, each: torch.func.vmap(torch.func.grad(f, each), (0, None, None)),
    'of samples': lambda f, each: torch.func.grad(
        lambda *given: torch.func.vmap(f, (0, None, None))(*given).sum(), each
    ),
    'reverse mode': lambda f, each: torch.func.jacrev(f, each),
    'forward mode': lambda f, each: torch.func.jacfwd(f, each),
}


@pytest.mark.parametrize('transform', TRANSFORMS)
def test_functions_of_torch_func(transform):
    results = []
    for function, dtype in ((layer_norm, torch.bfloat16), (F.layer_norm, torch.float32)):

        def loss(x, weight, bias, function=function, dtype=dtype):
            out = function(x.to(dtype), (16,), weight.to(dtype), bias.to(dtype))
            return out.float().pow(3).sum()

        given = in_float32(tensors(50)[:3])
        results.append(TRANSFORMS[transform](loss, (0, 1, 2))(*given))
    assert_near(*results)


@pytest.mark.parametrize('moves', range(3))
def test_forward_mode(moves):
    results = []
    with forward_ad.dual_level():
        for function, dtype in ((layer_norm, torch.bfloat16), (F.layer_norm, torch.float32)):
            inputs = [y.to(dtype).requires_grad_() for y in tensors(50)[:3]]
            inputs[moves] = forward_ad.make_dual(inputs[moves], inputs[moves].detach().cos())
            out = function(inputs[0], (16,), *inputs[1:])
            results.append([forward_ad.unpack_dual(out).tangent])
    assert_near(*results)


def test_several_gradients_at_once():
    inputs = [y.requires_grad_() for y in tensors(50)[:3]]
    out = layer_norm(inputs[0], (16,), *inputs[1:])
    grads = torch.randn(3, *out.shape).bfloat16()
    found = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, inputs, grad, retain_graph=True) for grad in grads]
    assert_near(found, [torch.stack(of_input) for of_input in zip(*each)])


def saved_bytes(function, x, weight, bias):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda y: sizes.append(y.numel() * y.element_size()), lambda y: y
    ):
        function(x.clone().requires_grad_(), (16,), weight, bias)
    return sum(sizes)


def test_it_saves_no_more():
    x, weight, bias, _ = tensors(500, of_parameters=torch.float32)
    parameters = [y.requires_grad_() for y in (weight, bias)]
    assert saved_bytes(layer_norm, x, *parameters) <= saved_bytes(F.layer_norm, x, *parameters)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_other_dtypes_are_left_to_pytorch(dtype):
    norm, x = LayerNorm(8).to(dtype), torch.randn(3, 8, dtype=dtype)
    assert type(norm(x).grad_fn).__name__ == 'NativeLayerNormBackward0'
    with torch.no_grad():
        assert norm.bfloat16()(x.bfloat16()).grad_fn is None


def test_the_module_is_pytorchs():
    """Names, printed form, initial values, copies and files."""
    ours, theirs = LayerNorm(8, eps=1e-6), nn.LayerNorm(8, eps=1e-6)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    options = {'weights_only': False}
    for other in (copy.deepcopy(ours), torch.load(file, **options)):
        assert type(other) is LayerNorm
        torch.testing.assert_close(other.state_dict(), theirs.state_dict())


@pytest.mark.parametrize('hook', ['forward', 'backward', 'tensor'])
def test_hooks(hook):
    """They are called once, with what they get from PyTorch's layer."""
    seen = []
    for kind in (nn.LayerNorm, LayerNorm):
        calls = []
        norm = kind(16).bfloat16()
        x = tensors(50)[0].requires_grad_()
        if hook == 'forward':
            norm.register_forward_hook(lambda _, given, out, calls=calls: calls.append(out))
        elif hook == 'backward':
            norm.register_full_backward_hook(
                lambda _, grads, of_out, calls=calls: calls.append(grads[0])
            )
        else:
            norm.bias.register_hook(calls.append)
        norm(x).float().pow(3).sum().backward()
        seen.append(calls)
    assert len(seen[0]) == len(seen[1]) == 1
    assert_near(seen[1], seen[0])


def operations(graph):
    """Without the inputs, whose names depend on the version of PyTorch."""
    return [str(node.target) for node in graph.nodes if node.op.startswith('call')]


@pytest.mark.parametrize('way', ['compiled', 'exported', 'traced'])
def test_graphs_are_those_of_pytorchs_layer(way):
    x = tensors(50)[0].requires_grad_()
    found = []
    for kind in (nn.LayerNorm, LayerNorm):
        layer = nn.Sequential(kind(16).bfloat16())
        if way == 'exported':
            found.append(operations(torch.export.export(layer, (x,)).graph))
        elif way == 'traced':
            nodes = torch.jit.trace(layer, (x,)).inlined_graph.nodes()
            found.append([node.kind() for node in nodes])
        else:
            graphs = []

            def backend(graph, given, graphs=graphs):
                graphs.append(operations(graph.graph))
                return graph

            torch._dynamo.reset()
            torch.compile(layer, backend=backend, fullgraph=True)(x)
            (graph,) = graphs
            found.append(graph)
    assert found[0] == found[1]
    assert found[0]
