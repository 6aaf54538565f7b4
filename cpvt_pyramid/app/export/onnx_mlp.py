"""MLPs in ONNX with bounded memory: large maps pass through in blocks of tokens.

Peak memory of RetinaNet on PCPVT-S in onnxruntime for 800 x 1344 pixels, with attention in blocks:
0.64 GB, and 0.84 GB without blocks of MLPs; of Semantic FPN on PCPVT-S for 1024 x 2048, 1.05 and
1.10 GB.

Shapes: N tokens of a batch, C channels, D channels of the wide map, K tokens of a block.
"""

from typing import Any

import onnxscript
import torch
import torch.nn.functional as F
from onnxscript import BOOL, FLOAT, INT64, graph
from onnxscript import opset18 as op
from torch import Tensor, fx
from torch.export import ExportedProgram

from .onnx_attention import TRUE

VALUES = 1 << 20  # of the wide map in a block: 4 MiB, which fit into a cache
LINEAR = torch.ops.aten.linear.default
GELU = torch.ops.aten.gelu.default


@torch.library.custom_op('cpvt_pyramid::mlp', mutates_args=())
def mlp(x: Tensor, weight: Tensor, bias: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
    """Two linear layers with a GELU between them, as one operator of a graph."""
    return F.linear(F.gelu(F.linear(x, weight, bias)), weight_2, bias_2)


@mlp.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_2.shape[0])


def join_mlps(program: ExportedProgram) -> None:
    """Replace linear layers with a GELU between them by the operator `mlp`."""
    for second in program.graph.find_nodes(op='call_function', target=LINEAR):
        gelu = second.args[0]
        if not is_used_once(gelu, GELU) or gelu.kwargs.get('approximate', 'none') != 'none':
            continue
        first = gelu.args[0]
        if not is_used_once(first, LINEAR) or len(first.args) < 3 or len(second.args) < 3:
            continue
        with program.graph.inserting_before(second):
            joined = program.graph.call_function(mlp._opoverload, (*first.args, *second.args[1:]))
        joined.meta.update(second.meta)
        second.replace_all_uses_with(joined)
        for node in (second, gelu, first):
            program.graph.erase_node(node)
    program.graph.lint()


def is_used_once(node: Any, target: Any) -> bool:
    """Whether a node is a call of a function whose result one node reads."""
    return isinstance(node, fx.Node) and node.target == target and len(node.users) == 1


def mlp_in_onnx(x: Any, weight: Any, bias: Any, weight_2: Any, bias_2: Any) -> Any:
    """The operator `mlp`."""
    first = op.Transpose(weight, perm=[1, 0])
    second = op.Transpose(weight_2, perm=[1, 0])
    root, one, half = (op.Constant(value_float=n) for n in (2**0.5, 1.0, 0.5))
    return mlp_in_blocks(x, first, bias, second, bias_2, root, one, half, values=VALUES)


@onnxscript.script(op, default_opset=op)
def mlp_in_blocks(
    x: FLOAT,
    first: FLOAT,
    bias: FLOAT,
    second: FLOAT,
    bias_2: FLOAT,
    root: FLOAT,
    unit: FLOAT,
    half: FLOAT,
    values: int,
) -> FLOAT:
    """The operator `mlp`, with at most this number of values of the wide map at a time. The weights
    are (C, D) and (D, C)."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    channels = op.Shape(x, start=-1)
    tokens = op.Div(op.Size(x), channels)
    most = op.Max(op.Div(op.Constant(value_int=values), op.Shape(bias)), one)
    blocks = op.Div(op.Sub(op.Add(tokens, most), one), most)  # rounded up
    if op.Squeeze(op.Equal(blocks, one)):
        wide = op.Add(op.MatMul(x, first), bias)
        bent = op.Mul(op.Mul(wide, op.Add(op.Erf(op.Div(wide, root)), unit)), half)
        result = op.Add(op.MatMul(bent, second), bias_2)
    else:
        rows = op.Div(op.Sub(op.Add(tokens, blocks), one), blocks)  # rounded up
        all_rows = op.Mul(rows, blocks)
        flat = op.Reshape(x, op.Concat(tokens, channels, axis=0))
        padded = op.Pad(flat, op.Concat(zero, zero, op.Sub(all_rows, tokens), zero, axis=0))

        @graph()
        def pass_block(i: INT64, goes_on: BOOL):
            start = op.Mul(i, rows)
            block = op.Slice(padded, start, op.Add(start, rows), zero)
            block_wide = op.Add(op.MatMul(block, first), bias)
            activated = op.Add(op.Erf(op.Div(block_wide, root)), unit)
            block_bent = op.Mul(op.Mul(block_wide, activated), half)
            mapped = op.Add(op.MatMul(block_bent, second), bias_2)
            return op.Identity(goes_on), mapped

        # (blocks, K, C)
        found = op.Loop(op.Squeeze(blocks), op.Constant(value=TRUE), body=pass_block)
        together = op.Reshape(found, op.Concat(all_rows, op.Shape(bias_2), axis=0))
        kept = op.Slice(together, zero, tokens, zero)
        result = op.Reshape(kept, op.Concat(op.Shape(x, end=-1), op.Shape(bias_2), axis=0))
    return result
