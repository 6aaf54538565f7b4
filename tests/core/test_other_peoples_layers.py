"""What users do to the layers of a model has its effect: hooks, LoRA, pruning, replaced parts."""

import copy
import re
import threading
from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from cpvt_pyramid import ARCHS, CPVTPyramid
from cpvt_pyramid.grid import Grid
from cpvt_pyramid.model import MLP, Block, set_checkpointing
from tests.models.ours import classifier, images, outputs, pcpvt, svt
from tests.models.ports import randomize

IMAGE = images(2, (40, 36))
MODELS = {'pcpvt': pcpvt, 'svt': svt, 'columnar': classifier}


@pytest.fixture(params=MODELS)
def model(request) -> nn.Module:
    return MODELS[request.param]().train()


def loss_of(model: nn.Module) -> Tensor:
    return sum(x.square().mean() for x in outputs(model, IMAGE))


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    """Of two backward passes over one graph."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model)
    loss.square().backward(retain_graph=True)
    loss.backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """All layers with parameters."""
    return {
        k: m
        for k, m in model.named_modules()
        if next(m.parameters(recurse=False), None) is not None and not k == ''
    }


@pytest.mark.parametrize('kind', ['forward', 'forward_pre', 'full_backward', 'full_backward_pre'])
def test_hooks_fire_on_every_layer(model, kind):
    layers = layers_of(model)
    layers |= {n: m for n, m in model.named_modules() if re.fullmatch(r'pos_block\.\d\.proj', n)}
    fired = set()
    for name, module in layers.items():
        getattr(module, f'register_{kind}_hook')(lambda *_, name=name: fired.add(name))
    everywhere = set()
    with nn.modules.module.register_module_forward_hook(lambda m, *_: everywhere.add(m)):
        grads_of(model)
    assert fired == set(layers)
    assert everywhere >= set(layers.values())


@pytest.mark.parametrize('checkpointed', [False, True])
def test_pruning_survives_a_step(model, checkpointed):
    set_checkpointing(model, checkpointed)
    for name, module in layers_of(model).items():
        if 'mlp.fc' in name:
            prune.l1_unstructured(module, 'weight', amount=0.5)
    for _ in range(2):
        grads = grads_of(model)
    loss_of(model)  # the pre-hook applies the mask
    for name, module in layers_of(model).items():
        if prune.is_pruned(module):
            assert grads[f'{name}.weight_orig'].any()
            assert (module.weight[module.weight_mask == 0] == 0).all()


class LoRA(nn.Module):
    """A low-rank update added to a frozen layer (arXiv 2106.09685), as its libraries wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.weight, self.bias = base.weight, base.bias  # as peft's layers expose them
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize('checkpointed', [False, True])
def test_lora_layers_train(model, checkpointed):
    set_checkpointing(model, checkpointed)
    for mlp in [m for m in model.modules() if isinstance(m, MLP)]:
        mlp.fc1, mlp.fc2 = LoRA(mlp.fc1), LoRA(mlp.fc2)
    grads = grads_of(model)
    added = [k for k, _ in model.named_parameters() if '.a.' in k or '.b.' in k]
    assert added and all(grads[k].abs().sum() > 0 for k in added)
    assert not any('fc1.base' in k or 'fc2.base' in k for k in grads)


class Adapter(nn.Module):
    """Something after a part of a block, with its own parameter, whose gradient needs the output of
    that part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, *others) -> Tensor:
        return self.part(x, *others).sigmoid() * self.scale


def wrap(name: str) -> Callable:
    parent, _, last = name.rpartition('.')

    def change(block: nn.Module) -> None:
        setattr(block.get_submodule(parent), last, Adapter(block.get_submodule(name)))

    return change


def hook(name: str) -> Callable:
    change = lambda _module, _args, out: out.sigmoid()  # noqa: E731
    return lambda block: block.get_submodule(name).register_forward_hook(change)


class Parallel(Block):
    def branches(self, x: Tensor, grid: Grid) -> Tensor:
        y = self.norm1(x)
        return x + self.attn(y, grid) * self.mlp(self.norm2(y), grid)


def add_mlp_to_attention(block: nn.Module) -> None:
    dim = block.attn.proj.out_features
    added = nn.Sequential(nn.Linear(dim, 8), nn.GELU(), nn.Linear(8, dim))
    block.attn.proj = nn.Sequential(block.attn.proj, added)


PARTS = ('norm1', 'attn', 'norm2', 'mlp', 'mlp.fc1', 'mlp.fc2')
CHANGES = {
    **{f'wrapped {part}': wrap(part) for part in PARTS},
    **{f'hook on {part}': hook(part) for part in PARTS},
    'branches overridden': lambda block: setattr(block, '__class__', Parallel),
    'an MLP inside attn': add_mlp_to_attention,
}


@pytest.mark.parametrize('model', ['svt'], indirect=True)
@pytest.mark.parametrize('change', CHANGES)
def test_checkpointing_of_changed_blocks(model, change):
    expected = loss_of(model)
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        CHANGES[change](block)
    assert loss_of(model) != expected
    expected = grads_of(model)
    set_checkpointing(model, True)
    torch.testing.assert_close(grads_of(model), expected)


def test_hooks_in_a_compiled_model():
    torch._dynamo.reset()
    model = pcpvt(out_indices=(0,)).eval()
    layer = model.blocks[0][0].mlp.fc1
    layer.register_forward_hook(lambda _module, _args, out: out * 0)
    with torch.no_grad():
        compiled = torch.compile(copy.deepcopy(model), backend='aot_eager')
        torch.testing.assert_close(compiled(IMAGE), model(IMAGE))


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@torch.no_grad()
def test_dynamic_quantization(model):
    """It replaces layers of exactly the class `nn.Linear`, and says nothing where it finds none."""
    model.eval()
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    quantize = partial(torch.ao.quantization.quantize_dynamic, qconfig_spec={nn.Linear})
    quantized = quantize(model)
    kind = torch.ao.nn.quantized.dynamic.Linear
    assert [name for name, m in quantized.named_modules() if isinstance(m, kind)] == linears
    found, expected = outputs(quantized, IMAGE), outputs(model, IMAGE)
    for a, b in zip(found, expected):
        assert 0 < (a - b).norm() < 0.05 * b.norm()
    again = quantize(randomize(copy.deepcopy(model), seed=1))
    again.load_state_dict(copy.deepcopy(quantized).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(outputs(again, IMAGE), found))


@pytest.mark.filterwarnings('ignore:There is a performance drop')
def test_per_sample_gradients(model):
    from torch.nn.attention import SDPBackend, sdpa_kernel  # newer than the oldest torch

    model.eval()
    parameters = {k: p.detach() for k, p in model.named_parameters()}

    def loss(parameters: dict, image: Tensor) -> Tensor:
        call = partial(torch.func.functional_call, model, parameters)
        return sum(x.square().mean() for x in outputs(call, (image[None],)))

    with sdpa_kernel(SDPBackend.MATH):
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, IMAGE)
    for i, image in enumerate(IMAGE):
        leaves = {k: v.clone().requires_grad_() for k, v in parameters.items()}
        grads = torch.autograd.grad(loss(leaves, image), list(leaves.values()))
        for name, grad in zip(leaves, grads):
            torch.testing.assert_close(per_sample[name][i], grad, rtol=1e-4, atol=1e-5)


# --- beside timm -------------------------------------------------------------------------------


class Products(torch.overrides.TorchFunctionMode):
    """Counts calls of linear layers and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.nn.functional.linear, torch.conv2d):
            self.calls.append(function)
        return function(*args, **(kwargs or {}))


def note(names: list, name: str, *_: object) -> None:
    names.append(name)


@pytest.mark.parametrize('name', ['pcpvt_small', 'svt_small'])
def test_what_is_seen_of_a_model_is_what_is_seen_of_timm_s(name, monkeypatch):
    """Hooks on layers and on the `proj` of PEGs, a patched `nn.Linear.forward`, a function mode."""
    arch = ARCHS[name]._replace(depths=(2, 2, 2, 2))
    theirs = timm.create_model(f'twins_{name}', depths=arch.depths, num_classes=0)
    ours = CPVTPyramid(arch, stage_norm=False)
    image = torch.randn(1, 3, 224, 224)
    patched = []
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, 'forward', lambda m, x: (patched.append(m), forward(m, x))[1])
    seen = []
    for model in (ours, theirs):
        model.eval()
        hooked = []
        for part, module in model.named_modules():
            is_layer = bool([*module.parameters(recurse=False)]) or part.endswith('.proj')
            if is_layer and part != 'norm':  # timm's last norm
                module.register_forward_hook(partial(note, hooked, part))
        patched.clear()
        with torch.no_grad(), Products() as products:
            model(image)
        seen.append((sorted(hooked), len(patched), len(products.calls)))
    assert seen[0] == seen[1]


def test_training_and_inference_in_two_threads():
    """A checkpointed training recomputes while another thread infers."""
    train = svt(with_cp=True).train()
    infer = pcpvt().eval()
    grads = grads_of(train)
    with torch.no_grad():
        maps = infer(IMAGE)
    wrong = []

    def infer_often() -> None:
        with torch.no_grad():
            for _ in range(20):
                wrong.extend(1 for a, b in zip(infer(IMAGE), maps) if not torch.equal(a, b))

    thread = threading.Thread(target=infer_often)
    thread.start()
    for _ in range(5):
        torch.testing.assert_close(grads_of(train), grads)
    thread.join()
    assert not wrong
