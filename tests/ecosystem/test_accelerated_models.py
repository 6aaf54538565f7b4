"""Other people's models, accelerated: the same results and gradients, in float32 and bfloat16."""

import copy
from collections.abc import Callable

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import nn
from torch.utils._pytree import tree_flatten

from cpvt_pyramid import accelerate
from cpvt_pyramid.acceleration import accelerate as acceleration
from cpvt_pyramid.acceleration.accelerate import is_accelerated
from tests.models.ports import randomize

TIMM = {
    'vit_tiny_patch16_224': dict(img_size=32, depth=2),
    'swin_tiny_patch4_window7_224': dict(img_size=56, depths=(2, 1)),
    'twins_svt_small': dict(img_size=64, depths=(1, 1, 2, 1)),
    'pvt_v2_b0': {},
    'convnext_atto': dict(depths=(1, 1, 1, 1)),
    'resnet18': {},
    'mobilevit_xxs': {},
    'xcit_nano_12_p16_224': dict(img_size=64, depth=2),
    'cait_xxs24_224': dict(img_size=32, depth=2),
    'mambaout_femto': dict(depths=(1, 1, 1, 1)),
    'eva02_tiny_patch14_224': dict(img_size=28, depth=2),
}


def of_timm(name: str) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, **TIMM[name])


def vit_of_torchvision() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    )


MODELS = {
    **{f'timm, {name}': of_timm(name) for name in TIMM},
    'torchvision, ViT': vit_of_torchvision,
    'torch, transformer': lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2
    ),
    'smp, SegFormer': lambda: smp.Segformer(
        'timm-mobilenetv3_small_minimal_100', encoder_weights=None
    ),
    'smp, FPN': lambda: smp.FPN('resnet18', encoder_weights=None),
}


def input_of(name: str, model: nn.Module) -> torch.Tensor:
    generator = torch.manual_seed(0)
    if name.startswith('torch,'):
        return torch.randn(2, 5, 16, generator=generator)
    side = 64
    if hasattr(model, 'image_size'):
        side = model.image_size
    for options in (TIMM[key] for key in TIMM if name.endswith(key)):
        side = options.get('img_size', side)
    return torch.randn(2, 3, side, side, generator=generator)


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [y for y in tree_flatten(model(x))[0] if isinstance(y, torch.Tensor)]


@pytest.mark.parametrize('name', MODELS)
def test_the_same_is_computed(name, monkeypatch):
    monkeypatch.setattr(acceleration, 'FEWEST_CHANNELS', 8)
    torch.manual_seed(0)
    plain = randomize(MODELS[name]()).eval()
    x = input_of(name, plain)
    fast = accelerate(copy.deepcopy(plain))
    assert any(is_accelerated(module) for module in fast.modules())
    grads = []
    for model in (plain, fast):
        sum(y.square().mean() for y in results(model, x)).backward()
        grads.append({key: p.grad for key, p in model.named_parameters()})
    for key, expected in grads[0].items():
        found = grads[1][key]
        if expected is None:
            assert found is None
        else:
            scale = expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * scale + 1e-9)
    with torch.no_grad():
        for found, expected in zip(results(fast, x), results(plain, x)):
            scale = expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * scale)
        with torch.autocast('cpu', torch.bfloat16):
            for found, expected in zip(results(fast, x), results(plain, x)):
                difference = (found.float() - expected.float()).norm()
                assert difference <= 0.05 * expected.float().norm()  # both round
