"""Changes to an OpenVINO model that make it faster, and leave its results as they are.

Shapes: B batch, H x W map, C channels.
"""

from typing import Any

import numpy as np


def join_blocks(model: Any) -> int:
    """Let attention and MLPs that `cpvt export` divides into blocks take all tokens at once;
    returns how many do. Only a file of ours gives the same results.

    OpenVINO computes attention without a matrix of all scores. A loop takes a little longer, and
    NNCF quantizes no branches.
    """
    changed = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() == 'If' and 'Loop' in kinds_in(node, 1):
            take_first_branch(node)
            changed += 1
    if changed:
        model.validate_nodes_and_infer_types()
    return changed


def kinds_in(node: Any, branch: int) -> set[str]:
    """The kinds of operations in a branch of an `If`."""
    return {inner.get_type_name() for inner in node.get_function(branch).get_ordered_ops()}


def take_first_branch(node: Any) -> None:
    """Replace an `If` by its first branch."""
    branch = node.get_function(0)
    parameters = branch.get_parameters()
    for given in node.get_input_descriptions(0):
        value = node.input_value(given.input_index)
        for target in parameters[given.body_parameter_index].output(0).get_target_inputs():
            target.replace_source_output(value)
    results = branch.get_results()
    for returned in node.get_output_descriptions(0):
        value = results[returned.body_value_index].input_value(0)
        output = node.output(returned.output_index)
        value.set_names(output.get_names())
        output.set_names(set())
        for target in output.get_target_inputs():
            target.replace_source_output(value)


def is_quantized(model: Any) -> bool:
    """Whether a model has 8-bit weights or quantized values."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == 'FakeQuantize':
            return True
        if node.get_type_name() == 'Constant' and len(node.get_output_shape(0)) > 1:
            if node.get_element_type().get_type_name() in ('i8', 'u8'):
                return True
    return False


def to_rows(model: Any) -> int:
    """Let layer norms and the additions of residuals, which take maps (B, H, W, C), take rows
    (B, H * W, C); returns how many do.

    The CPU plugin stores the result of an operation on four dimensions as if the second were the
    channels. It copies these maps to that order and back around each norm, which takes up to a
    third of the time. Three dimensions stay as they are.

    It folds constants, which in a quantized model would turn 8-bit weights into float32.
    """
    from openvino.passes import ConstantFolding, Manager

    manager = Manager()  # the axes of norms and some weights are computed in an ONNX file
    manager.register_pass(ConstantFolding())
    manager.run_passes(model)
    changed = 0
    for node in model.get_ordered_ops():
        if is_norm_of_map(node):
            node.input(1).replace_source_output(integers([-1]))
            as_rows(node, inputs=[0])
        elif is_sum_of_maps(node):
            as_rows(node, inputs=[0, 1])
        else:
            continue
        changed += 1
    model.validate_nodes_and_infer_types()
    return changed


def is_norm_of_map(node: Any) -> bool:
    """Whether a node normalizes the channels of a map (B, H, W, C)."""
    if node.get_type_name() != 'MVN' or not is_map(node.input_value(0)):
        return False
    axes = node.input_value(1).get_node()
    return axes.get_type_name() == 'Constant' and axes.get_data().ravel().tolist() in ([3], [-1])


def is_sum_of_maps(node: Any) -> bool:
    """Whether a node adds two maps of one size. Sizes that differ would be broadcast; those of the
    residuals of a file for all sizes are both unknown, and of a file for one size equal."""
    if node.get_type_name() != 'Add':
        return False
    terms = [node.input_value(0), node.input_value(1)]
    if not all(is_map(term) for term in terms):
        return False
    first, second = (term.get_partial_shape() for term in terms)
    sides = [*list(first)[1:3], *list(second)[1:3]]
    unknown = all(side.is_dynamic for side in sides)
    known = all(side.is_static for side in sides)
    return first[3] == second[3] and (unknown or known and list(first)[1:3] == list(second)[1:3])


def is_map(value: Any) -> bool:
    """Whether a value may be a map (B, H, W, C)."""
    shape = value.get_partial_shape()
    return shape.rank.is_static and len(shape) == 4 and shape[3].is_static


def as_rows(node: Any, inputs: list[int]) -> None:
    """Let a node take rows (B, H * W, C) at these inputs, and return a map (B, H, W, C) with its
    names."""
    import openvino.opset13 as ops

    value = node.input_value(inputs[0])
    channels = value.get_partial_shape()[3].get_length()
    shape = ops.shape_of(value)
    targets = node.output(0).get_target_inputs()
    for place in inputs:
        rows = ops.reshape(node.input_value(place), integers([0, -1, channels]), True)
        node.input(place).replace_source_output(rows.output(0))
    result = ops.reshape(node.output(0), shape, False).output(0)
    result.set_names(node.output(0).get_names())
    node.output(0).set_names(set())
    for target in targets:
        target.replace_source_output(result)


def integers(values: list[int]) -> Any:
    import openvino.opset13 as ops

    return ops.constant(np.array(values, np.int64)).output(0)
