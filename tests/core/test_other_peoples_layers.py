"""What users do to the layers of a model reaches every path: hooks, LoRA, pruning, replaced parts.

The MLP has a fused path that does not call `fc1` and `fc2`, and checkpointing one that does not
recompute the MLP's output.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from ports import randomize
from reference import TINY_SVT
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import set_checkpoint_early_stop

from cpvt_pyramid import CPVT, ColumnarArch, CPVTPyramid, ops
from cpvt_pyramid.layers import MLP, set_checkpointing

IMAGE = torch.randn(2, 3, 40, 36, generator=torch.Generator().manual_seed(0))
MODELS = {
    'pcpvt': lambda: CPVTPyramid('pcpvt_nano'),
    'svt': lambda: CPVTPyramid(TINY_SVT),
    'columnar': lambda: CPVT(ColumnarArch(16, 2, 3, 2, 4), num_classes=5),
}


@pytest.fixture(params=MODELS)
def model(request) -> nn.Module:
    return randomize(MODELS[request.param]()).train()


def loss_of(model: nn.Module) -> Tensor:
    out = model(IMAGE)
    return sum(x.square().mean() for x in (out if isinstance(out, tuple) else (out,)))


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(model).backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def linears_of(model: nn.Module) -> dict[str, nn.Module]:
    return {k: m for k, m in model.named_modules() if isinstance(m, nn.Linear)}


HOOKS = {
    'forward': lambda m, call: m.register_forward_hook(call),
    'forward_pre': lambda m, call: m.register_forward_pre_hook(call),
    'full_backward': lambda m, call: m.register_full_backward_hook(call),
    'full_backward_pre': lambda m, call: m.register_full_backward_pre_hook(call),
}


@pytest.mark.parametrize('kind', HOOKS)
def test_hooks_fire_on_every_linear_layer(model, kind):
    fired = set()
    for name, module in linears_of(model).items():
        HOOKS[kind](module, lambda *_, name=name: fired.add(name))
    grads_of(model)
    assert fired == set(linears_of(model))


def test_global_hooks_fire_on_every_linear_layer(model):
    fired = set()
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: fired.add(m))
    try:
        loss_of(model)
    finally:
        handle.remove()
    assert fired >= set(linears_of(model).values())


def test_a_hook_can_change_the_output(model):
    """Of one layer of an MLP alone, as steering and probing tools do."""
    name, layer = next((k, m) for k, m in linears_of(model).items() if k.endswith('fc1'))
    before = loss_of(model)
    layer.register_forward_hook(lambda _module, _args, out: out * 0)
    assert not torch.isclose(loss_of(model), before), name


@pytest.mark.parametrize('checkpointed', [False, True])
def test_pruning_survives_steps(model, checkpointed):
    set_checkpointing(model, checkpointed)
    for name, module in linears_of(model).items():
        if 'mlp' in name:
            prune.l1_unstructured(module, 'weight', amount=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(set(losses)) == 3
    for module in linears_of(model).values():
        if prune.is_pruned(module):
            assert module.weight_orig.grad is not None
            loss_of(model)  # the pre-hook applies the mask
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


def test_weight_norm_trains(model):
    mlps = [m for m in model.modules() if isinstance(m, MLP)]
    expected = loss_of(model)
    for mlp in mlps:
        parametrizations.weight_norm(mlp.fc1)
    torch.testing.assert_close(loss_of(model), expected)
    grads_of(model)
    assert all(mlp.fc1.parametrizations.weight.original0.grad is not None for mlp in mlps)


class Adapter(nn.Module):
    """Something after the MLP, whose gradient needs the MLP's output."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).sigmoid()


def adapt(block: nn.Module) -> None:
    block.mlp = Adapter(block.mlp)


def hook_mlp(block: nn.Module) -> None:
    block.mlp.register_forward_hook(lambda _module, _args, out: out.sigmoid())


def hook_drop_path(block: nn.Module) -> None:
    block.drop_path.register_forward_hook(lambda _module, _args, out: out.sigmoid())


def patch_forward(block: nn.Module) -> None:
    forward = block.mlp.forward
    block.mlp.forward = lambda x: forward(x).sigmoid()


@pytest.mark.parametrize('change', [adapt, hook_mlp, hook_drop_path, patch_forward])
def test_checkpointing_recomputes_an_output_that_is_read(model, change: Callable):
    for block in [m for m in model.modules() if hasattr(m, 'mlp') and hasattr(m, 'attn')]:
        change(block)
    expected = grads_of(model)
    set_checkpointing(model, True)
    for name, grad in grads_of(model).items():
        torch.testing.assert_close(grad, expected[name])


def test_a_hook_sees_the_output_when_it_is_recomputed(model):
    set_checkpointing(model, True)
    seen = []
    mlp = next(m for m in model.modules() if isinstance(m, MLP))
    mlp.register_forward_hook(lambda _module, _args, out: seen.append(out.detach().clone()))
    with set_checkpoint_early_stop(False):  # else the recomputation may end before the hook
        grads_of(model)
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_hooks_in_a_compiled_model():
    torch._dynamo.reset()
    model = randomize(CPVTPyramid('pcpvt_nano', out_indices=(0,))).eval()
    layer = model.blocks[0][0].mlp.fc1
    layer.register_forward_hook(lambda _module, _args, out: out * 0)
    with torch.no_grad():
        compiled = torch.compile(copy.deepcopy(model), backend='aot_eager')
        torch.testing.assert_close(compiled(IMAGE), model(IMAGE))


# torch.func


def functional(model: nn.Module) -> tuple[Callable, dict]:
    parameters = {k: p.detach() for k, p in model.named_parameters()}

    def loss(parameters: dict, image: Tensor) -> Tensor:
        out = torch.func.functional_call(model, parameters, (image[None],))
        return sum(x.square().mean() for x in (out if isinstance(out, tuple) else (out,)))

    return loss, parameters


@pytest.mark.filterwarnings('ignore:There is a performance drop')
def test_per_sample_gradients_on_plain_ops(model):
    loss, parameters = functional(model.eval())
    with ops.plain():
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, IMAGE)
    for i, image in enumerate(IMAGE):
        leaves = {k: v.clone().requires_grad_() for k, v in parameters.items()}
        grads = torch.autograd.grad(loss(leaves, image), list(leaves.values()))
        for name, grad in zip(leaves, grads):
            torch.testing.assert_close(per_sample[name][i], grad, rtol=1e-4, atol=1e-5)


def test_forward_mode_on_plain_ops(model):
    """PyTorch's fused attention has no forward mode on CPUs, its math version has."""
    loss, parameters = functional(model.eval())
    image, direction = IMAGE
    with ops.plain(), sdpa_kernel(SDPBackend.MATH):
        _, slope = torch.func.jvp(lambda x: loss(parameters, x), (image,), (direction,))
    x = image.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(parameters, x), x)
    torch.testing.assert_close(slope, (grad * direction).sum(), rtol=1e-4, atol=1e-5)
