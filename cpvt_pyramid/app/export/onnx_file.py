"""From an exportable model to an ONNX model: capture by torch.export, and translation."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import onnx
import onnxscript
import torch
from onnxscript import BOOL, FLOAT, UINT8
from onnxscript import opset18 as op
from torch.export import Dim, ExportedProgram

from ...versions import require_torch
from .base import Exportable, Settings, as_arguments
from .labels import best_of_classes
from .nms import survives
from .onnx_attention import attention, attention_in_onnx, choose_attention
from .onnx_mlp import join_mlps, mlp, mlp_in_onnx

require_torch((2, 7), 'cpvt export')

OPSET = 18
LOWEST = torch.finfo(torch.float32).min

# The size of the two images at which a graph for all sizes is captured: unequal sides, that need
# padding on both axes, with maps of several cells at a stride of 128. A batch of one and a map of
# one cell would become constants.
EXAMPLE = 333, 490


class ExportError(RuntimeError):
    """A stage of the export failed; the message begins with its name."""


def capture(model: Exportable, settings: Settings) -> ExportedProgram:
    """The graph of an exportable model, for all H and W or for one size; the batch is dynamic.
    Raises an ExportError."""
    height, width = settings.size or EXAMPLE
    sizes = torch.tensor([[height, width], [height // 2, width // 2]])
    given = {'images': torch.zeros(2, 3, height, width), 'valid': sizes, 'original': 2 * sizes}
    arguments = as_arguments({name: given[name] for name in model.input_shapes(settings)})
    shapes = [None if x is None else {0: Dim.DYNAMIC} for x in arguments]
    if settings.size is None:
        shapes[0] = dict.fromkeys((0, 2, 3), Dim.DYNAMIC)
    try:
        with torch.no_grad(), no_cache():
            program = torch.export.export(
                model, arguments, dynamic_shapes=tuple(shapes), strict=False
            )
    except Exception as error:  # many kinds, from all of PyTorch
        raise ExportError(f'torch.export: {type(error).__name__}: {error}') from error
    # Guards refuse sizes at which a reshape would not copy, such as those of a single window. The
    # graph is right there, too, which the comparison with PyTorch shows.
    if hasattr(program, '_guards_code'):
        program._guards_code = []
    return program


def translate(program: ExportedProgram, outputs: Sequence[str]) -> onnx.ModelProto:
    """A captured graph in ONNX's standard operators. Raises an ExportError."""
    join_mlps(program)
    choose_attention(program)
    inputs = [name for name in program.graph_signature.user_inputs if name is not None]
    try:
        with no_cache():
            model = torch.onnx.export(
                program,
                input_names=inputs,
                output_names=list(outputs),
                opset_version=OPSET,
                dynamo=True,
                custom_translation_table=IN_ONNX,
                verbose=False,
            ).model_proto
    except Exception as error:
        raise ExportError(f'translation to ONNX: {type(error).__name__}: {error}') from error
    tidy(model)
    return model


def no_cache() -> AbstractContextManager:
    """Without PyTorch's cache of shapes, which with symbols takes longer than it saves."""
    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)


def nms_in_onnx(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """`nms.survives` by NonMaxSuppression, which lists survivors, image by image."""
    count = op.Shape(scores, start=1, end=2)
    chosen = op.NonMaxSuppression(
        boxes,
        op.Unsqueeze(scores, op.Constant(value_ints=[1])),
        count,
        op.Constant(value_floats=[iou_threshold]),
        op.Constant(value_floats=[0.0]),
    )  # (survivors, 3): image, class 0, candidate
    places = op.Gather(chosen, op.Constant(value_ints=[0, 2]), axis=1)
    ones = op.Expand(op.Constant(value_int=1), op.Shape(chosen, start=0, end=1))
    none = op.Expand(op.Constant(value_int=0), op.Shape(scores))
    return op.Cast(op.ScatterND(none, places, ones), to=onnx.TensorProto.BOOL)


def gelu_in_onnx(x: Any, approximate: str = 'none') -> Any:
    """`F.gelu`; that of erf in the order of operations that onnxruntime fuses."""
    if approximate == 'tanh':
        cube = op.Mul(op.Mul(x, x), x)
        inner = op.Add(x, op.Mul(op.Constant(value_float=0.044715), cube))
        bent = op.Tanh(op.Mul(op.Constant(value_float=(2 / math.pi) ** 0.5), inner))
    else:
        bent = op.Erf(op.Div(x, op.Constant(value_float=2**0.5)))
    doubled = op.Mul(x, op.Add(bent, op.Constant(value_float=1.0)))
    return op.Mul(doubled, op.Constant(value_float=0.5))


@onnxscript.script(op, default_opset=op)
def labels_in_onnx(scores: FLOAT, rows: FLOAT, columns: FLOAT, possible: BOOL, dtype: int) -> UINT8:
    """`labels.best_of_classes`."""
    classes = op.Squeeze(op.NonZero(possible), op.Constant(value_ints=[0]))
    across = op.Transpose(columns, perm=[0, 2, 1])
    size = op.Concat(op.Shape(rows, start=0, end=2), op.Shape(columns, start=1, end=2), axis=0)
    # These names are in the graph, too, and none of its outputs may be called so.
    best_score = op.Expand(op.Constant(value_float=LOWEST), size)
    best_label = op.Expand(op.Cast(op.Constant(value_int=0), to=dtype), size)
    count = op.Size(classes)
    for i in range(count):
        label = op.Gather(classes, i, axis=0)
        score = op.MatMul(rows, op.MatMul(op.Gather(scores, label, axis=1), across))
        best_label = op.Where(op.Greater(score, best_score), op.Cast(label, to=dtype), best_label)
        best_score = op.Max(score, best_score)
    return best_label


IN_ONNX = {
    attention._opoverload: attention_in_onnx,
    torch.ops.aten.gelu.default: gelu_in_onnx,
    mlp._opoverload: mlp_in_onnx,
    survives._opoverload: nms_in_onnx,
    best_of_classes._opoverload: labels_in_onnx,
}


def tidy(model: onnx.ModelProto) -> None:
    """Name the dynamic dimensions of the inputs, and remove what only the exporter needs, such as
    the source lines of each node."""
    symbols = {}
    for value in model.graph.input:
        for dim, name in zip(value.type.tensor_type.shape.dim, ('batch', '', 'height', 'width')):
            if dim.dim_param and name:
                symbols[dim.dim_param] = dim.dim_param = symbols.get(dim.dim_param, name)
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_param = symbols[dim.dim_param]
            elif dim.dim_param:  # a formula, which the format has no room for
                dim.Clear()
    remove_notes(model.graph)


def remove_notes(graph: onnx.GraphProto) -> None:
    """Remove the shapes of values, the metadata and the texts of a graph and of those inside."""
    del graph.value_info[:]
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ''
    for node in graph.node:
        for attribute in node.attribute:
            attribute.doc_string = ''
            if attribute.HasField('g'):  # the body of a loop or a branch
                remove_notes(attribute.g)
