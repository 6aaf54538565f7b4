"""MLPs that recompute their GELU: the same results and derivatives, and one wide map less."""

import copy

import pytest
import torch
import torch.nn.functional as F
from reference import kept
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from cpvt_pyramid import ARCHS, CPVTPyramid, accelerate
from cpvt_pyramid.acceleration.processor import multiplies_bfloat16
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.model import MLP, ConvMLP
from cpvt_pyramid.recompute import gelu_linear
from tests.models.ours import pcpvt, pvt_v2
from tests.models.ports import randomize

TINY = ARCHS['pcpvt_nano']._replace(
    dims=(16, 32), heads=(1, 2), mlp_ratios=(2, 2), depths=(1, 1), sr_ratios=(2, 1)
)


def saved_bytes(function, *inputs, but_for=()):
    """Bytes that a call keeps for its gradient, each storage once, `but_for` those of tensors."""
    own = {x.untyped_storage().data_ptr() for x in but_for}
    found = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in kept(function, *inputs)}
    return sum(storage.nbytes() for address, storage in found.items() if address not in own)


def pair(kind=MLP, **options):
    """An MLP that saves both wide maps, and one that recomputes the second."""
    plain = randomize(kind(8, 32, **options))
    frugal = kind(8, 32, recompute_gelu=True, **options)
    frugal.load_state_dict(plain.state_dict())
    return plain, frugal


def saved_by_mlp(mlp, autocast):
    x = torch.randn(2, 9, 7, 8, requires_grad=True)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        return saved_bytes(mlp, x, Grid(*x.shape[1:3]), but_for=[x, *mlp.parameters()])


@pytest.mark.parametrize('autocast', [False, True], ids=['float32', 'autocast'])
@pytest.mark.parametrize('kind', [MLP, ConvMLP])
def test_one_wide_map_is_saved(kind, autocast):
    plain, frugal = pair(kind)
    wide_map = 2 * 9 * 7 * 32 * (2 if autocast else 4)
    assert saved_by_mlp(plain, autocast) - saved_by_mlp(frugal, autocast) == wide_map


# Elsewhere accelerated models compute with autocast as plain ones do.
needs_bfloat16 = pytest.mark.skipif(not multiplies_bfloat16(), reason='needs AVX-512')


@pytest.mark.parametrize(
    'autocast', [False, pytest.param(True, marks=needs_bfloat16)], ids=['float32', 'autocast']
)
@pytest.mark.parametrize('kind', [MLP, ConvMLP])
def test_an_accelerated_mlp_saves_one_wide_map(kind, autocast):
    """In any case."""
    least = saved_by_mlp(pair(kind)[1], autocast)
    biases = 2 * 2 * (32 + 8)  # autocast's copies
    for mlp in pair(kind):
        assert saved_by_mlp(accelerate(mlp), autocast) <= least + biases


def saved_under_autocast(model, image):
    with torch.autocast('cpu', torch.bfloat16):
        return saved_bytes(model.train(), image, but_for=model.parameters())


@pytest.mark.parametrize('build', [pcpvt, pvt_v2])
def test_a_model_under_autocast_saves_less(build):
    image = torch.randn(1, 3, 64, 64)
    wide = sum(wide_values(build(), image))
    plain, frugal = (build(recompute_gelu=each) for each in (False, True))
    assert wide
    assert saved_under_autocast(plain, image) - saved_under_autocast(frugal, image) >= 2 * wide


@needs_bfloat16
@pytest.mark.parametrize('build', [pcpvt, pvt_v2])
def test_an_accelerated_model_under_autocast_saves_as_little(build):
    """In any case."""
    image = torch.randn(1, 3, 64, 64)
    least = saved_under_autocast(build(recompute_gelu=True), image)
    for recompute_gelu in (False, True):
        fast = accelerate(build(recompute_gelu=recompute_gelu))
        assert saved_under_autocast(fast, image) <= 1.01 * least  # biases in bfloat16


def wide_values(model, image):
    """The number of values of each map before a GELU."""
    sizes = []
    for module in model.modules():
        if isinstance(module, MLP):
            module.fc2.register_forward_pre_hook(lambda _, given: sizes.append(given[0].numel()))
    model(image)
    return sizes


@pytest.mark.parametrize('trains', ['all', 'x', 'weight', 'bias'])
@pytest.mark.parametrize('kind', [MLP, ConvMLP])
def test_gradients_are_the_same(kind, trains):
    results = []
    for mlp in pair(kind):
        mlp.double()
        x = torch.ones(2, 5, 6, 8, dtype=torch.double).cumsum(1).sin()
        chosen = {'x': x, 'weight': mlp.fc2.weight, 'bias': mlp.fc2.bias}
        if trains == 'all':
            chosen.update(mlp.named_parameters())
        else:
            mlp.requires_grad_(False)
            chosen = {trains: chosen[trains]}
        for leaf in chosen.values():
            leaf.requires_grad_()
        out = mlp(x, Grid(*x.shape[1:3]))
        results.append([out, *torch.autograd.grad(out.square().sum(), list(chosen.values()))])
    torch.testing.assert_close(*results)


class Adapted(nn.Linear):
    """An adapter, as LoRA's, shows the weight of the layer that it wraps, and must be called."""

    def forward(self, x):
        return super().forward(x) + 1


CHANGES = {
    'pruned weight': lambda layer: prune.l1_unstructured(layer, 'weight', 0.5),
    'pruned bias': lambda layer: prune.l1_unstructured(layer, 'bias', 0.5),
    'spectral norm': nn.utils.spectral_norm,
    'weight norm': parametrizations.weight_norm,
    'parametrized bias': lambda layer: nn.utils.parametrize.register_parametrization(
        layer, 'bias', nn.Tanh()
    ),
    'no bias': lambda layer: setattr(layer, 'bias', None),
    'adapter': lambda layer: setattr(layer, '__class__', Adapted),
    'hook': lambda layer: layer.register_forward_hook(lambda module, given, out: 2 * out),
    'hook before': lambda layer: layer.register_forward_pre_hook(
        lambda module, given: given[0] + 1
    ),
    'hook of gradients': lambda layer: layer.register_full_backward_hook(
        lambda module, grads, out: tuple(2 * grad for grad in grads)
    ),
    'own forward': lambda layer: setattr(layer, 'forward', lambda x: x[..., :8] * 3),
}


@pytest.mark.parametrize('change', CHANGES)
def test_changed_layers_train_as_they_do_in_a_plain_mlp(change):
    """Two steps: a bias that is computed once would be differentiated twice, or stay as it was."""
    x = torch.randn(1, 3, 3, 8)
    results = []
    for mlp in pair():
        torch.manual_seed(0)
        CHANGES[change](mlp.fc2)
        optimizer = torch.optim.SGD(mlp.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            mlp(x, Grid(*x.shape[1:3])).square().sum().backward()
            optimizer.step()
        grads = {name: p.grad for name, p in mlp.named_parameters()}
        results.append([mlp(x, Grid(*x.shape[1:3])), grads])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('map_dtype', [torch.float32, torch.bfloat16])
def test_under_autocast(map_dtype):
    """A wide map is float32 there if what computes it is, such as an adapter."""
    results = []
    for mlp in pair():
        x = torch.linspace(-2, 2, 32).repeat(3, 5, 1).to(map_dtype).requires_grad_()
        with torch.autocast('cpu', torch.bfloat16):
            out = mlp.contract(x)
        out.float().square().sum().backward()
        results.append([out, x.grad, mlp.fc2.weight.grad, mlp.fc2.bias.grad])
    assert results[0][2].dtype == torch.float32
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


def test_a_shared_weight_under_autocast():
    """Autocast caches its copy of a weight, which must not be one without a gradient."""
    grads = []
    for mlp in pair():
        x = torch.randn(3, 8, generator=torch.manual_seed(0))
        with torch.autocast('cpu', torch.bfloat16):
            hidden = mlp.fc1(x)
            out = mlp.contract(hidden).sum() + mlp.fc2(hidden).square().sum()
        out.backward()
        grads.append(mlp.fc2.weight.grad)
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.2)


def test_derivatives_of_every_kind():
    x, weight = (torch.randn(4, 4).double().requires_grad_() for _ in range(2))
    for bias in (None, torch.randn(4).double().requires_grad_()):
        assert torch.autograd.gradcheck(
            gelu_linear, (x, weight, bias), check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(gelu_linear, (x, weight, bias))


@pytest.mark.parametrize('shape', [(4,), (0, 4), (2, 0, 4), (2, 3, 5, 4)], ids=str)
def test_shapes(shape):
    results = []
    for function in (gelu_linear, lambda x, *layer: F.linear(F.gelu(x), *layer)):
        torch.manual_seed(0)
        x, weight, bias = (torch.randn(s, requires_grad=True) for s in (shape, (3, 4), (3,)))
        out = function(x, weight, bias)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, weight, bias))])
    torch.testing.assert_close(*results)


def test_a_map_that_is_changed_before_the_backward_pass_is_an_error():
    """The GELU of other values must not be taken."""
    x = torch.randn(2, 4)
    out = gelu_linear(x, torch.randn(3, 4, requires_grad=True))
    x.mul_(2)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        out.sum().backward()


TRANSFORMS = {
    'vmap': lambda f, w, t: torch.vmap(f)(torch.stack([w, w + t])),
    'grad': lambda f, w, t: torch.func.grad(lambda w: f(w).sum())(w),
    'grad of each': lambda f, w, t: torch.vmap(torch.func.grad(lambda w: f(w).sum()))(
        torch.stack([w, w + t])
    ),
    'vjp': lambda f, w, t: torch.func.vjp(f, w)[1](torch.ones_like(f(w))),
    'jvp': lambda f, w, t: torch.func.jvp(f, (w,), (t,)),
    'jacrev': lambda f, w, t: torch.func.jacrev(lambda w: f(w).mean((0, 1, 2)))(w),
    'jacfwd': lambda f, w, t: torch.func.jacfwd(lambda w: f(w).mean((0, 1, 2)))(w),
    'hessian': lambda f, w, t: torch.func.hessian(lambda w: f(w).sum())(w),
}


@pytest.mark.parametrize('name', ['x', 'fc1.bias', 'fc2.bias', 'fc2.weight'])
@pytest.mark.parametrize('transform', TRANSFORMS)
def test_functions_of_torch_func(transform, name):
    results = []
    torch.manual_seed(0)
    x = torch.randn(1, 2, 2, 8)
    for mlp in pair():
        value = x if name == 'x' else dict(mlp.named_parameters())[name].detach()
        tangent = torch.linspace(-1, 1, value.numel()).view(value.shape)

        def function(given, mlp=mlp):
            if name == 'x':
                return mlp(given, Grid(*x.shape[1:3]))
            return torch.func.functional_call(mlp, {name: given}, (x, Grid(*x.shape[1:3])))

        results.append(TRANSFORMS[transform](function, value, tangent))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('recompute_gelu', [False, True])
def test_functions_of_torch_func_on_a_model(recompute_gelu):
    """By parameters before the MLP, such as those of a LayerNorm; per-sample gradients."""
    model = randomize(CPVTPyramid(TINY, recompute_gelu=recompute_gelu, out_indices=(0, 1)))
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        each = torch.vmap(lambda image: model(image[None])[-1][0])(images)
        torch.testing.assert_close(each, model(images)[-1])
    name = 'blocks.0.0.norm1.weight'
    weight = dict(model.named_parameters())[name]

    def loss(weight, image):
        return torch.func.functional_call(model, {name: weight}, (image[None],))[-1].sum()

    found = torch.func.grad(loss)(weight.detach(), images[0])
    (expected,) = torch.autograd.grad(model(images[:1])[-1].sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('way', ['checkpointed', 'on the CPU', 'copied', 'compiled'])
def test_what_else_saves_tensors(way):
    x = torch.randn(1, 3, 3, 8)
    results = []
    for mlp in pair():
        grid = Grid(*x.shape[1:3])
        if way == 'checkpointed':
            out = checkpoint(mlp, x, grid, use_reentrant=False)
            out.square().sum().backward()
        elif way == 'on the CPU':
            with torch.autograd.graph.save_on_cpu():
                mlp(x, grid).square().sum().backward()
        elif way == 'copied':
            mlp = copy.deepcopy(mlp)
            mlp(x, grid).square().sum().backward()
        else:
            torch._dynamo.reset()
            compiled = torch.compile(
                lambda x, mlp=mlp: mlp.contract(mlp.fc1(x)), backend='aot_eager'
            )
            compiled(x).square().sum().backward()
        results.append([p.grad for p in mlp.parameters()])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_checkpoints_keep_no_wide_map():
    """The map that a recomputing MLP saves is dropped by a checkpoint around it, too."""
    x = torch.randn(1, 9, 9, 8, requires_grad=True)
    _, mlp = pair()
    own = [x, *mlp.parameters()]
    grid = Grid(*x.shape[1:3])
    run = lambda x: checkpoint(mlp, x, grid, use_reentrant=False)  # noqa: E731
    assert saved_bytes(run, x, but_for=own) == 0
