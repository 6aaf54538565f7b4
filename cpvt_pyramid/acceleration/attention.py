"""Attention with many queries and keys, some queries at a time.

Shapes: B batch, N queries, M keys, d channels of a head.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..columnar import SelfAttention
from ..grid import Grid
from ..model import Attention, GlobalAttention, LinearAttention
from .processor import fused_attention_is_slow
from .products import affine, cast, common_dtype, is_differentiated, summed_outer

# From this number of scores of a head on, products of oneDNN are faster than PyTorch's fused
# kernel, where that is slow.
WORTH_ONEDNN = 2**16

# Scores that are computed at a time, which stay in the cache.
SCORES_AT_A_TIME = 2**20

# The fused kernel takes 256 queries at a time if it has at least as many as this, else 64 or 32.
MIN_GROUP = 768


class AttentionInParts(Attention):
    """Mixin, listed before an attention of the model.

    Where PyTorch's fused kernel is slow, oneDNN computes large attention. The scores stay in the
    processor's cache and are recomputed in the backward pass. Elsewhere training distributes the
    queries of a few heads over all threads. Encodings inside the attention and dropout are left to
    the attention itself.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        dtype = common_dtype(q, k, v)
        if dtype is None or not is_simple(self, grid):
            return super().attend(q, k, v, grid)
        q, k, v = cast(dtype, q, k, v)
        trains = torch.is_grad_enabled()
        if fused_attention_is_slow(dtype) and q.shape[2] * k.shape[2] >= WORTH_ONEDNN:
            bias = None if grid.key_bias is None else grid.key_bias[:, 0, 0].to(q.dtype)
            function = PartsOfAttention.apply if trains else attention_in_parts
            return function(q, k, v, bias)
        if trains:
            bias = None if grid.key_bias is None else grid.key_bias.to(q.dtype)
            return grouped_attention(q, k, v, bias).transpose(1, 2)
        return super().attend(q, k, v, grid)


class GlobalAttentionInParts(AttentionInParts, GlobalAttention):
    pass


class LinearAttentionInParts(AttentionInParts, LinearAttention):
    pass


class SelfAttentionInParts(AttentionInParts, SelfAttention):
    pass


def is_simple(attention: Attention, grid: Grid) -> bool:
    """True if an attention has neither an encoding inside nor dropout."""
    drops = attention.attn_drop is not None and attention.attn_drop.training
    return not drops and attention.position is None and grid.rotations is None


def attention_in_parts(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Attention by oneDNN, (B, N, heads, d), without gradient.

    `bias`, (B, M), is added to the scores; None: nothing is.
    """
    out = q.new_empty(q.transpose(1, 2).shape)
    k = scaled(k)
    count = heads_at_a_time(q, k)
    if count == 1:
        k = k.contiguous()
        v = v.transpose(2, 3).contiguous()
        for b, head, rows in query_parts(q, k):
            weights = attention_weights(q[b, head, rows], k[b, head], bias, b)
            out[b, rows, head] = torch.ops.aten.mkldnn_linear(weights, v[b, head]).to_dense()
        return out
    for b in range(q.shape[0]):
        image_bias = None if bias is None else bias[b]
        for start in range(0, q.shape[1], count):
            heads = slice(start, start + count)
            found = batched_attention(q[b, heads], k[b, heads], v[b, heads], image_bias)
            out[b, :, heads] = found.transpose(0, 1)
    return out


def heads_at_a_time(q: Tensor, k: Tensor) -> int:
    """Number of heads of an image whose scores stay in the cache.

    It is 1 in float32, because oneDNN computes PyTorch's batched products only in bfloat16.
    """
    if q.dtype == torch.float32:
        return 1
    fitting = SCORES_AT_A_TIME // (q.shape[2] * k.shape[2])
    return min(max(fitting, 1), q.shape[1])


def batched_attention(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Attention (n, N, d) by batched products, without gradient; the keys are `scaled`.

    `bias`, of a shape that expands to that of the scores, (n, N, M), is added to them.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    if bias is not None:
        scores += bias
    return torch.bmm(scores.to_mkldnn().softmax(-1).to_dense(), v)


class PartsOfAttention(torch.autograd.Function):
    """`attention_in_parts` with its gradient, for which the weights are recomputed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        return attention_in_parts(q, k, v, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        q, k, v, bias = ctx.saved_tensors
        if is_differentiated(grad):
            return *attention_gradients(grad.transpose(1, 2), q, k, v, bias), None
        grad_q = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
        k = scaled(k).contiguous()
        v = v.contiguous()
        grad_k = torch.zeros_like(k, dtype=torch.float32)  # sums of many parts
        grad_v = torch.zeros_like(v, dtype=torch.float32)
        for b, head, rows in query_parts(q, k):
            part_q = q[b, head, rows].contiguous()
            part_grad = grad[b, rows, head].contiguous()
            weights = attention_weights(part_q, k[b, head], bias, b).to_dense()
            grad_v[b, head] += summed_outer(weights, part_grad)
            grad_scores = torch.ops.aten._softmax_backward_data(
                affine(part_grad, v[b, head]), weights, -1, weights.dtype
            )
            grad_k[b, head] += summed_outer(grad_scores, part_q)
            grad_q[b, head, rows] = affine(grad_scores, k[b, head].t())
        return grad_q, scaled(grad_k).to(k.dtype), grad_v.to(v.dtype), None


def attention_weights(q: Tensor, k: Tensor, bias: Optional[Tensor], image: int) -> Tensor:
    """Attention weights (rows, M) of some queries, as a tensor of oneDNN; the keys are `scaled`.

    oneDNN's softmax takes half as long as PyTorch's.
    """
    image_bias = None if bias is None else bias[image]
    return torch.ops.aten.mkldnn_linear(q.to_mkldnn(), k, image_bias).softmax(-1)


def query_parts(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Split the queries into parts whose scores stay in the cache: image, head and queries."""
    batch, heads, queries, _ = q.shape
    rows = max(SCORES_AT_A_TIME // k.shape[2], 1)
    for b, head, start in itertools.product(range(batch), range(heads), range(0, queries, rows)):
        yield b, head, slice(start, start + rows)


def scaled(k: Tensor) -> Tensor:
    return k * k.shape[-1] ** -0.5


def attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
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
