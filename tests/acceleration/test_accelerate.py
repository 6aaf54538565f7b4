"""Accelerated models: the same maps and gradients, what is left alone, and back again."""

import copy
import io
import math
import pickle
import statistics
import threading
import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from reference import same_maps
from support import PINNED_TORCH
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode

from cpvt_pyramid import ARCHS, CPVT, CPVTPyramid, accelerate
from cpvt_pyramid.acceleration import accelerate as acceleration
from cpvt_pyramid.acceleration import (
    attention,
    blocks,
    conv_mlp,
    embeddings,
    kernels,
    norms,
    patches,
    pegs,
    processor,
    products,
    windows,
)
from cpvt_pyramid.acceleration.memory import keep_freed_memory
from cpvt_pyramid.acceleration.patches import PatchConv
from cpvt_pyramid.acceleration.products import FusedMLP, OneDNNLinear
from cpvt_pyramid.acceleration.winograd import WinogradConv2d
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.model import MLP, ConvMLP, PatchEmbed, set_checkpointing
from tests.models.ours import BACKBONES, VALID, images, maps_and_gradients
from tests.models.ports import randomize

SIZES = [(100, 75), (64, 96), (1, 5)]


# Of maps. The patches of the columnar model have 768 values, which are summed in another order.
ROUNDING = dict(rtol=1.3e-6, atol=2e-5)


def tiny(name='pcpvt_nano', **options):
    return randomize(CPVTPyramid(name, **options)).eval()


def classes(model):
    return [type(module) for module in model.modules()]


def assert_same_gradients(found, expected):
    for a, b in zip(found, expected):
        # both round: a sum of gradients may cancel
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-5 * b.abs().max().item())


@cache
def plain_results(name, is_padded):
    """A plain model, its maps and its gradients, which no way of acceleration changes."""
    torch.manual_seed(0)
    model = BACKBONES[name]().train()
    return model, *maps_and_gradients(model, images(), VALID if is_padded else None)


@cache
def plain_in_bfloat16(name, is_padded, autocast):
    """How far from float32 the results of a plain model in bfloat16 are."""
    low = low_precision_model(name, is_padded, autocast)
    return distances_in_bfloat16(low, name, is_padded, autocast)


def low_precision_model(name, is_padded, autocast):
    """A copy of a plain model, in bfloat16 if autocast does not make it so."""
    model = copy.deepcopy(plain_results(name, is_padded)[0])
    return model if autocast else model.bfloat16()


def distances_in_bfloat16(low, name, is_padded, autocast):
    """How far the results of a model in bfloat16 are from those of the plain one in float32."""
    _, maps, grads = plain_results(name, is_padded)
    valid = VALID if is_padded else None
    image = images() if autocast else images().bfloat16()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        low_maps, low_grads = maps_and_gradients(low, image, valid)
        with torch.no_grad():
            inferred = low.eval()(image, valid)
    found = [*low_maps, *low_grads, *inferred]
    return [distance(x, y) for x, y in zip(found, [*maps, *grads, *maps])]


@pytest.fixture(params=['as it is', 'in parts', 'grouped'])
def way(request, monkeypatch):
    """What depends on the processor, its threads and the size of a map."""
    if request.param == 'in parts':
        monkeypatch.setattr(attention, 'fused_attention_is_slow', lambda dtype: True)
        monkeypatch.setattr(windows, 'FEWEST_IN_WINDOW', 1)
        monkeypatch.setattr(attention, 'is_worth_products', lambda q, k: True)
        monkeypatch.setattr(attention, 'SCORES_AT_A_TIME', 4000)
        monkeypatch.setattr(products, 'AT_A_TIME', 4000)
        monkeypatch.setattr(products, 'LARGEST_SAVED', 4000)
        monkeypatch.setattr(conv_mlp, 'AT_A_TIME', 2000)
        monkeypatch.setattr(conv_mlp, 'FEWEST_ROWS', 3)
    elif request.param == 'grouped':
        monkeypatch.setattr(attention, 'MIN_GROUP', 3)
        monkeypatch.setattr(torch, 'get_num_threads', lambda: 7)


@pytest.mark.parametrize('valid', [None, VALID], ids=['whole', 'padded'])
@pytest.mark.parametrize('name', BACKBONES)
def test_maps_and_gradients_are_the_same(name, valid, way):
    model, maps, grads = plain_results(name, valid is not None)
    fast = accelerate(copy.deepcopy(model))
    assert any(type(module) is OneDNNLinear for module in fast.modules())
    fast_maps, fast_grads = maps_and_gradients(fast, images(), valid)
    same_maps(fast_maps, maps, **ROUNDING)
    assert_same_gradients(fast_grads, grads)
    with torch.no_grad():
        same_maps(fast.eval()(images(), valid), maps, **ROUNDING)
    set_checkpointing(fast, True)
    assert_same_gradients(maps_and_gradients(fast.train(), images(), valid)[1], grads)


@pytest.mark.parametrize('autocast', [False, True], ids=['weights', 'autocast'])
@pytest.mark.parametrize('valid', [None, VALID], ids=['whole', 'padded'])
@pytest.mark.parametrize('name', BACKBONES)
def test_bfloat16_is_as_near_to_float32_as_a_plain_model(name, valid, autocast, way):
    case = name, valid is not None
    low = accelerate(low_precision_model(*case, autocast))
    is_fast = any(type(module) is OneDNNLinear for module in low.modules())
    assert is_fast == (autocast or processor.multiplies_bfloat16())
    fast = distances_in_bfloat16(low, *case, autocast)
    slow = plain_in_bfloat16(*case, autocast)  # these depend on how sums cancel
    assert all(map(math.isfinite, fast))
    assert statistics.median(slow) < (0.04 if PINNED_TORCH else 0.05)  # older ones are coarser
    assert statistics.median(fast) < 3 * statistics.median(slow)
    assert max(fast) < 3 * max(slow)  # 2.7 without functions of our own


@pytest.mark.parametrize('missing', ['kernels', 'those that AMX is better than'])
@pytest.mark.parametrize('valid', [None, VALID], ids=['whole', 'padded'])
@pytest.mark.parametrize('name', BACKBONES)
@torch.no_grad()
def test_inference_without_kernels(name, valid, missing, monkeypatch):
    """As on processors without AVX2, and on those with AMX."""
    if missing == 'kernels':
        for module in (attention, blocks, embeddings):
            monkeypatch.setattr(module, 'has_products', lambda dtype, *channels: False)
        for module in (norms, patches, pegs):
            monkeypatch.setattr(module, 'has_kernels', lambda dtype: False)
    else:
        monkeypatch.setattr(kernels, 'has_amx', lambda: True)
        monkeypatch.setattr(kernels, 'multiplies_tiles', lambda: False)
    model = BACKBONES[name]().eval()
    maps = model(images(), valid)
    same_maps(accelerate(copy.deepcopy(model))(images(), valid), maps, **ROUNDING)
    low = model.bfloat16()
    plain_maps = low(images().bfloat16(), valid)
    fast_maps = accelerate(low)(images().bfloat16(), valid)
    for fast, plain, exact in zip(fast_maps, plain_maps, maps):
        assert distance(fast, exact) <= 2 * distance(plain, exact) < 0.08


def distance(x, y):
    """Of tensors, relative to the norm of the second."""
    return ((x.float() - y).norm() / y.norm().clamp(min=1e-3)).item()


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('name', ['pvt_tiny', 'mit_b0', 'pvt_v2_b2_li', 'svt_small'])
@torch.no_grad()
def test_variants_and_sizes(name, size):
    model = tiny(ARCHS[name]._replace(depths=(2, 1, 1, 1)))
    fast = accelerate(copy.deepcopy(model))
    same_maps(fast(images(1, size)), model(images(1, size)))


@pytest.mark.parametrize(
    'options',
    [
        dict(position='rope'),
        dict(window_padding='zero'),
        dict(recompute_gelu=True),
        dict(drop_rate=0.3, attn_drop_rate=0.3, drop_path_rate=0.3),
    ],
    ids=str,
)
def test_options(options):
    model = BACKBONES['svt'](**options).train()
    fast = accelerate(copy.deepcopy(model))
    torch.manual_seed(0)
    maps, grads = maps_and_gradients(model, images(), VALID)
    torch.manual_seed(0)
    fast_maps, fast_grads = maps_and_gradients(fast, images(), VALID)
    same_maps(fast_maps, maps)
    assert_same_gradients(fast_grads, grads)


class Results(TorchFunctionMode):
    """Records what functions return."""

    def __init__(self):
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.found.append(function(*args, **(kwargs or {})))
        return self.found[-1]


def test_freed_memory_is_kept_on_the_cpu_alone():
    """Whatever the default device is: a GPU's memory is not taken."""
    with torch.device('meta'), Results() as results:
        keep_freed_memory()
    assert results.found and all(result.is_cpu for result in results.found)


def test_undone():
    """Classes and bits are those of a model that was never accelerated, and weights stay."""
    neck = nn.ModuleList([randomize(nn.Conv2d(128, 128, 3, padding=1)), nn.Linear(4, 4)])
    model = nn.ModuleDict({'backbone': tiny('svt_small', out_indices=(0, 1)), 'neck': neck})
    before = copy.deepcopy(model)
    accelerate(accelerate(model))
    model.backbone(images())
    model.neck[0](torch.randn(1, 128, 9, 9))
    for parameter, old in zip(model.parameters(), before.parameters()):
        assert parameter.stride() == old.stride()
    assert accelerate(model, False) is model
    assert classes(model) == classes(before)
    for module, old in zip(model.modules(), before.modules()):
        assert vars(module).keys() == vars(old).keys()
    for parameter, old in zip(model.parameters(), before.parameters()):
        assert parameter.stride() == old.stride() and torch.equal(parameter, old)
    maps, grads = maps_and_gradients(model.backbone, images())
    expected, expected_grads = maps_and_gradients(before.backbone, images())
    for x, y in zip([*maps, *grads], [*expected, *expected_grads]):
        assert torch.equal(x, y)


class OtherPeoplesMLP(MLP):
    def contract(self, x):
        return self.fc2(F.silu(x))


class LoRA(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.more = nn.Linear(base_layer.in_features, base_layer.out_features)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.more(x)


def hooked(mlp):
    mlp.fc1.register_forward_hook(lambda module, given, out: 2 * out)


def hooked_backward(mlp):
    mlp.fc2.register_full_backward_hook(lambda module, given, out: None)


def pruned(mlp):
    prune.l1_unstructured(mlp.fc1, 'weight', 0.5)


def parametrized(mlp):
    parametrizations.weight_norm(mlp.fc2)


def spectral(mlp):
    nn.utils.spectral_norm(mlp.fc2)


def replaced(mlp):
    mlp.fc1 = LoRA(mlp.fc1)


def forward_replaced(mlp):
    forward = mlp.fc1.forward
    mlp.fc1.forward = lambda x: 3 * forward(x)


def no_bias(mlp):
    mlp.fc1.bias = None


def derived(mlp):
    mlp.__class__ = OtherPeoplesMLP


@pytest.mark.parametrize(
    'change',
    [hooked, hooked_backward, pruned, parametrized, replaced, forward_replaced, derived],
)
def test_changed_mlps_are_left_alone(change):
    """And their results are as before, in training, too."""
    model = tiny(out_indices=(0,))
    mlp = model.blocks[0][0].mlp
    change(mlp)
    maps, grads = maps_and_gradients(model, images())
    kind = type(mlp)
    accelerate(model)
    assert type(mlp) is kind and type(model.blocks[0][1].mlp) is FusedMLP
    fast_maps, fast_grads = maps_and_gradients(model, images())
    same_maps(fast_maps, maps)
    assert_same_gradients(fast_grads, grads)


def test_layers_without_bias_and_layers_replaced_later():
    model = tiny(out_indices=(0,))
    no_bias(model.blocks[0][0].mlp)
    model.blocks[0][0].attn.proj.bias = None
    fast = accelerate(copy.deepcopy(model))
    same_maps(fast(images()), model(images()))
    for each in (model, fast):
        torch.manual_seed(0)
        replaced(each.blocks[0][1].mlp)
    same_maps(fast(images()), model(images()))


CONVOLUTIONS = {
    'stride': dict(stride=(1, 2)),
    'dilation': dict(dilation=(2, 2), padding=(2, 2)),
    'padding': dict(padding=(0, 1)),
    'border': dict(padding_mode='circular', _reversed_padding_repeated_twice=[1, 1, 1, 1]),
    'groups': dict(groups=2, weight=nn.Parameter(torch.randn(256, 128, 3, 3) / 30)),
    'kernel': dict(weight=nn.Parameter(torch.randn(256, 256, 1, 1))),
}


@pytest.mark.parametrize('change', CONVOLUTIONS)
@pytest.mark.parametrize('kind', ['3x3', 'patches'])
@torch.no_grad()
def test_convolutions_changed_later(kind, change):
    """What a convolution computes is read in each pass, as by a plain one."""
    plain: nn.Module = nn.Conv2d(256, 256, 3, padding=1)
    x = torch.randn(1, 256, 6, 9)
    if kind == 'patches':
        plain = PatchEmbed(256, 256, 3)
        x = x.permute(0, 2, 3, 1)
    fast = accelerate(copy.deepcopy(plain))
    for model in (plain, fast):
        for name, value in CONVOLUTIONS[change].items():
            setattr(model.proj if kind == 'patches' else model, name, value)
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)


def hooked_drop(mlp):
    mlp.drop.register_forward_hook(lambda module, given, out: 2 * out)


def replaced_drop(mlp):
    mlp.drop = nn.Hardtanh(-0.1, 0.1).eval()


def forward_of_drop(mlp):
    mlp.drop.forward = torch.sin


def drop_in_training(mlp):
    """As for Monte Carlo estimates; at this rate it zeroes everything."""
    mlp.drop.p = 1.0
    mlp.drop.train()


@pytest.mark.parametrize('kind', ['MLP', 'ConvMLP', 'MLP, recomputed'])
@pytest.mark.parametrize('change', [hooked_drop, replaced_drop, forward_of_drop, drop_in_training])
def test_dropout_that_is_more_than_dropout_is_called(kind, change):
    build = ConvMLP if kind == 'ConvMLP' else MLP
    plain = randomize(build(4, 8, drop=0.5)).eval()
    fast = accelerate(copy.deepcopy(plain))
    fast.recompute_gelu = kind == 'MLP, recomputed'
    if fast.recompute_gelu:
        accelerate(fast, False)
    x = torch.randn(1, 3, 5, 4)
    change(plain)
    change(fast)
    torch.testing.assert_close(fast(x, Grid(3, 5)), plain(x, Grid(3, 5)))


@pytest.mark.parametrize('change', [pruned, parametrized, spectral])
def test_layers_changed_later(change):
    """A layer whose weight is computed before each call trains as it does in a plain model."""
    model = tiny(out_indices=(0,))
    fast = accelerate(copy.deepcopy(model))
    for each in (model, fast):
        torch.manual_seed(0)
        change(each.blocks[0][0].mlp)
        change(each.blocks[0][1].mlp)
        maps_and_gradients(each, images())
    maps, grads = maps_and_gradients(model, images())
    fast_maps, fast_grads = maps_and_gradients(fast, images())
    same_maps(fast_maps, maps, rtol=1e-4, atol=1e-4)
    assert_same_gradients(fast_grads, grads)


class OtherPeoplesWeight(torch.Tensor):
    """A weight that says it is float32 and is stored otherwise, as torchao's quantized ones."""

    @staticmethod
    def __new__(cls, halves):
        return torch.Tensor._make_wrapper_subclass(cls, halves.shape, dtype=torch.float32)

    def __init__(self, halves):
        self.halves = halves

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].halves)
        raise NotImplementedError(f'{function} of {cls.__name__}')

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.halves.float(), bias)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_layers_quantized_later():
    model = accelerate(tiny(out_indices=(0,)))
    expected = model(images())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = OtherPeoplesWeight(module.weight.detach().half())
            module.weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        torch.testing.assert_close(model(images()), expected, rtol=0.01, atol=0.01)


def test_weights_stay_where_they_are():
    """In shared memory, for example, or where an optimizer or FSDP knows them."""
    model = tiny(out_indices=(0,)).share_memory()
    weights = {p: (p.data_ptr(), p.stride()) for p in model.parameters()}
    for enable in (True, False):
        accelerate(model, enable)
        assert {p: (p.data_ptr(), p.stride()) for p in model.parameters()} == weights


def test_a_model_accelerated_in_inference_mode_trains():
    model = tiny(out_indices=(0,))
    for enable in (True, False):
        with torch.inference_mode():
            accelerate(model, enable)
        model(images())[0].sum().backward()


@pytest.mark.parametrize('way', ['of each module', 'global'])
def test_hooks_are_called(way):
    """Also those on the linear layers of an MLP, registered after the model was accelerated."""
    model = tiny(out_indices=(0,))
    called = []
    for each in (model, accelerate(copy.deepcopy(model))):
        names = {module: name for name, module in each.named_modules()}
        seen = []

        def hook(module, given, out, names=names, seen=seen):
            seen.append(names[module])

        if way == 'global':
            with nn.modules.module.register_module_forward_hook(hook):
                each(images())
        else:
            for module in each.modules():
                module.register_forward_hook(hook)
            each(images())
        called.append(seen)
    assert called[0] == called[1] and 'blocks.0.0.mlp.fc2' in called[0]


def shape(x):
    return tuple(x.shape) if isinstance(x, torch.Tensor) else None


@pytest.mark.parametrize('grad', [False, True], ids=['inference', 'training'])
@pytest.mark.parametrize('name', BACKBONES)
def test_hooks_and_adapters_get_the_shapes_that_they_get_in_a_plain_model(name, grad):
    model = BACKBONES[name]()
    called = []
    for each in (model, accelerate(copy.deepcopy(model))):
        seen = []
        for layer, module in each.named_modules():

            def before(module, given, layer=layer, seen=seen):
                seen.append((layer, 'given', [shape(x) for x in given]))

            def after(module, given, out, layer=layer, seen=seen):
                seen.append((layer, 'returned', shape(out)))

            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
        with torch.set_grad_enabled(grad):
            each(images())
        called.append(seen)
    assert called[0] == called[1]


@pytest.mark.parametrize('where', ['meta', 'float64', 'float16', 'quantized'])
@pytest.mark.filterwarnings('ignore:torch.ao.quantization is deprecated')
def test_other_weights_are_left_alone(where):
    model = tiny(out_indices=(0,))
    if where == 'meta':
        model = model.to('meta')
    elif where == 'quantized':
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    else:
        model = model.to(getattr(torch, where))
    accelerate(model)
    fast = {OneDNNLinear, FusedMLP, PatchConv}
    found = fast.intersection(classes(model))
    assert found <= ({PatchConv} if where == 'quantized' else set())


@pytest.mark.parametrize('way', ['bfloat16', 'float64', 'autocast', 'subclass', 'compiled'])
def test_other_inputs_are_computed_as_before(way):
    """Of an accelerated model that is then moved, cast or compiled."""
    model = tiny(out_indices=(0, 1))
    fast = accelerate(copy.deepcopy(model))
    image = images()
    results = []
    for each in (model, fast):
        if way in ('bfloat16', 'float64'):
            dtype = getattr(torch, way)
            found = each.to(dtype)(image.to(dtype))
        elif way == 'autocast':
            with torch.autocast('cpu', torch.bfloat16):
                found = each(image)
        elif way == 'subclass':
            found = each(image.as_subclass(OtherPeoplesTensor))
        else:
            torch._dynamo.reset()
            found = torch.compile(each, backend='eager', fullgraph=True)(image)
        results.append(found)
    for x, y in zip(*results):
        # Convolutions with weights in another memory format round otherwise.
        tolerance = 0.05 if way in ('bfloat16', 'autocast') else 1e-4
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


class OtherPeoplesTensor(torch.Tensor):
    pass


@pytest.mark.parametrize('shape', [(4,), (0, 4), (2, 0, 4)], ids=str)
def test_vectors_and_no_tokens(shape):
    plain = nn.Linear(4, 3)
    fast = accelerate(copy.deepcopy(plain))
    x = torch.randn(shape)
    for layer in (plain, fast):
        layer(x).sum().backward()
    torch.testing.assert_close(fast(x), plain(x))
    torch.testing.assert_close(fast.weight.grad, plain.weight.grad)


def test_copies_and_files(tmp_path):
    model = tiny(out_indices=(0, 1))
    expected = model(images())
    accelerate(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert classes(copied) == classes(model)
        same_maps(copied(images()), expected)
        accelerate(copied, False)
        assert OneDNNLinear not in classes(copied)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = CPVTPyramid('pcpvt_nano', out_indices=(0, 1)).eval()
    plain.load_state_dict(torch.load(file))
    same_maps(plain(images()), expected)
    assert list(model.state_dict()) == list(plain.state_dict())
    empty = accelerate(CPVTPyramid('pcpvt_nano', out_indices=(0, 1)).eval())
    empty.load_state_dict(plain.state_dict())
    same_maps(empty(images()), expected)


def test_a_training_is_the_same():
    model = tiny(out_indices=(0,)).train()
    fast = accelerate(copy.deepcopy(model))
    losses = []
    for each in (model, fast):
        optimizer = torch.optim.AdamW(each.parameters(), 1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            loss = each(images())[0].square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)


def test_frozen_layers_get_no_gradient():
    model = accelerate(tiny(frozen_stages=1).train())
    model(images())[-1].sum().backward()
    assert all(p.grad is None for p in model.blocks[0].parameters())
    assert all(p.grad is not None for p in model.blocks[1].parameters())


def test_a_second_thread():
    """Inference in one thread beside a training with checkpointing in another."""
    model = accelerate(tiny(out_indices=(0, 1)))
    trained = accelerate(tiny(out_indices=(0, 1), with_cp=True).train())
    expected = model(images())
    _, grads = maps_and_gradients(trained, images())
    errors = []

    def infer():
        with torch.no_grad():
            for _ in range(5):
                try:
                    same_maps(model(images()), expected)
                except Exception as error:
                    errors.append(error)

    thread = threading.Thread(target=infer)
    thread.start()
    for _ in range(3):
        assert_same_gradients(maps_and_gradients(trained, images())[1], grads)
    thread.join()
    assert not errors


def test_whole_models():
    """A neck of other people's layers, and a classifier, are accelerated with the backbone."""
    conv = randomize(nn.Conv2d(256, 256, 3, padding=1))
    model = nn.Sequential(conv, nn.Conv2d(256, 256, 2, stride=2), nn.Linear(4, 4))
    accelerate(model)
    assert classes(model)[1:] == [WinogradConv2d, nn.Conv2d, OneDNNLinear]
    classifier = CPVT(dict(dim=32, heads=2, depth=2, mlp_ratio=2, patch_size=4))
    assert type(accelerate(classifier).head) is OneDNNLinear


@pytest.mark.parametrize('lacks', ['version', 'oneDNN', 'enabled'])
def test_without_onednn(monkeypatch, lacks):
    """Nothing is changed, and a warning says why."""
    model = tiny(out_indices=(0,))
    before = classes(model)
    if lacks == 'version':
        monkeypatch.setattr(acceleration, 'VERSION', (2, 6))
    elif lacks == 'oneDNN':
        monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: False)
    with torch.backends.mkldnn.flags(enabled=lacks != 'enabled'):
        with pytest.warns(UserWarning, match='the model is not accelerated: '):
            assert accelerate(model) is model
    assert classes(model) == before
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        accelerate(model, False)
