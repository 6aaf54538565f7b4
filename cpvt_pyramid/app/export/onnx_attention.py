"""Attention in ONNX with bounded memory: large maps are attended to in blocks of queries.

onnxruntime keeps the scores of all queries and keys, also for ONNX's own Attention operator.
OpenVINO fuses the products and the softmax.

Peak memory of Semantic FPN on PCPVT-S in onnxruntime, in blocks and otherwise: 1.0 and 2.4 GB for
1024 x 2048 pixels, as Cityscapes has, 1.8 and 8.4 GB for 2048 x 2048; of RetinaNet on PCPVT-S for
800 x 1344, 0.64 and 0.97 GB. Larger images are taken in tiles only if the model does not resize
them; see `..predict.automatic_tiles`.

Shapes: B batch, N queries, M keys, d channels of a head, K queries of a block.
"""

from typing import Any, Optional

import onnx
import onnxscript
import torch
import torch.nn.functional as F
from onnxscript import BOOL, FLOAT, INT64, graph
from onnxscript import opset18 as op
from torch import Tensor
from torch.export import ExportedProgram

SCORES = 1 << 20  # of a head and image in a block: 4 MiB, which fit into a cache
TRUE = onnx.helper.make_tensor('true', onnx.TensorProto.BOOL, [], [True])
SDPA = torch.ops.aten.scaled_dot_product_attention.default


@torch.library.custom_op('cpvt_pyramid::attention', mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    scale: Optional[float] = None,
) -> Tensor:
    """Attention as one operator of a graph."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)


@attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    scale: Optional[float] = None,
) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def choose_attention(program: ExportedProgram) -> None:
    """Replace attention by the operator `attention`, except what it does not cover, such as causal
    and grouped attention, which PyTorch translates."""
    for node in program.graph.find_nodes(op='call_function', target=SDPA):
        names = ('query', 'key', 'value', 'attn_mask', 'dropout_p', 'is_causal')
        options = dict(zip(names, node.args)) | node.kwargs
        dropout = options.pop('dropout_p', 0.0)
        is_causal = options.pop('is_causal', False)
        is_grouped = options.pop('enable_gqa', False)
        if dropout or is_causal or is_grouped or node.meta['val'].dim() != 4:
            continue
        node.target = attention._opoverload
        node.args = ()
        node.kwargs = options
    program.graph.lint()


def attention_in_onnx(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    scale: Optional[float] = None,
) -> Any:
    """The operator `attention`."""
    queries, channels = query.shape[2:]
    keys = key.shape[2]
    if scale is None:
        scale = channels**-0.5
    # Both are scaled by the root: their products would overflow float16, in which runtimes of GPUs
    # may compute.
    root = op.Constant(value_float=scale**0.5)
    q = op.Mul(query, root)
    k = op.Mul(op.Transpose(key, perm=[0, 1, 3, 2]), root)
    is_small = isinstance(queries, int) and isinstance(keys, int) and queries * keys <= SCORES
    differs = attn_mask is not None and attn_mask.shape[-2] != 1  # from query to query
    bias = bias_in_onnx(attn_mask)
    if is_small or differs:
        return attend(q, k, value, bias)
    return attend_in_blocks(q, k, value, bias, scores=SCORES)


def bias_in_onnx(mask: Any) -> Any:
    """The bias of the scores for a mask of PyTorch. Both runtimes remove the addition of 0."""
    nothing = op.Constant(value_float=0.0)
    if mask is None:
        return nothing
    if mask.dtype == onnx.TensorProto.BOOL:
        return op.Where(mask, nothing, op.Constant(value_float=-float('inf')))
    return mask


@onnxscript.script(op, default_opset=op)
def attend(q: FLOAT, k: FLOAT, v: FLOAT, bias: FLOAT) -> FLOAT:
    """softmax(q k + bias) v, of queries (B, heads, N, d), keys (B, heads, d, M), values
    (B, heads, M, d) and a bias that broadcasts to (B, heads, N, M)."""
    return op.MatMul(op.Softmax(op.Add(op.MatMul(q, k), bias), axis=-1), v)


@onnxscript.script(op, default_opset=op)
def attend_in_blocks(q: FLOAT, k: FLOAT, v: FLOAT, bias: FLOAT, scores: int) -> FLOAT:
    """`attend`, with at most this number of scores at a time for each head and image. The bias is
    the same for all queries."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    axis = op.Constant(value_ints=[2])
    queries = op.Shape(q, start=2, end=3)
    most = op.Max(op.Div(op.Constant(value_int=scores), op.Shape(k, start=3, end=4)), one)
    blocks = op.Div(op.Sub(op.Add(queries, most), one), most)  # rounded up
    if op.Squeeze(op.Equal(blocks, one)):
        weights = op.Softmax(op.Add(op.MatMul(q, k), bias), axis=-1)
        result = op.MatMul(weights, v)
    else:
        rows = op.Div(op.Sub(op.Add(queries, blocks), one), blocks)  # rounded up
        padded_queries = op.Mul(rows, blocks)
        more = op.Sub(padded_queries, queries)
        padded = op.Pad(q, op.Concat(zero, zero, zero, zero, zero, zero, more, zero, axis=0))

        @graph()
        def attend_block(i: INT64, goes_on: BOOL):
            start = op.Mul(i, rows)
            block = op.Slice(padded, start, op.Add(start, rows), axis)
            block_weights = op.Softmax(op.Add(op.MatMul(block, k), bias), axis=-1)
            attended = op.MatMul(block_weights, v)
            return op.Identity(goes_on), attended

        # (blocks, B, heads, K, d)
        found = op.Loop(op.Squeeze(blocks), op.Constant(value=TRUE), body=attend_block)
        by_head = op.Transpose(found, perm=[1, 2, 0, 3, 4])
        shape = op.Concat(op.Shape(q, start=0, end=2), padded_queries, op.Shape(v, start=3), axis=0)
        result = op.Slice(op.Reshape(by_head, shape), zero, queries, axis)
    return result
