"""Scaled dot-product attention.

PyTorch's fused kernels compute it. On a CPU they hand float32 products to MKL. Where oneDNN's are
twice as fast (see `products.py`), attention with many queries and keys goes to oneDNN instead, some
queries at a time: their scores stay in the processor's cache and are recomputed in the backward
pass. bfloat16 inference on a CPU takes the same steps by PyTorch's batched products, which are
oneDNN's: the fused kernel's are slower than its float32 ones. In training on a CPU the queries of
a few heads are dealt to all threads, which the kernel's backward pass does not do.

Shapes: B batch, N queries, M keys, d channels of a head.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

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

# Scores of a head from which on oneDNN is faster than the fused kernel, in float32. Where MKL is
# fast, as on Zen 4, the fused kernel takes 0.7 to 0.95 of oneDNN's time.
WORTH_ONEDNN = 2**20 if MKL_IS_SLOW else math.inf

# Keys from which on bfloat16 attention with a mask is faster in batches than fused: not in windows.
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
    parts = [x.split(MAX_BATCH) for x in (q, k, v)]
    parts.append([None] * len(parts[0]) if mask is None else mask.split(MAX_BATCH))
    return torch.cat([F.scaled_dot_product_attention(*part, dropout) for part in zip(*parts)])


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
    """Attention of several heads at a time, (B, heads, N, d), without gradient; the mask is that of
    keys."""
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

    That of PyTorch's fused kernel takes each head of an image as a whole, so that one image and one
    head, as in PCPVT's first stage, are mostly the work of one thread. Here an image is several
    images to the kernel, with the same keys and values, and a group of the queries each.
    """
    queries = q.shape[2]
    groups = groups_for(q.shape[0] * q.shape[1], queries, torch.get_num_threads())
    if groups == 1:
        return plain_attention(q, k, v, mask, 0.0)
    q = F.pad(q, (0, 0, 0, -queries % groups)) if queries % groups else q
    q = q.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)
    k, v, mask = (
        None if x is None else x[:, None].expand(-1, groups, -1, -1, -1).flatten(0, 1)
        for x in (k, v, mask)
    )
    out = plain_attention(q, k, v, mask, 0.0).unflatten(0, (-1, groups))
    return out.transpose(1, 2).flatten(2, 3)[:, :, :queries]


def groups_for(heads: int, queries: int, threads: int) -> int:
    """Number of groups of a head's queries, so that threads share the work of the heads of all
    images evenly; 1 if they do so anyway."""
    turns = math.ceil(heads / threads)
    if heads >= 0.9 * turns * threads:
        return 1
    return max(min(threads // math.gcd(heads, threads), queries // MIN_GROUP), 1)


class _Attention(torch.autograd.Function):
    """`attention` with its gradient, for which the weights are recomputed."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        return attention(q, k, v, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Optional[Tensor], ...]:
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
    """Attention weights of a part (rows, M), from keys that are `scaled`."""
    scores = onednn_affine(q, k, None if bias is None else bias[image])
    return torch.softmax(scores, dim=-1, out=scores)


def query_parts(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Image, head and queries of each part."""
    batch, heads, queries, _ = q.shape
    rows = max(AT_A_TIME // k.shape[2], 1)
    for b, head, start in itertools.product(range(batch), range(heads), range(0, queries, rows)):
        yield b, head, slice(start, start + rows)


def key_bias(mask: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
    """Bias of scores (B, M) that a mask of keys stands for: 0 or minus infinity."""
    if mask is None:
        return None
    hidden = ~mask[:, 0, 0]
    return hidden.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float('-inf'))


def scaled(k: Tensor) -> Tensor:
    return k * k.shape[-1] ** -0.5


def empty_map(q: Tensor) -> Tensor:
    """Like q, with the heads of a token next to each other."""
    return q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
