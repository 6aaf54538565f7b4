"""The slow, obvious version: the pyramid written from the papers, a token or a window at a time,
and weights to test it with.
"""

import math
from collections.abc import Sequence
from typing import Union

import torch
from torch import Tensor, nn

from cpvt_pyramid import ARCHS, Arch


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that are random but not tiny, biases and norms too, so that nothing is tested on
    zeros. Scaled so that activations stay of order one in the deepest variant."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            value = 0.5 * noise / math.sqrt(parameter[0].numel())
        else:
            value = 0.1 * noise + ('norm' in name and name.endswith('weight'))
        parameter.data.copy_(value)
    return model


def reference_maps(
    model: nn.Module, arch: Union[str, Arch], image: Tensor, stages: int = 4
) -> list[Tensor]:
    """The maps of one image (3, H, W), computed from the model's state dict alone.

    Padding does not exist here: a patch, a window or a sub-sampled key sees the pixels or tokens
    that there are.
    """
    arch = ARCHS[arch] if isinstance(arch, str) else arch
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    x = image
    maps = []
    for i, patch in enumerate((4, 2, 2, 2)[:stages]):
        x = patches(x, patch, *layer(weights, f'patch_embeds.{i}.proj'))
        x = layer_norm(x, *layer(weights, f'patch_embeds.{i}.norm'), 1e-5)
        for j in range(arch.depths[i]):
            of = f'blocks.{i}.{j}'
            y = layer_norm(x, *layer(weights, f'{of}.norm1'), 1e-6)
            if arch.window and j % 2 == 0:
                x = x + windows(y, weights, of, arch.heads[i], arch.window)
            else:
                x = x + everywhere(y, weights, of, arch.heads[i], arch.sr_ratios[i])
            y = layer_norm(x, *layer(weights, f'{of}.norm2'), 1e-6)
            y = pointwise(y, *layer(weights, f'{of}.mlp.fc1'))
            y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
            x = x + pointwise(y, *layer(weights, f'{of}.mlp.fc2'))
            if j == 0:
                x = x + depthwise(x, *layer(weights, f'pos_block.{i}.proj.0'))
        if arch.stage_norm:
            x = layer_norm(x, *layer(weights, f'norm_list.{i}'), 1e-6)
        maps.append(x)
    return maps


def layer(weights: dict, name: str) -> tuple[Tensor, Tensor]:
    return weights[f'{name}.weight'], weights[f'{name}.bias']


def pointwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer on each cell of (C, H, W)."""
    return torch.einsum('oc,chw->ohw', weight, x) + bias[:, None, None]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    mean = x.mean(dim=0, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=0, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight[:, None, None] + bias[:, None, None]


def patches(x: Tensor, size: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Each patch, as far as it is on the map, times the part of the kernel that it covers."""
    rows = []
    for top in range(0, x.shape[1], size):
        row = []
        for left in range(0, x.shape[2], size):
            patch = x[:, top : top + size, left : left + size]
            kernel = weight[:, :, : patch.shape[1], : patch.shape[2]]
            row.append(torch.einsum('ochw,chw->o', kernel, patch) + bias)
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)


def depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Nine shifted copies of the map with zeros beyond its border."""
    c, h, w = x.shape
    canvas = x.new_zeros(c, h + 2, w + 2)
    canvas[:, 1:-1, 1:-1] = x
    out = bias[:, None, None].expand(c, h, w).clone()
    for dy in range(3):
        for dx in range(3):
            out += weight[:, 0, dy, dx, None, None] * canvas[:, dy : dy + h, dx : dx + w]
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Softmax attention of (C, N) queries over (C, M) keys and values, head by head."""
    out = []
    for qh, kh, vh in zip(q.chunk(heads), k.chunk(heads), v.chunk(heads)):
        scores = qh.T @ kh / math.sqrt(qh.shape[0])
        out.append(vh @ torch.softmax(scores, dim=1).T)
    return torch.cat(out)


def windows(x: Tensor, weights: dict, of: str, heads: int, size: int) -> Tensor:
    qkv = pointwise(x, *layer(weights, f'{of}.attn.qkv'))
    out = torch.empty_like(x)
    for top in range(0, x.shape[1], size):
        for left in range(0, x.shape[2], size):
            here = (slice(None), slice(top, top + size), slice(left, left + size))
            window = qkv[here]
            q, k, v = window.flatten(1).chunk(3)
            out[here] = attention(q, k, v, heads).view_as(out[here])
    return pointwise(out, *layer(weights, f'{of}.attn.proj'))


def everywhere(x: Tensor, weights: dict, of: str, heads: int, sr_ratio: int) -> Tensor:
    coarse = x
    if sr_ratio > 1:
        coarse = patches(x, sr_ratio, *layer(weights, f'{of}.attn.sr'))
        coarse = layer_norm(coarse, *layer(weights, f'{of}.attn.norm'), 1e-5)
    q = pointwise(x, *layer(weights, f'{of}.attn.q')).flatten(1)
    k, v = pointwise(coarse, *layer(weights, f'{of}.attn.kv')).flatten(1).chunk(2)
    out = attention(q, k, v, heads).view_as(x)
    return pointwise(out, *layer(weights, f'{of}.attn.proj'))


def same_maps(ours: Sequence[Tensor], theirs: Sequence[Tensor], **tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, **tolerance)
