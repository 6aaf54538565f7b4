"""Attention by functions of our own, and its gradient in bfloat16 by products of oneDNN.

Shapes: B batch, N queries, M keys, d channels of a head.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bfloat16 import is_captured
from ..grid import Grid, last_multiple
from ..model import Attention, GlobalAttention, LinearAttention
from ..padding.batching import ceil_div
from ..plain_layers import plain_class, replaces_methods
from ..recompute import drops_nothing
from .kernels import (
    Call,
    KeyLayers,
    Linear,
    fast_attention,
    has_products,
    prepare_global_attention,
    prepare_keys_of_patches,
)
from .norms import norm_of
from .ordinary import (
    NotPlain,
    cast,
    check_plain,
    common_dtype,
    fast_dtype,
    is_ordinary,
    takes_plain,
)
from .patches import patches_of
from .products import add_in_float32, in_dtypes_of_forward, is_differentiated, linear_of

# From this number of scores of all heads of an image on, the backward pass by products is faster
# than that of PyTorch's fused kernel, where that is slow. Not of all images: an image's gradients
# would depend on the size of its batch.
WORTH_PRODUCTS = 2**14

# For fewer tokens or keys, to pack the weights of linear layers takes longer than is gained (Zen 4
# and Zen 5).
FEWEST_TOKENS = 64
FEWEST_KEYS = 64

# Scores that are computed at a time for each thread, which stay in its cache. With fewer, calls for
# many small windows take longer than what they compute.
SCORES_AT_A_TIME = 2**20

# The fused kernel takes 256 queries at a time if it has at least as many as this, else 64 or 32.
MIN_GROUP = 768


class AttentionInParts(Attention):
    """Mixin, listed before an attention of the model.

    Functions of our own compute it where they can. Where the backward pass of PyTorch's fused
    kernel is slow, that of large attention is computed by products of oneDNN: the scores stay in
    the processor's cache and are recomputed. Elsewhere training distributes the queries of a few
    heads over all threads. Encodings inside the attention and dropout are left to the attention
    itself.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if is_captured() or takes_plain(q, k.shape[2]):
            return super().attend(q, k, v, grid)
        dtype = common_dtype(q, k, v)
        if dtype is None or not is_simple(self, grid):
            return super().attend(q, k, v, grid)
        q, k, v = cast(dtype, q, k, v)
        bias = key_bias_of(grid)
        if bias is not None:
            bias = bias.to(dtype)
        if not torch.is_grad_enabled():
            return forward_attention(q, k, v, bias)
        if fused_attention_is_slow(dtype) and self.is_large(q, k):
            return PartsOfAttention.apply(q, k, v, bias)
        mask = None if bias is None else bias[:, None, None]
        return grouped_attention(q, k, v, mask).transpose(1, 2)

    def calls_after_norm(self, layer: nn.Module, x: Tensor, grid: Grid) -> Sequence[Call]:
        """The calls of functions that compute `forward(layer(x), grid)` of a layer norm, in
        inference. It is the result of the last one.

        Raises:
            NotPlain: there are none, or calls of a layer do more than to apply its parameters.
        """
        raise NotPlain

    def is_large(self, q: Tensor, k: Tensor) -> bool:
        """True if the backward pass is faster by products, where PyTorch's is slow."""
        return is_worth_products(q, k)


class FusedGlobalAttention(AttentionInParts, GlobalAttention):
    """A `GlobalAttention` whose queries, attention and last layer are one function in inference,
    and in a block the keys and values of its patches another one, from the layer norm on."""

    stands_for: type = GlobalAttention

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        if type(self) not in (FusedGlobalAttention, FusedLinearAttention):  # see `FAST`
            return GlobalAttention.forward(self, x, grid)
        if torch.is_grad_enabled() or is_captured():
            return super().forward(x, grid)
        try:
            q, proj = self.outer_layers(x, grid)
        except NotPlain:
            return super().forward(x, grid)
        kv = self.kv(self.subsample(x, grid))
        dtype = q.weight.dtype
        if not is_ordinary(kv) or kv.dtype != dtype:
            k, v = self.split_by_head(kv, 2)
            x = self.proj(self.attend(self.by_head(self.q(x)), k, v, grid).reshape(x.shape))
        else:
            kv = kv.flatten(1, -2)
            bias = key_bias_of(grid)
            x = prepare_global_attention(x.to(dtype), None, kv, q, proj, self.heads, bias).run()
        return x if self.drop is None else self.drop(x)

    def calls_after_norm(self, layer: nn.Module, x: Tensor, grid: Grid) -> Sequence[Call]:
        check_plain(self, FusedGlobalAttention)
        if self.sr_ratio == 1 or not drops_nothing(self.drop):
            raise NotPlain
        channels = x.shape[-1]
        dtype = x.dtype
        q, proj = self.outer_layers(x, grid)
        norm = norm_of(layer, channels, dtype)
        layers = KeyLayers(
            patches_of(self.sr, self.sr_ratio, channels, channels, dtype),
            norm_of(self.norm, channels, dtype),
            linear_of(self.kv, channels, 2 * channels, dtype),
        )
        rows, columns = self.patch_counts(x, grid)
        if len(x) * rows * columns < FEWEST_KEYS:
            raise NotPlain
        outside = None if grid.padding is None else grid.padding.outside
        keys = prepare_keys_of_patches(x, norm, layers, self.sr_ratio, rows, columns, outside)
        bias = key_bias_of(grid)
        return keys, prepare_global_attention(x, norm, keys.out, q, proj, self.heads, bias)

    def outer_layers(self, x: Tensor, grid: Grid) -> tuple[Linear, Linear]:
        """Those of queries and result, if our function can compute them with the attention; see the
        function of this name."""
        if replaces_methods(self) or not is_simple(self, grid):
            raise NotPlain
        return outer_layers(x, self.q, 1, self.proj, self.heads)

    def patch_counts(self, x: Tensor, grid: Grid) -> tuple[int, int]:
        """Rows and columns of the patches that have a key each; see `subsample`."""
        height, width = x.shape[1:3]
        if self.drop_border and grid.padding is None:
            height = last_multiple(height, self.sr_ratio)
            width = last_multiple(width, self.sr_ratio)
        return ceil_div(height, self.sr_ratio), ceil_div(width, self.sr_ratio)


class FusedLinearAttention(FusedGlobalAttention, LinearAttention):
    """The same of a `LinearAttention`."""

    stands_for = LinearAttention


def fused_attention_is_slow(dtype: torch.dtype) -> bool:
    """True if products of oneDNN are faster than the gradient of PyTorch's fused attention.

    That multiplies blocks of queries and keys: in float32 by MKL, and in bfloat16 by a call of
    oneDNN's for each. In windows of 7 x 7 a training step takes 1.4 times as long with it, and with
    patches as keys 0.98 to 1.06 times (Intel with AMX; without AMX products gain more).
    """
    return dtype == torch.bfloat16


def key_bias_of(grid: Grid) -> Optional[Tensor]:
    """(B, M), added to the scores of each key. None: nothing is."""
    return None if grid.key_bias is None else grid.key_bias[:, 0, 0]


def outer_layers(
    x: Tensor, first: nn.Module, parts: int, proj: nn.Module, heads: int
) -> tuple[Linear, Linear]:
    """The layers before and after the attention of tokens (B, H, W, C), in the dtype in which
    functions of our own compute them with it.

    The first layer makes one part, queries, or three, queries, keys and values.

    Raises:
        NotPlain: the functions cannot compute them, or would not be faster, or calls of the layers
            do more than to apply their weights and biases.
    """
    if x.is_nested or x.dim() != 4 or x.numel() < FEWEST_TOKENS * x.shape[-1]:
        raise NotPlain
    channels = x.shape[-1]
    dtype = fast_dtype(x)
    if dtype is None or channels % heads or not has_products(dtype, channels, channels // heads):
        raise NotPlain
    of_first = linear_of(first, channels, parts * channels, dtype)
    return of_first, linear_of(proj, channels, channels, dtype)


@functools.cache
def in_parts(kind: Any) -> Any:
    """The fast class of a class of attention that has no `attend` of its own."""
    fast = type(f'{kind.__name__}InParts', (AttentionInParts, kind), dict(stands_for=kind))
    fast.__reduce_ex__ = reduce_in_parts  # type: ignore[method-assign,assignment]
    return fast


def reduce_in_parts(attention: Attention, protocol: object) -> tuple:
    """What `pickle` and `copy` make an attention of: its fast class has no name in a module."""
    return new_in_parts, (plain_class(attention),), vars(attention)


def new_in_parts(kind: Any) -> Attention:
    """An attention of the fast class of a class, without attributes."""
    return object.__new__(in_parts(kind))


def is_simple(attention: Attention, grid: Grid) -> bool:
    """True if an attention has neither an encoding inside nor dropout."""
    drops = attention.attn_drop is not None and attention.attn_drop.training
    return not drops and attention.position is None and grid.rotations is None


def forward_attention(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Attention of queries, keys and values by head, (B, N, heads, d), without gradient.

    `bias`, (B, M), is added to the scores; None: nothing is.
    """
    if not has_products(q.dtype, q.shape[-1]):
        mask = None if bias is None else bias[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
    return fast_attention(q, k, v, bias)


class PartsOfAttention(torch.autograd.Function):
    """`forward_attention` with its gradient, for which the weights are recomputed in parts."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        return forward_attention(q, k, v, bias)

    @staticmethod
    @in_dtypes_of_forward
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        q, k, v, bias = ctx.saved_tensors
        grad = grad.transpose(1, 2)
        if is_differentiated(grad):
            return *attention_gradients(grad, q, k, v, bias), None
        return *gradients_in_parts(grad, q, k, v, bias), None


Gradients = tuple[Tensor, Tensor, Tensor]  # those of queries, keys and values


def gradients_in_parts(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]
) -> Gradients:
    """The gradients of attention, some heads at a time, or some queries of a head."""
    found = [empty_by_token(x) for x in (q, k, v)]
    k = scaled(k)
    for part in batches(q, k):
        part_q, part_k, part_v, part_grad = [x[part] for x in (q, k, v, grad)]
        keys = part_k.flatten(0, 1)
        values = part_v.flatten(0, 1).transpose(1, 2)
        grad_k: Optional[Tensor] = None
        grad_v: Optional[Tensor] = None
        for rows in query_rows(q, k):
            row_q, row_grad = [x[:, :, rows].flatten(0, 1) for x in (part_q, part_grad)]
            weights = attention_weights(row_q, keys, bias_of_part(bias, part))
            grad_scores = softmax_gradient(torch.bmm(row_grad, values), weights)
            grad_q = torch.bmm(grad_scores, keys)
            found[0][part][:, :, rows] = grad_q.unflatten(0, part_q.shape[:2])
            grad_k = add_in_float32(grad_k, torch.bmm(grad_scores.transpose(1, 2), row_q))
            grad_v = add_in_float32(grad_v, torch.bmm(weights.transpose(1, 2), row_grad))
        if grad_k is not None and grad_v is not None:
            found[1][part] = scaled(grad_k).unflatten(0, part_k.shape[:2])
            found[2][part] = grad_v.unflatten(0, part_v.shape[:2])
    return found[0], found[1], found[2]


def empty_by_token(x: Tensor) -> Tensor:
    """A tensor of the shape (B, heads, N, d) of x whose heads are next to each other in memory, as
    those of a linear layer's result are."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def softmax_gradient(grad: Tensor, weights: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)


def is_worth_products(q: Tensor, k: Tensor) -> bool:
    """True if the backward pass is faster by products, where PyTorch's is slow."""
    return q.shape[1] * q.shape[2] * k.shape[2] >= WORTH_PRODUCTS


Part = tuple[slice, slice]  # images and heads


def batches(q: Tensor, k: Tensor) -> Iterator[Part]:
    """Split images and heads into parts whose scores stay in the cache."""
    batch, count, queries, _ = q.shape
    heads = max(scores_at_a_time() // (queries * k.shape[2]), 1)
    images = max(heads // count, 1)
    for image, head in itertools.product(range(0, batch, images), range(0, count, heads)):
        yield slice(image, image + images), slice(head, head + heads)


def query_rows(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Split the queries of a head into rows whose scores stay in the cache."""
    count = max(scores_at_a_time() // k.shape[2], 1)
    for start in range(0, q.shape[2], count):
        yield slice(start, start + count)


def scores_at_a_time() -> int:
    return SCORES_AT_A_TIME * torch.get_num_threads()


def bias_of_part(bias: Optional[Tensor], part: Part) -> Optional[Tensor]:
    images, _ = part
    return None if bias is None else bias[images]


def attention_weights(q: Tensor, k: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Attention weights (n, N, M) of the n heads of some images, of queries (n, N, d) and keys
    (n, M, d), which are `scaled`. `bias` has a row for each image.

    oneDNN's softmax takes half as long as PyTorch's.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    if bias is not None:
        scores.unflatten(0, (len(bias), -1)).add_(bias[:, None, None])
    return scores.to_mkldnn().softmax(-1).to_dense()


def scaled(k: Tensor) -> Tensor:
    return k * k.shape[-1] ** -0.5


def attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]
) -> Gradients:
    """The gradients of attention by their formulas, which can be differentiated themselves."""
    k = scaled(k)
    scores = q @ k.transpose(2, 3)
    if bias is not None:
        scores = scores + bias[:, None, None]
    weights = scores.softmax(-1)
    grad_weights = grad @ v.transpose(2, 3)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    grad_k = scaled(grad_scores.transpose(2, 3) @ q)
    return grad_scores @ k, grad_k, weights.transpose(2, 3) @ grad


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """PyTorch's attention whose backward pass keeps all threads busy, (B, heads, N, d).

    The backward pass of PyTorch's fused kernel gives each head of an image to one thread: with one
    image and one head, as in PCPVT's first stage, the other threads are idle. Here the queries of
    an image are split into groups, which the kernel gets as images with the same keys and values.
    """
    queries = q.shape[2]
    groups = groups_for(q.shape[0] * q.shape[1], queries, torch.get_num_threads())
    if groups == 1:
        return F.scaled_dot_product_attention(q, k, v, bias)
    if queries % groups:
        q = F.pad(q, (0, 0, 0, -queries % groups))
    q = q.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)
    if bias is not None:
        bias = for_each_group(bias, groups)
    k = for_each_group(k, groups)
    v = for_each_group(v, groups)
    out = F.scaled_dot_product_attention(q, k, v, bias)
    out = out.unflatten(0, (-1, groups))
    return out.transpose(1, 2).flatten(2, 3)[:, :, :queries]


def for_each_group(x: Tensor, groups: int) -> Tensor:
    """Repeat each image of a batch for its groups of queries."""
    return x[:, None].expand(-1, groups, -1, -1, -1).flatten(0, 1)


def groups_for(heads: int, queries: int, threads: int) -> int:
    """Number of groups of a head's queries that keeps all threads busy; 1 if whole heads do.

    `heads` counts those of all images.
    """
    turns = math.ceil(heads / threads)
    if heads >= 0.9 * turns * threads:
        return 1
    even = threads // math.gcd(heads, threads)  # every thread gets as many groups
    return max(min(even, queries // MIN_GROUP), 1)
