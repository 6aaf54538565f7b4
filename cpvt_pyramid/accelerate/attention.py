"""Scaled dot-product attention.

PyTorch's fused kernels compute it, except on CPUs in these cases:
- float32, where oneDNN's products are twice as fast as MKL's, which the fused kernel uses (see
  `products.py`): attention with many queries and keys goes to oneDNN, some queries at a time.
  Their scores stay in the processor's cache and are recomputed in the backward pass.
- bfloat16 inference: the same steps by PyTorch's batched products, which are oneDNN's. The fused
  kernel is slower in bfloat16 than in float32.
- training: the queries of a few heads are distributed over all threads, which the backward pass of
  the fused kernel does not do.

Shapes: B batch, N queries, M keys, d channels of a head.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import (
    MKL_IS_SLOW,
    every_derivative_is_needed,
    graph_is_exported,
    is_unobserved,
    opaque_when_compiled,
    use_onednn,
    use_onednn_bfloat16,
)
from .products import AT_A_TIME, onednn_affine, refuse_create_graph, summed_outer

# CUDA's fused attention kernels refuse a larger batch (of windows, here).
MAX_BATCH = 65_535

# From this number of scores of a head on, oneDNN is faster than the fused kernel in float32. Where
# MKL is fast, as on Zen 4, it never is: the fused kernel takes 0.7 to 0.95 of oneDNN's time.
WORTH_ONEDNN = 2**20 if MKL_IS_SLOW else math.inf

# From this number of keys on, bfloat16 attention with a mask is faster in batches than fused.
# Windows have fewer.
WORTH_BATCHES = 128

# The fused kernel takes 256 queries at a time if it has at least as many as this, else 64 or 32.
MIN_GROUP = 768


def differentiable_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout: float
) -> Tensor:
    """The formula, in operations that have every derivative."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float('-inf'))
    elif mask is not None:
        scores = scores + mask
    return F.dropout(torch.softmax(scores, dim=-1), dropout) @ v


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout: float
) -> Tensor:
    if every_derivative_is_needed():
        return differentiable_attention(q, k, v, mask, dropout)
    if graph_is_exported():
        # One call serves all batch sizes; torch.export would specialize the loop. ONNX looks for
        # rows without keys if the mask is boolean, in passes over all scores.
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float('-inf'))
        return F.scaled_dot_product_attention(q, k, v, mask, dropout)
    if not isinstance(q, Tensor) or q.shape[0] <= MAX_BATCH:  # a proxy of torch.fx
        return F.scaled_dot_product_attention(q, k, v, mask, dropout)
    masks = itertools.repeat(None) if mask is None else mask.split(MAX_BATCH)
    parts = zip(q.split(MAX_BATCH), k.split(MAX_BATCH), v.split(MAX_BATCH), masks)
    results = []
    for part_q, part_k, part_v, part_mask in parts:
        out = F.scaled_dot_product_attention(part_q, part_k, part_v, part_mask, dropout)
        results.append(out)
    return torch.cat(results)


@opaque_when_compiled(lambda q, *others: q.new_empty(q.transpose(1, 2).flatten(2).shape))
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout: float) -> Tensor:
    """softmax(q k^T / sqrt(d)) v.

    Args:
        q: queries (B, heads, N, d).
        k: keys (B, heads, M, d).
        v: values (B, heads, M, d).
        mask: (B, 1, 1, M), True where a key may be attended to, or (B, heads, N, M), to be added
            to the scores; None: everywhere.
        dropout: probability of dropping an attention weight.

    Returns:
        (B, N, heads * d).
    """
    trains = torch.is_grad_enabled()
    if dropout or not is_unobserved(q) or (mask is not None and mask.dtype != torch.bool):
        out = plain_attention(q, k, v, mask, dropout)
    elif q.shape[2] * k.shape[2] >= WORTH_ONEDNN and use_onednn(q):
        function = _Attention.apply if trains else attention
        out = function(q, k, v, key_bias(mask, q.dtype))
    elif trains and q.is_cpu:
        out = grouped_attention(q, k, v, mask)
    elif not trains and (mask is None or k.shape[2] >= WORTH_BATCHES) and use_onednn_bfloat16(q):
        out = batched_attention(q, k, v, mask)
    else:
        out = plain_attention(q, k, v, mask, 0.0)
    return out.transpose(1, 2).flatten(2)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Attention by oneDNN, (B, heads, N, d), without gradient; the bias is (B, M)."""
    out = empty_map(q)
    k = scaled(k).contiguous()
    v = v.transpose(2, 3).contiguous()
    for b, head, rows in query_parts(q, k):
        weights = softmax(q[b, head, rows], k[b, head], bias, b)
        out[b, head, rows] = onednn_affine(weights, v[b, head])
    return out


def batched_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Attention of several heads at a time, (B, heads, N, d), without gradient; the mask is of
    keys, (B, 1, 1, M)."""
    batch, heads, queries, _ = q.shape
    out = empty_map(q)
    k = scaled(k).transpose(2, 3)
    bias = key_bias(mask, q.dtype)
    rows = max(AT_A_TIME // (heads * k.shape[3]), 1)
    images = max(rows // queries, 1)
    for b, start in itertools.product(range(0, batch, images), range(0, queries, rows)):
        part = slice(b, b + images), slice(None), slice(start, start + rows)
        scores = q[part] @ k[part[0]]
        if bias is not None:
            scores += bias[part[0], None, None]
        out[part] = torch.softmax(scores, dim=-1, out=scores) @ v[part[0]]
    return out


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> Tensor:
    """`plain_attention` whose backward pass keeps all threads busy, (B, heads, N, d).

    The backward pass of PyTorch's fused kernel gives each head of an image to one thread: with one
    image and one head, as in PCPVT's first stage, the other threads are idle. Here the queries of
    an image are split into groups, which the kernel gets as images with the same keys and values.
    """
    queries = q.shape[2]
    groups = groups_for(q.shape[0] * q.shape[1], queries, torch.get_num_threads())
    if groups == 1:
        return plain_attention(q, k, v, mask, 0.0)
    if queries % groups:
        q = F.pad(q, (0, 0, 0, -queries % groups))
    q = q.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)
    if mask is not None:
        mask = for_each_group(mask, groups)
    out = plain_attention(q, for_each_group(k, groups), for_each_group(v, groups), mask, 0.0)
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


class _Attention(torch.autograd.Function):
    """`attention` with its gradient, for which the weights are recomputed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        return attention(q, k, v, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        refuse_create_graph()
        q, k, v, bias = ctx.saved_tensors
        grad_q = empty_map(q)
        k = scaled(k).contiguous()
        v = v.contiguous()
        grad_k = torch.zeros_like(k)
        grad_v = torch.zeros_like(v)
        for b, head, rows in query_parts(q, k):
            part_q = q[b, head, rows].contiguous()
            part_grad = grad[b, head, rows].contiguous()
            weights = softmax(part_q, k[b, head], bias, b)
            grad_v[b, head] += summed_outer(weights, part_grad)
            grad_scores = torch.ops.aten._softmax_backward_data(
                onednn_affine(part_grad, v[b, head]), weights, -1, weights.dtype
            )
            grad_k[b, head] += summed_outer(grad_scores, part_q)
            grad_q[b, head, rows] = onednn_affine(grad_scores, k[b, head].t())
        return grad_q, scaled(grad_k), grad_v, None


def softmax(q: Tensor, k: Tensor, bias: Optional[Tensor], image: int) -> Tensor:
    """Attention weights (rows, M) of some queries; the keys are `scaled`."""
    scores = onednn_affine(q, k, None if bias is None else bias[image])
    return torch.softmax(scores, dim=-1, out=scores)


def query_parts(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Split the queries into parts whose scores stay in the cache: image, head and queries."""
    batch, heads, queries, _ = q.shape
    rows = max(AT_A_TIME // k.shape[2], 1)
    for b, head, start in itertools.product(range(batch), range(heads), range(0, queries, rows)):
        yield b, head, slice(start, start + rows)


def key_bias(mask: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
    """The bias of scores (B, M) for a mask of keys: 0 or minus infinity."""
    if mask is None:
        return None
    hidden = ~mask[:, 0, 0]
    return hidden.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float('-inf'))


def scaled(k: Tensor) -> Tensor:
    return k * k.shape[-1] ** -0.5


def empty_map(q: Tensor) -> Tensor:
    """An empty tensor like q, in which the heads of a token are next to each other in memory."""
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
