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
        if parameter.dim() > 1 and len(parameter) == 1:  # a table, a class token
            value = 0.5 * noise
        elif parameter.dim() > 1:
            value = 0.5 * noise / math.sqrt(parameter[0].numel())
        else:
            value = 0.1 * noise + ('norm' in name and name.endswith('weight'))
        parameter.data.copy_(value)
    return model


def reference_maps(
    model: nn.Module,
    arch: Union[str, Arch],
    image: Tensor,
    stages: int = 4,
    sincos: bool = False,
    zero_padding: bool = True,
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
        if f'pos_embeds.{i}.table' in weights:
            x = x + bilinear(weights[f'pos_embeds.{i}.table'][0].permute(2, 0, 1), x.shape[1:])
        if sincos:
            x = x + sines_and_cosines(x)
        x = peg(x, weights, f'more_pos_block.{i}.-1', zero_padding)
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
            x = peg(x, weights, f'more_pos_block.{i}.{j}' if j else f'pos_block.{i}', zero_padding)
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


def peg(x: Tensor, weights: dict, of: str, zero_padding: bool) -> Tensor:
    """What the weights under a name make of it: nothing where there are none."""
    for i in range(8):
        if f'{of}.proj.{i}.weight' in weights:
            x = x + convolve(x, *layer(weights, f'{of}.proj.{i}'), zero_padding)
        elif f'{of}.proj.{i}.0.weight' in weights:
            y = convolve(x, *layer(weights, f'{of}.proj.{i}.0'), zero_padding)
            x = x + convolve(y, *layer(weights, f'{of}.proj.{i}.1'), zero_padding)
    return x


def convolve(x: Tensor, weight: Tensor, bias: Tensor, zero_padding: bool) -> Tensor:
    """k x k shifted copies of the map, beyond whose border there are zeros, or what is nearest."""
    _, h, w = x.shape
    k = weight.shape[-1]
    out = bias[:, None, None].expand(-1, h, w).clone()
    for dy in range(-(k // 2), k // 2 + 1):
        for dx in range(-(k // 2), k // 2 + 1):
            rows, columns = torch.arange(h) + dy, torch.arange(w) + dx
            shifted = x[:, rows.clamp(0, h - 1)][:, :, columns.clamp(0, w - 1)]
            if zero_padding:
                on_map = ((rows >= 0) & (rows < h))[:, None] & ((columns >= 0) & (columns < w))
                shifted = shifted * on_map
            kernel = weight[:, :, dy + k // 2, dx + k // 2]
            if kernel.shape[1] == 1:
                out += kernel[:, :, None] * shifted
            else:
                out += torch.einsum('oc,chw->ohw', kernel, shifted)
    return out


def bilinear(table: Tensor, size: Sequence[int]) -> Tensor:
    """A table (C, H, W) at another size, each value from its four neighbours."""
    values = table
    for axis, new in zip((1, 2), size):
        old = values.shape[axis]
        at = ((torch.arange(new, dtype=table.dtype) + 0.5) * old / new - 0.5).clamp(0, old - 1)
        low = at.floor().long()
        high = (low + 1).clamp(max=old - 1)
        share = (at - low).view(-1, *[1] * (2 - axis))
        values = values.index_select(axis, low) * (1 - share) + (
            values.index_select(axis, high) * share
        )
    return values


def sines_and_cosines(x: Tensor) -> Tensor:
    """In four quarters of the channels: sine and cosine of the row, of the column."""
    c, h, w = x.shape
    out = torch.empty_like(x)
    for i in range(c // 4):
        frequency = 1 / 10_000 ** (4 * i / c)
        for y in range(h):
            out[i, y], out[c // 4 + i, y] = math.sin(y * frequency), math.cos(y * frequency)
        for column in range(w):
            angle = column * frequency
            out[c // 2 + i, :, column] = math.sin(angle)
            out[3 * c // 4 + i, :, column] = math.cos(angle)
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
