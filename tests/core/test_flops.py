import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet50

from cpvt_pyramid import CPVTPyramid

Counter = pytest.importorskip('cpvt_pyramid.flops', exc_type=ImportError).Counter


def test_published_flops():
    for model, published in ((CPVTPyramid('svt_small'), 2.9), (resnet50(), 4.1)):
        with Counter() as counter:
            model.to('meta')(torch.empty(1, 3, 224, 224, device='meta'))
        assert counter.total / 1e9 == pytest.approx(published, abs=0.05)
        assert counter.by_module[type(model).__name__] == counter.total


@pytest.mark.parametrize('device', ['meta', 'cpu'])
@pytest.mark.parametrize('grad', [True, False])
def test_fused_attention_counts(device, grad):
    q, k = torch.randn(2, 3, 50, 8, device=device), torch.randn(2, 3, 20, 8, device=device)
    with Counter() as counter, torch.inference_mode(not grad):
        F.scaled_dot_product_attention(q, k, k)
    assert counter.total == 2 * (2 * 3 * 50 * 20 * 8)


def test_backward_pass_counts_twice():
    """Once for the gradient of the input, once for that of the weight; depthwise ones, too."""
    for layer in (nn.Linear(8, 8), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 3)):
        x = torch.randn(1, 8, 8, 8, requires_grad=True)
        with Counter() as forward:
            layer(x)
        with Counter() as both:
            layer(x).sum().backward()
        assert both.total == 3 * forward.total > 0
        assert both.by_module == forward.by_module


def test_modules_count_though_only_their_parts_are_called():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 6)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    with Counter() as counter, torch.inference_mode():
        Model()(torch.randn(3, 4))
    assert counter.bytes == 4 * (3 * 4 + 4 * 4 + 4 + 3 * 4 + 3 * 4 + 4 * 6 + 6 + 3 * 6)
    assert counter.by_module == {
        'Model': 3 * 40,
        'Model.layers': 3 * 40,
        'Model.layers.0': 3 * 16,
        'Model.layers.1': 3 * 24,
    }
