"""Weights of an ONNX file in float16, for files of half the size.

Only their storage is in float16. Each is cast to float32 where it is used, and runtimes fold the
cast when they load the file. Computation in float16 would round more, and onnxruntime, which lacks
it on CPUs, would cast values between nodes instead.
"""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

VALUES = 1000  # smaller weights take no space
WEIGHTED = ('Conv', 'ConvTranspose', 'Gemm', 'MatMul')  # others may read coordinates


def store_in_float16(model: onnx.ModelProto) -> None:
    """Store the weights of products and convolutions in float16, except those out of its range."""
    weights = set(weight_names(model.graph))
    casts = []
    for tensor in model.graph.initializer:
        if tensor.name not in weights or tensor.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        if values.size < VALUES or np.abs(values).max() > np.finfo(np.float16).max:
            continue
        name = tensor.name
        stored = f'{name}_float16'
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), stored))
        casts.append(onnx.helper.make_node('Cast', [stored], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def weight_names(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of the inputs of products and convolutions, also inside branches and loops."""
    for node in graph.node:
        if node.op_type in WEIGHTED:
            yield from node.input
        for attribute in node.attribute:
            if attribute.HasField('g'):
                yield from weight_names(attribute.g)
