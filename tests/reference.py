"""The slow, obvious version: the pyramid written from the papers, a token or a window at a time."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_pyramid import ARCHS, Arch

# Small enough to try many sizes on, and with every mechanism in it.
TINY_SVT = Arch(
    (8, 16, 24, 32),
    (1, 2, 3, 4),
    (2, 2, 2, 2),
    (2, 2, 2, 2),
    stage_norm=True,
    attention=('WindowAttention', 'GlobalAttention'),
    window=7,
)


def reference_maps(
    model: nn.Module,
    arch: Union[str, Arch],
    image: Tensor,
    stages: int = 4,
    sincos: bool = False,
    zero_padding: bool = True,
    inside: Optional[dict] = None,
) -> list[Tensor]:
    """The maps of one image (3, H, W), computed from the model's state dict alone.

    Padding does not exist here: a patch, a window or a sub-sampled key sees the pixels or tokens
    that there are. `inside`: the encoding inside each attention, see `encoder`.
    """
    arch = ARCHS[arch] if isinstance(arch, str) else arch
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    x = image
    maps = []
    for i, patch in enumerate((4, 2, 2, 2)[:stages]):
        split = overlapping_patches if arch.patch_embed == 'OverlapPatchEmbed' else patches
        x = split(x, patch, *layer(weights, f'patch_embeds.{i}.proj'))
        x = layer_norm(x, *layer(weights, f'patch_embeds.{i}.norm'), 1e-5)
        if f'pos_embeds.{i}.table' in weights:
            x = x + resized(weights[f'pos_embeds.{i}.table'], x.shape[1:], 'bilinear')
        if sincos:
            x = x + sines_and_cosines(x)
        x = peg(x, weights, f'more_pos_block.{i}.-1', zero_padding)
        for j in range(arch.depths[i]):
            of = f'blocks.{i}.{j}'
            attention = arch.attentions[j % len(arch.attentions)]
            if attention == 'WindowAttention':
                attend = partial(windows, size=arch.window, inside=inside)
            elif attention == 'LinearAttention':
                attend = to_means
            else:
                attend = partial(everywhere, sr_ratio=arch.sr_ratios[i], inside=inside)
            x = block(x, weights, of, arch.heads[i], attend)
            x = peg(x, weights, f'more_pos_block.{i}.{j}' if j else f'pos_block.{i}', zero_padding)
        if arch.stage_norm:
            x = layer_norm(x, *layer(weights, f'norm_list.{i}'), 1e-6)
        maps.append(x)
    return maps


def reference_tokens(
    model: nn.Module,
    image: Tensor,
    sincos: bool = False,
    zero_padding: bool = True,
    inside: Optional[dict] = None,
) -> tuple[Tensor, Tensor]:
    """The class token (C, 0 or 1) and the map (C, H, W) of the columnar model of one image
    (3, H, W), computed from the model's state dict alone. `inside`: the encoding inside each
    attention, see `encoder`."""
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    arch = model.arch
    x = patches(image, arch.patch_size, *layer(weights, 'patch_embed.proj'))
    if 'pos_embed.table' in weights:
        x = x + resized(weights['pos_embed.table'], x.shape[1:], 'bicubic')
    if sincos:
        x = x + sines_and_cosines(x)
    first = x.new_zeros(arch.dim, 0)
    if 'cls_token' in weights:
        first = (weights['cls_token'] + weights.get('cls_pos', 0))[0].T
    x = peg(x, weights, 'pos_block.-1', zero_padding)
    for i in range(arch.depth):
        tokens = torch.cat([first, x.flatten(1)], dim=1)[:, None]  # (C, 1, T)
        attend = partial(of_all_tokens, size=x.shape[1:], zero_padding=zero_padding, inside=inside)
        tokens = block(tokens, weights, f'blocks.{i}', arch.heads, attend)
        first, x = tokens[:, 0, : first.shape[1]], tokens[:, 0, first.shape[1] :].view_as(x)
        x = peg(x, weights, f'pos_block.{i}', zero_padding)
    return first, x


def reference_levels(model: nn.Module, image: Tensor, **options: bool) -> list[Tensor]:
    """The four maps of the columnar model as a backbone, of one image (3, H, W)."""
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    tokens = reference_tokens(model, image, **options)[1]
    maps = []
    for i, stride in enumerate(model.strides):
        of, x = f'levels.{i}', tokens
        if i < 2:
            x = doubled(x, *layer(weights, f'{of}.up.0'))
        if i == 0:
            x = gelu(layer_norm(x, *layer(weights, f'{of}.up.1'), 1e-6))
            x = doubled(x, *layer(weights, f'{of}.up.3'))
        if i == 3:
            tops, lefts = range(0, x.shape[1], 2), range(0, x.shape[2], 2)
            rows = [[x[:, t : t + 2, n : n + 2].amax((1, 2)) for n in lefts] for t in tops]
            x = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
        x = x[:, : math.ceil(image.shape[1] / stride), : math.ceil(image.shape[2] / stride)]
        no_bias = x.new_zeros(model.channels[i])
        x = pointwise(x, weights[f'{of}.proj.weight'], no_bias)
        x = layer_norm(x, *layer(weights, f'{of}.norm1'), 1e-6)
        x = convolve(x, weights[f'{of}.conv.weight'], no_bias, zero_padding=True)
        maps.append(layer_norm(x, *layer(weights, f'{of}.norm2'), 1e-6))
    return maps


def layer(weights: dict, name: str) -> tuple[Tensor, Tensor]:
    return weights[f'{name}.weight'], weights[f'{name}.bias']


def block(x: Tensor, weights: dict, of: str, heads: int, attend: Callable[..., Tensor]) -> Tensor:
    """Attention, then MLP, each added to what its norm has read."""
    y = layer_norm(x, *layer(weights, f'{of}.norm1'), 1e-6)
    x = x + attend(y, weights, of, heads)
    y = layer_norm(x, *layer(weights, f'{of}.norm2'), 1e-6)
    y = pointwise(y, *layer(weights, f'{of}.mlp.fc1'))
    if f'{of}.mlp.dwconv.weight' in weights:
        if attend is to_means:
            y = y.clamp(min=0)
        y = convolve(y, *layer(weights, f'{of}.mlp.dwconv'), zero_padding=True)
    return x + pointwise(gelu(y), *layer(weights, f'{of}.mlp.fc2'))


def pointwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer on each cell of (C, H, W)."""
    return torch.einsum('oc,chw->ohw', weight, x) + bias[:, None, None]


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


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


def overlapping_patches(x: Tensor, stride: int, weight: Tensor, bias: Tensor) -> Tensor:
    """The kernel at every `stride`-th place of the map, around which there are zeros."""
    k = weight.shape[-1]
    around = F.pad(x, [k // 2] * 4)
    rows = []
    for top in range(0, x.shape[1], stride):
        row = []
        for left in range(0, x.shape[2], stride):
            patch = around[:, top : top + k, left : left + k]
            row.append(torch.einsum('ochw,chw->o', weight, patch) + bias)
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


def doubled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each cell becomes 2 x 2 cells, by four matrices."""
    _, h, w = x.shape
    out = x.new_zeros(weight.shape[1], 2 * h, 2 * w)
    for dy in range(2):
        for dx in range(2):
            out[:, dy::2, dx::2] = pointwise(x, weight[:, :, dy, dx].T, bias)
    return out


def resized(table: Tensor, size: Sequence[int], mode: str) -> Tensor:
    """A table (1, H, W, C) at another size, (C, H, W)."""
    return F.interpolate(table.permute(0, 3, 1, 2), size, mode=mode)[0]


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


def mask_of_some(images: int, keys: int) -> Tensor:
    """A bias (B, M) that masks some keys, but never the first of an image."""
    bias = torch.where(torch.rand(images, keys) < 0.4, -30_000.0, 0.0)
    bias[:, 0] = 0
    return bias


def attention_formula(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v, (B, heads, N, d), in double precision; a bias (B, M)."""
    scores = q.double() @ k.double().transpose(2, 3) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias[:, None, None].double()
    return scores.softmax(-1) @ v.double()


def random_attention(
    images: int,
    heads: int,
    queries: int,
    keys: int,
    channels: int,
    masked: bool,
    dtype: torch.dtype,
    scale: float = 1,
) -> tuple[list[Tensor], Optional[Tensor], Tensor]:
    """Random input of attention, as linear layers leave it in memory, and the exact result.

    `scale` is that of the queries.

    Returns:
        Queries, keys and values (B, heads, N, d); a bias of the keys (B, M), or None if none is
        masked; and their attention in double precision, (B, N, heads, d).
    """
    q = (scale * torch.randn(images, queries, heads, channels)).to(dtype).transpose(1, 2)
    kv = torch.randn(images, keys, 2, heads, channels).to(dtype)
    k, v = kv.transpose(1, 3).unbind(2)
    bias = mask_of_some(images, keys) if masked else None
    exact = attention_formula(q.double(), k.double(), v.double(), bias).transpose(1, 2)
    return [q, k, v], bias, exact


# The largest error of attention, relative to the largest of its values.
ATTENTION_ERRORS = {torch.float32: 2e-6, torch.bfloat16: 0.01}


def assert_attention_near(found: Tensor, expected: Tensor, values: Tensor) -> None:
    error = (found.double() - expected).abs().max()
    assert error <= ATTENTION_ERRORS[found.dtype] * values.abs().max()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    relative: Optional[Tensor] = None,
    encode: Optional[Callable] = None,
) -> Tensor:
    """Softmax attention of (C, N) queries over (C, M) keys and values, head by head; (N, M, d) is
    added to the keys, as each query sees them. `encode`: see `encoder`."""
    out = []
    for head, (qh, kh, vh) in enumerate(zip(q.chunk(heads), k.chunk(heads), v.chunk(heads))):
        bias = 0
        if encode is not None:
            qh, kh, bias = encode(head, qh, kh)
        scores = qh.T @ kh
        if relative is not None:
            scores = scores + torch.einsum('di,ijd->ij', qh, relative)
        scores = scores / math.sqrt(qh.shape[0]) + bias
        out.append(vh @ torch.softmax(scores, dim=1).T)
    return torch.cat(out)


# Where a query or key is: row and column, or None for the class token.
Place = Optional[tuple[float, float]]


def encoder(
    weights: dict,
    of: str,
    heads: int,
    size: Sequence[int],
    of_queries: Sequence[Place],
    of_keys: Sequence[Place],
    normalized: bool = False,
) -> Callable[[int, Tensor, Tensor], tuple]:
    """A function of a head, its queries (d, N) and keys (d, M), which returns both rotated as RoPE
    does, a token at a time. Places are those of the tokens."""

    def turned(x: Tensor, places: Sequence[Place]) -> Tensor:
        """Each pair of channels is a complex number, multiplied by exp(i angle)."""
        planes = len(x) // 2
        f_x, f_y = torch.zeros(2, planes, dtype=torch.double)
        for i in range(planes // 2):
            f_x[i] = f_y[planes // 2 + i] = 100 ** (-2 * i / planes)
        out = x.clone()
        for token, place in enumerate(places):
            if place is None:
                continue
            row, column = place
            if normalized:
                row = 2 * math.pi * (2 * (row + 0.5) / size[0] - 1)
                column = 2 * math.pi * (2 * (column + 0.5) / size[1] - 1)
            pairs = torch.view_as_complex(
                x[:, token].double().contiguous().unflatten(0, (planes, 2))
            )
            pairs = pairs * torch.exp(1j * (column * f_x + row * f_y))
            out[:, token] = torch.view_as_real(pairs).flatten()
        return out

    def encode(head: int, q: Tensor, k: Tensor) -> tuple:
        return turned(q, of_queries), turned(k, of_keys), 0

    return encode


def centers(height: int, width: int, cell: int = 1) -> list[tuple[float, float]]:
    """Of the cells of a map, row by row, in tokens."""
    rows, columns = range(0, height, cell), range(0, width, cell)
    return [(y + (cell - 1) / 2, x + (cell - 1) / 2) for y in rows for x in columns]


def windows(
    x: Tensor, weights: dict, of: str, heads: int, size: int, inside: Optional[dict] = None
) -> Tensor:
    qkv = pointwise(x, *layer(weights, f'{of}.attn.qkv'))
    out = torch.empty_like(x)
    for top in range(0, x.shape[1], size):
        for left in range(0, x.shape[2], size):
            here = (slice(None), slice(top, top + size), slice(left, left + size))
            window = qkv[here]
            q, k, v = window.flatten(1).chunk(3)
            at, encode = centers(*window.shape[1:]), None
            if inside is not None:
                encode = encoder(weights, of, heads, window.shape[1:], at, at, **inside)
            out[here] = attention(q, k, v, heads, encode=encode).view_as(out[here])
    return pointwise(out, *layer(weights, f'{of}.attn.proj'))


def everywhere(
    x: Tensor, weights: dict, of: str, heads: int, sr_ratio: int, inside: Optional[dict] = None
) -> Tensor:
    coarse = x
    if sr_ratio > 1:
        coarse = patches(x, sr_ratio, *layer(weights, f'{of}.attn.sr'))
        coarse = layer_norm(coarse, *layer(weights, f'{of}.attn.norm'), 1e-5)
    q = pointwise(x, *layer(weights, f'{of}.attn.q')).flatten(1)
    k, v = pointwise(coarse, *layer(weights, f'{of}.attn.kv')).flatten(1).chunk(2)
    size, encode = x.shape[1:], None
    if inside is not None:
        at, of_keys = centers(*size), centers(*size, sr_ratio)
        encode = encoder(weights, of, heads, size, at, of_keys, **inside)
    out = attention(q, k, v, heads, encode=encode).view_as(x)
    return pointwise(out, *layer(weights, f'{of}.attn.proj'))


def to_means(x: Tensor, weights: dict, of: str, heads: int) -> Tensor:
    """Attention to 7 x 7 means of the map (PVTv2)."""
    cells = []
    for i in range(7):
        for j in range(7):
            rows, columns = (
                slice(n * side // 7, -(-(n + 1) * side // 7))
                for n, side in zip((i, j), x.shape[1:])
            )
            cells.append(x[:, rows, columns].mean((1, 2)))
    coarse = torch.stack(cells, dim=1)[..., None]  # (C, 49, 1)
    sr, bias = layer(weights, f'{of}.attn.sr')
    coarse = pointwise(coarse, sr[:, :, 0, 0], bias)
    coarse = gelu(layer_norm(coarse, *layer(weights, f'{of}.attn.norm'), 1e-5))
    q = pointwise(x, *layer(weights, f'{of}.attn.q')).flatten(1)
    k, v = pointwise(coarse, *layer(weights, f'{of}.attn.kv')).flatten(1).chunk(2)
    out = attention(q, k, v, heads).view_as(x)
    return pointwise(out, *layer(weights, f'{of}.attn.proj'))


def of_all_tokens(
    x: Tensor,
    weights: dict,
    of: str,
    heads: int,
    size: Sequence[int],
    zero_padding: bool,
    inside: Optional[dict] = None,
) -> Tensor:
    """Self-attention of the columnar model's tokens (C, 1, T), whose map is of a size."""
    height, width = size
    firsts = x.shape[2] - height * width
    q, k, v = pointwise(x, *layer(weights, f'{of}.attn.qkv'))[:, 0].chunk(3)
    if any(name.startswith(f'{of}.attn.peg.') for name in weights):
        y = peg(x[:, 0, firsts:].unflatten(1, size), weights, f'{of}.attn.peg', zero_padding)
        y = torch.cat([x[:, :, :firsts], y.flatten(1)[:, None]], dim=2)
        q, k, _ = pointwise(y, *layer(weights, f'{of}.attn.qkv'))[:, 0].chunk(3)
    relative = None
    if f'{of}.attn.position.rows' in weights:
        ys, xs = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
        relative = x.new_zeros(x.shape[2], x.shape[2], len(q) // heads)
        for name, at in (('rows', ys), ('columns', xs)):
            distance = (at[None] - at[:, None]).clamp(-8, 8)  # from the query to the key
            relative[firsts:, firsts:] += weights[f'{of}.attn.position.{name}'][distance + 8]
    encode = None
    if inside is not None:
        at = [None] * firsts + centers(*size)
        encode = encoder(weights, of, heads, size, at, at, **inside)
    out = attention(q, k, v, heads, relative, encode)[:, None]
    return pointwise(out, *layer(weights, f'{of}.attn.proj'))


def same_maps(ours: Sequence[Tensor], theirs: Sequence[Tensor], **tolerance: float) -> None:
    torch.testing.assert_close(list(ours), list(theirs), **tolerance)


def kept(function: Callable[..., object], *inputs: object) -> list[Tensor]:
    """What a call keeps for its gradient."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (tensors.append(x), x)[1], lambda x: x):
        function(*inputs)
    return tensors


def padded(images, more=(0, 0)):
    """A batch of images of several sizes, and as many more rows and columns."""
    h, w = (max(side) + extra for side, extra in zip(zip(*(x.shape[1:] for x in images)), more))
    batch = images[0].new_full((len(images), 3, h, w), 7.0)  # not zeros: any padding
    for cell, image in zip(batch, images):
        cell[:, : image.shape[1], : image.shape[2]] = image
    return batch
