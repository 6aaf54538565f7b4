"""Tiny ONNX files in the format of the exporter, as fixtures."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

DIGITS = ('zero', 'one', 'two')
INPUTS = 'float[B,3,H,W] images, int64[B,2] valid'
CONSTANTS = {
    'order': 'int64[4] {1, 0, 1, 0}',
    # The image, its centre, and a row without a box.
    'corners': 'float[1,3,4] {0., 0., 1., 1., 0.25, 0.25, 0.75, 0.5, 0., 0., 0., 0.}',
    'factors': 'float[1,3] {1., 0.4, 0.}',
    'classes': 'int64[1,3] {1, 0, -1}',
    'left': 'float[1,3,2,2] {1., 0., 1., 0., 1., 0., 1., 0., 1., 0., 1., 0.}',
    'zero': 'int64 {0}',
    'one': 'int64 {1}',
    'first': 'int64[1] {0}',
    'second': 'int64[1] {1}',
    'third': 'int64[1] {2}',
    'all': 'int64[3] {1, 2, 3}',
    'more': 'int64[2] {1, 2}',
    'unit': 'float {1.}',
    'three': 'float {3.}',
    'eight': 'float {8.}',
    'sixteen': 'float {16.}',
    'white': 'float {255.}',
}
# The first score is the brightest pixel's, so that a mistaken image in a batch is noticed.
DETECTOR = """
    sizes = Cast<to = 1>(valid)
    sides = Gather<axis = 1>(sizes, order)
    long = Unsqueeze(sides, second)
    boxes = Mul(long, corners)
    brightest = ReduceMax<keepdims = 0>(images, all)
    share = Div(brightest, white)
    column = Unsqueeze(share, second)
    scores = Mul(column, factors)
    nothing = Mul(valid, zero)
    places = ReduceSum(nothing, second)
    labels = Add(places, classes)
"""
# Without the row that is never used.
FULL = (
    DETECTOR.replace('boxes =', 'all_boxes =')
    .replace('scores =', 'all_scores =')
    .replace('labels =', 'all_labels =')
    + """
    boxes = Slice(all_boxes, first, third, second)
    scores = Slice(all_scores, first, third, second)
    labels = Slice(all_labels, first, third, second)
"""
)
# The brightest channel of each pixel. The map is enlarged by copying to the original size.
LABELS = """
    room = Shape<start = 2>(images)
    most = Sub(room, one)
    largest = ReduceMax<keepdims = 0>(original, first)
    heights = Gather<axis = 1>(original, first)
    widths = Gather<axis = 1>(original, second)
    height = Gather(largest, zero)
    width = Gather(largest, one)
    rows = Range(zero, height, one)
    columns = Range(zero, width, one)
    tall = Gather<axis = -1>(sizes, first)
    wide = Gather<axis = -1>(sizes, second)
    enlarged_rows = Mul(rows, tall)
    enlarged_columns = Mul(columns, wide)
    rows_in = Div(enlarged_rows, heights)
    columns_in = Div(enlarged_columns, widths)
    bottom = Gather(most, zero)
    right = Gather(most, one)
    rows_of = Min(rows_in, bottom)
    columns_of = Min(columns_in, right)
    best = ArgMax<axis = 1, keepdims = 0>(images)
    column = Unsqueeze(rows_of, third)
    row = Unsqueeze(columns_of, second)
    long = Gather(room, second)
    across = Concat<axis = 0>(second, second, long)
    at = Expand(column, across)
    lines = GatherElements<axis = 1>(best, at)
    high = Gather(largest, first)
    down = Concat<axis = 0>(second, high, second)
    places = Expand(row, down)
    found = GatherElements<axis = 2>(lines, places)
    labels = Cast<to = 2>(found)
"""
# The mask of each box is its left half.
BOX_MASKS = """
    tall = Unsqueeze(column, more)
    none = Sub(tall, tall)
    masks = Add(none, left)
"""
# The mask of each box is a colour channel.
IMAGE_MASKS = """
    cells = MaxPool<kernel_shape = [4, 4], strides = [4, 4], ceil_mode = 1>(images)
    masks = Div(cells, white)
"""
PROBABILITIES = """
    logits = Div(images, eight)
    probabilities = Softmax<axis = 1>(logits)
"""
TWO = """
    red = Slice(images, first, second, second)
    scaled = Div(red, sixteen)
    logits = Sub(scaled, three)
    yes = Sigmoid(logits)
    no = Sub(unit, yes)
    probabilities = Concat<axis = 1>(no, yes)
"""
DETECTIONS = 'float[B,3,4] boxes, float[B,3] scores, int64[B,3] labels'
MAP = 'uint8[B,h,w] labels'
MODELS = {
    'detection': (INPUTS, DETECTIONS, DETECTOR),
    'full': (INPUTS, DETECTIONS.replace('B,3', 'B,2'), FULL),
    'fixed': ('float[B,3,64,96] images, int64[B,2] valid', DETECTIONS, DETECTOR),
    'box': (INPUTS, f'{DETECTIONS}, float[B,3,2,2] masks', DETECTOR + BOX_MASKS),
    'image': (INPUTS, f'{DETECTIONS}, float[B,3,h,w] masks', DETECTOR + IMAGE_MASKS),
    'labels': (f'{INPUTS}, int64[B,2] original', MAP, '    sizes = Identity(valid)' + LABELS),
    'labels without valid': (
        'float[B,3,H,W] images, int64[B,2] original',
        MAP,
        '    sizes = Shape<start = 2>(images)' + LABELS,
    ),
    'labels of one size': (
        'float[B,3,64,96] images, int64[B,2] original',
        MAP,
        '    sizes = Shape<start = 2>(images)' + LABELS,
    ),
    'probabilities': (INPUTS, 'float[B,3,H,W] probabilities', PROBABILITIES),
    'two': (INPUTS, 'float[B,2,H,W] probabilities', TWO),
}
TASKS = {
    'detection': 'detection',
    'full': 'detection',
    'fixed': 'detection',
    'box': 'instance',
    'image': 'instance',
}


def write_model(name: str, **changes: object) -> Path:
    """Write one of `MODELS` into the folder, with changes to its metadata."""
    path = Path(f'{name.replace(" ", "-")}.onnx')
    inputs, outputs, body = MODELS[name]
    constants = (f'{k} = Constant<value: tensor = {v}>()\n' for k, v in CONSTANTS.items())
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> '
        f'tiny ({inputs}) => ({outputs}) {{{"".join(constants)}{body}}}'
    )
    about = {
        'format': 1,
        'task': TASKS.get(name, 'segmentation'),
        'classes': DIGITS,
        'palette': [[255, 0, 0], [0, 255, 0], [0, 0, 255]],
        'resize': {'short': 40, 'long': 60},
        'stride': 32,
        'masks': name if name in ('box', 'image') else None,
        'score_thr': 0.3,
    }
    onnx.helper.set_model_props(model, {'cpvt_pyramid': json.dumps(about | changes)})
    onnx.save(model, path)
    return path


@pytest.fixture
def model() -> Callable[..., Path]:
    return write_model


@pytest.fixture
def photos() -> list[np.ndarray]:
    """Smooth images of odd sizes, with different brightest pixels."""
    rng, images = np.random.default_rng(0), []
    for i, (h, w) in enumerate([(91, 133), (160, 77), (50, 50), (37, 211)]):
        cells = rng.integers(0, 100 + 50 * i, (h // 10 + 1, w // 10 + 1, 3)).astype(np.uint8)
        images.append(cells.repeat(10, 0).repeat(10, 1)[:h, :w])
    return images
