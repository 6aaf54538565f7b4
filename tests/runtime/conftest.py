"""Tests of the runtime: tiny ONNX files in the exporter's format, each test in an empty folder."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

DIGITS = ('zero', 'one', 'two')
INPUTS = 'float[B,3,H,W] images, int64[B,2] valid'
# Boxes: the image, its centre, and a row without a box. The first score is the brightest pixel's,
# so that a mistaken image in a batch is noticed.
DETECTOR = """
    order = Constant<value: tensor = int64[4] {1, 0, 1, 0}>()
    corners = Constant<value: tensor =
        float[1,3,4] {0., 0., 1., 1., 0.25, 0.25, 0.75, 0.5, 0., 0., 0., 0.}>()
    factors = Constant<value: tensor = float[1,3] {1., 0.4, 0.}>()
    classes = Constant<value: tensor = int64[1,3] {1, 0, -1}>()
    one = Constant<value: tensor = int64[1] {1}>()
    all = Constant<value: tensor = int64[3] {1, 2, 3}>()
    zero = Constant<value: tensor = int64 {0}>()
    white = Constant<value: tensor = float {255.}>()
    sizes = Cast<to = 1>(valid)
    sides = Gather<axis = 1>(sizes, order)
    long = Unsqueeze(sides, one)
    boxes = Mul(long, corners)
    brightest = ReduceMax<keepdims = 0>(images, all)
    share = Div(brightest, white)
    column = Unsqueeze(share, one)
    scores = Mul(column, factors)
    nothing = Mul(valid, zero)
    places = ReduceSum(nothing, one)
    labels = Add(places, classes)
"""
# The brightest channel of each pixel. The map is enlarged by copying to the original size.
LABELS = """
    zero = Constant<value: tensor = int64 {0}>()
    one = Constant<value: tensor = int64 {1}>()
    first = Constant<value: tensor = int64[1] {0}>()
    second = Constant<value: tensor = int64[1] {1}>()
    third = Constant<value: tensor = int64[1] {2}>()
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
DETECTIONS = 'float[B,3,4] boxes, float[B,3] scores, int64[B,3] labels'
MODELS = {
    'detection': (INPUTS, DETECTIONS, DETECTOR),
    # The mask of each box is its left half.
    'box': (
        INPUTS,
        f'{DETECTIONS}, float[B,3,2,2] masks',
        DETECTOR
        + """
    left = Constant<value: tensor =
        float[1,3,2,2] {1., 0., 1., 0., 1., 0., 1., 0., 1., 0., 1., 0.}>()
    more = Constant<value: tensor = int64[2] {1, 2}>()
    tall = Unsqueeze(column, more)
    none = Sub(tall, tall)
    masks = Add(none, left)
""",
    ),
    # The mask of each box is a colour channel.
    'image': (
        INPUTS,
        f'{DETECTIONS}, float[B,3,h,w] masks',
        DETECTOR
        + """
    cells = MaxPool<kernel_shape = [4, 4], strides = [4, 4], ceil_mode = 1>(images)
    masks = Div(cells, white)
""",
    ),
    'labels': (
        f'{INPUTS}, int64[B,2] original',
        'uint8[B,h,w] labels',
        '    sizes = Identity(valid)' + LABELS,
    ),
    'probabilities': (
        INPUTS,
        'float[B,3,H,W] probabilities',
        """
    step = Constant<value: tensor = float {8.}>()
    logits = Div(images, step)
    probabilities = Softmax<axis = 1>(logits)
""",
    ),
    'two': (
        INPUTS,
        'float[B,2,H,W] probabilities',
        """
    step = Constant<value: tensor = float {16.}>()
    centre = Constant<value: tensor = float {3.}>()
    one = Constant<value: tensor = float {1.}>()
    first = Constant<value: tensor = int64[1] {0}>()
    channel = Constant<value: tensor = int64[1] {1}>()
    red = Slice(images, first, channel, channel)
    scaled = Div(red, step)
    logits = Sub(scaled, centre)
    yes = Sigmoid(logits)
    no = Sub(one, yes)
    probabilities = Concat<axis = 1>(no, yes)
""",
    ),
}
MODELS['labels without valid'] = (
    'float[B,3,H,W] images, int64[B,2] original',
    'uint8[B,h,w] labels',
    '    sizes = Shape<start = 2>(images)' + LABELS,
)
MODELS['fixed'] = ('float[2,3,64,96] images, int64[2,2] valid', DETECTIONS, DETECTOR)
TASKS = {'detection': 'detection', 'fixed': 'detection', 'box': 'instance', 'image': 'instance'}


def write_model(path: Path, name: str, **changes: object) -> Path:
    """Write one of `MODELS`, with changes to its metadata."""
    inputs, outputs, body = MODELS[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 18]> tiny ({inputs}) => ({outputs}) {{{body}}}'
    )
    about = {
        'format': 1,
        'task': TASKS.get(name, 'segmentation'),
        'classes': DIGITS,
        'palette': [[255, 0, 0], [0, 255, 0], [0, 0, 255]],
        'resize': {'short': 40, 'long': 60},
        'masks': name if name in ('box', 'image') else None,
        'raw': False,
        'score_thr': 0.3,
    }
    onnx.helper.set_model_props(model, {'cpvt_pyramid': json.dumps(about | changes)})
    onnx.save(model, path)
    return path


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model() -> Callable[..., Path]:
    """A function that writes one of `MODELS` into the folder, see `write_model`."""
    return lambda name, **changes: write_model(
        Path(f'{name}.onnx'.replace(' ', '-')), name, **changes
    )


@pytest.fixture
def photos() -> list[np.ndarray]:
    """Smooth images of odd sizes, with different brightest pixels."""
    rng = np.random.default_rng(0)
    sizes = ((91, 133), (160, 77), (50, 50), (37, 211))
    return [
        np.kron(rng.integers(0, 100 + 50 * i, (h // 10 + 1, w // 10 + 1, 3)), np.ones((10, 10, 1)))[
            :h, :w
        ].astype(np.uint8)
        for i, (h, w) in enumerate(sizes)
    ]
