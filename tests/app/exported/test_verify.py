"""cpvt verify: ONNX files of any exporter, clean and with planted defects."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from cpvt_pyramid.app.commands.verify import main
from cpvt_pyramid.app.export.batches import ImageModel
from cpvt_pyramid.app.export.invariance import (
    BATCH,
    IDENTICAL,
    ORDER,
    REPEATED,
    assert_batch_invariant,
    batch_report,
)
from cpvt_pyramid.app.export.self_test import draw
from cpvt_pyramid.app.predict import Predictor
from cpvt_pyramid.app.predict.exported import ExportedModel
from cpvt_pyramid.app.predict.options import RuntimeOptions
from cpvt_pyramid.app.predict.sessions import open_session

CONSTANTS = {
    'pixels': 'int64[2] {2, 3}',
    'small': 'float {0.01}',
    'zero': 'int64[1] {0}',
    'one': 'int64[1] {1}',
    'minus': 'int64[1] {-1}',
    'end': 'int64[1] {1000}',
    'half': 'float {0.5}',
    'nothing': 'float {0.0}',
    'fixed': 'int64[4] {1, 3, 64, 96}',
    'whole': 'int64[2] {1, -1}',
    'row': 'int64[2] {1, 3}',
    'start': 'int64 {0}',
    'step': 'int64 {1}',
}
# Channel means: a classifier of three classes.
CLASSIFIER = 'y = ReduceMean<keepdims = 0>(images, pixels)'
COUNT = """
    shape = Shape<start = 0, end = 1>(images)
    count = Squeeze(shape)
    rows = Cast<to = 1>(count)
"""
# Graphs that are right for one image; the probes that must fail, and for which of four images.
ALL = (0, 1, 2, 3)
DEFECTS = {
    'the row before': (
        'last = Slice(y, minus, end, zero)\n others = Slice(y, zero, minus, zero)\n'
        'before = Concat<axis = 0>(last, others)\n more = Mul(before, small)\n z = Add(y, more)',
        {BATCH: ALL, ORDER: ALL},
    ),
    'a mean over the batch': (
        'mean = ReduceMean(y, zero)\n part = Mul(mean, small)\n z = Sub(y, part)',
        {BATCH: ALL},
    ),
    'the first row for all': (
        'first = Slice(y, zero, one, zero)\n like = Shape(y)\n z = Expand(first, like)',
        {BATCH: (1, 2, 3), ORDER: ALL},
    ),
    'the number of rows': (f'{COUNT} z = Div(y, rows)', {BATCH: ALL}),
    'the number of the row': (
        f'{COUNT} range = Range(start, count, step)\n column = Unsqueeze(range, one)\n'
        'number = Cast<to = 1>(column)\n more = Mul(number, small)\n z = Add(y, more)',
        {BATCH: (1, 2, 3), ORDER: ALL, IDENTICAL: (0,)},
    ),
    'batches of three': (
        f'{COUNT} three = Constant<value: tensor = float {{3.0}}>()\n'
        'wrong = Equal(rows, three)\n more = Cast<to = 1>(wrong)\n z = Add(y, more)',
        {BATCH: (0, 1, 2)},
    ),
    'a random number': (
        'noise = RandomUniformLike(y)\n z = Add(y, noise)',
        {REPEATED: ALL, BATCH: ALL, ORDER: ALL, IDENTICAL: (0,)},
    ),
}


def write(body: str, images: str = 'float[B,3,H,W] images', outputs: str = 'float[B,C] z') -> str:
    constants = (f'{k} = Constant<value: tensor = {v}>()\n' for k, v in CONSTANTS.items())
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> '
        f'foreign ({images}) => ({outputs}) {{{"".join(constants)}{body}}}'
    )
    onnx.save(model, 'foreign.onnx')
    return 'foreign.onnx'


@pytest.mark.parametrize('backend', ['onnxruntime', 'openvino'])
@pytest.mark.parametrize('name', DEFECTS)
def test_planted_defects_are_named(name, backend, capsys):
    body, expected = DEFECTS[name]
    path = write(f'{CLASSIFIER}\n{body}', 'float[B,3,64,96] images')
    file = ImageModel(Path(path), open_session(Path(path), RuntimeOptions(backend=backend)))
    report = batch_report(file, file.images(4, None, (0, 1)))
    assert {probe.name: probe.images for probe in report.probes if not probe.passed} == expected
    assert main([path, '--backend', backend]) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith(f'{path}, {backend} on CPU')
    assert verdict.endswith(f'FAILED, results depend on the batch ({", ".join(expected)})')


@pytest.mark.parametrize('count', [5, 8])
def test_a_defect_of_one_batch_size(count, capsys):
    """Kernels are chosen by the size of the batch."""
    wrong = f"""{COUNT} wanted = Constant<value: tensor = float {{{count}}}>()
        is_wrong = Equal(rows, wanted)
        added = Cast<to = 1>(is_wrong)
        z = Add(y, added)
    """
    assert main([write(f'{CLASSIFIER}\n{wrong}')]) == 1
    assert 'FAILED, results depend on the batch (batch of one size' in capsys.readouterr().out


# Tables (B, 4, 6): boxes up to 1000 pixels and scores up to 1, as YOLO exports them.
TABLE = f"""{CLASSIFIER}
    big = Constant<value: tensor = float {{1000.0}}>()
    flat = Concat<axis = 1>(y, y, y, y)
    table = Reshape(flat, cells)
    pixels_of = Mul(table, big)
    scores = Identity(table)
"""
HIDDEN = {
    # Scores next to boxes, in columns or in rows: a change of 0.02 is small next to 1000.
    'boxes and scores, columns': (
        f"""{TABLE}{COUNT}
        more = Mul(rows, hundredth)
        wrong = Add(scores, more)
        z = Concat<axis = 2>(pixels_of, wrong)
        """,
        'float[B,4,6] z',
    ),
    'boxes and scores, rows': (
        f"""{TABLE}{COUNT}
        more = Mul(rows, hundredth)
        wrong = Add(scores, more)
        table_of = Concat<axis = 2>(pixels_of, wrong)
        z = Transpose<perm = [0, 2, 1]>(table_of)
        """,
        'float[B,6,4] z',
    ),
    'boxes and scores, flattened': (
        f"""{TABLE}{COUNT}
        more = Mul(rows, hundredth)
        wrong = Add(scores, more)
        table_of = Concat<axis = 2>(pixels_of, wrong)
        z = Reshape(table_of, long)
        """,
        'float[B,24] z',
    ),
    # What is below a threshold becomes -1e9, in other cells for each image.
    'fillers': (
        f"""{CLASSIFIER}{COUNT}
        more = Mul(rows, hundredth)
        wrong = Add(y, more)
        low = Less(y, half)
        filler = Constant<value: tensor = float {{-1000000000.0}}>()
        z = Where(low, filler, wrong)
        """,
        'float[B,3] z',
    ),
    # Alone each image gives a constant.
    'the mean of the batch is subtracted': (
        f'{CLASSIFIER}\n mean = ReduceMean(y, zero)\n z = Sub(y, mean)',
        'float[B,3] z',
    ),
    'softmax over the batch': (f'{CLASSIFIER}\n z = Softmax<axis = 0>(y)', 'float[B,3] z'),
    # The small values of tensors of mixed scale: columns in turn, and channels of a map.
    'the mean of the batch is subtracted from small columns': (
        f"""{CLASSIFIER}
        mean = ReduceMean(y, zero)
        wrong = Sub(y, mean)
        large = Mul(y, million)
        z = Concat<axis = 1>(large, wrong, large, wrong)
        """,
        'float[B,12] z',
    ),
    'a tenth of the mean of the batch in a small channel': (
        """small_map = ReduceMean(images, one)
        mean = ReduceMean(small_map, zero)
        part = Mul(mean, tenth)
        wrong = Sub(small_map, part)
        large = Mul(small_map, million)
        z = Concat<axis = 1>(large, wrong)
        """,
        'float[B,2,64,96] z',
    ),
    'a score in the middle of raw boxes': (
        f"""{TABLE}{COUNT}
        more = Mul(rows, hundredth)
        wrong = Add(scores, more)
        table_of = Concat<axis = 2>(pixels_of, wrong)
        z = Unsqueeze(table_of, minus)
        """,
        'float[B,4,6,1] z',
    ),
    'a random number among large ones': (
        f"""{CLASSIFIER}
        noise = RandomUniformLike(y)
        part = Mul(noise, hundredth)
        wrong = Add(y, part)
        large = Mul(y, million)
        z = Concat<axis = 1>(large, wrong)
        """,
        'float[B,6] z',
    ),
    'labels as text': (
        f"""{CLASSIFIER}{COUNT}
        two = Constant<value: tensor = float {{2.0}}>()
        is_pair = Equal(rows, two)
        best = ArgMax<axis = 1, keepdims = 0>(y)
        other = Sub(best, best)
        chosen = Where(is_pair, other, best)
        names = Constant<value: tensor = string[3] {{"a", "b", "c"}}>()
        z = Gather(names, chosen)
        """,
        'string[B] z, float[B,3] y',
    ),
}
CONSTANTS |= {
    'cells': 'int64[3] {-1, 4, 3}',
    'long': 'int64[2] {-1, 24}',
    'hundredth': 'float {0.01}',
    'tenth': 'float {0.1}',
    'million': 'float {1000000.0}',
}


@pytest.mark.parametrize('name', HIDDEN)
def test_defects_that_larger_values_or_constants_hide(name, capsys):
    body, outputs = HIDDEN[name]
    assert main([write(body, 'float[B,3,64,96] images', outputs), '--batch-size', '4']) == 1
    first = 'repeated runs, batch' if 'random' in name else 'batch'
    assert f'FAILED, results depend on the batch ({first} of one size' in capsys.readouterr().out


# Statistics of all pixels of a batch, by which or to which the images are scaled.
STATISTICS = {
    'maximum': 'm = ReduceMax(images)\n x = Div(images, m)',
    'minimum': 'm = ReduceMin(images)\n x = Sub(images, m)',
    'range': """high = ReduceMax(images)
        low = ReduceMin(images)
        range = Sub(high, low)
        shifted = Sub(images, low)
        x = Div(shifted, range)""",
    'maximum of each channel': 'm = ReduceMax(images, all_but_channels)\n x = Div(images, m)',
    'minimum of each channel': 'm = ReduceMin(images, all_but_channels)\n x = Sub(images, m)',
    'maximum of each pixel': 'm = ReduceMax(images, zero)\n x = Sub(images, m)',
    'mean': 'm = ReduceMean(images)\n x = Sub(images, m)',
    'deviation': """m = ReduceMean(images)
        centred = Sub(images, m)
        squared = Mul(centred, centred)
        variance = ReduceMean(squared)
        deviation = Sqrt(variance)
        x = Div(images, deviation)""",
    'share of bright pixels': """is_bright = Greater(images, half)
        ones = Cast<to = 1>(is_bright)
        m = ReduceMean(ones)
        x = Sub(images, m)""",
    'median': """flat = Reshape(images, minus)
        total = Size(flat)
        two = Constant<value: tensor = int64 {2}>()
        middle = Div(total, two)
        count = Unsqueeze(middle, zero)
        largest, places = TopK<axis = 0>(flat, count)
        m = ReduceMin(largest)
        x = Sub(images, m)""",
    'quantization': """quantized, scale, point = DynamicQuantizeLinear(images)
        x = DequantizeLinear(quantized, scale, point)""",
}
CONSTANTS |= {'all_but_channels': 'int64[3] {0, 2, 3}', 'all_but_batch': 'int64[3] {1, 2, 3}'}


@pytest.mark.parametrize(
    ('name', 'given'),
    [
        *((name, []) for name in STATISTICS),
        ('maximum', ['--images', 'photographs']),
        ('maximum', ['--batch-size', '2']),
        ('range', ['--value-range', '-2', '2']),
    ],
)
def test_statistics_of_the_batch_are_found(name, given, capsys):
    """Also where all photographs reach from black to white."""
    Path('photographs').mkdir()
    for seed in range(2):
        Image.fromarray(draw(seed, 64, 96)).save(f'photographs/{seed}.png')
    body = f'{STATISTICS[name]}\n y = ReduceMean<keepdims = 0>(x, pixels)'
    path = write(body, 'float[B,3,64,96] images', 'float[B,3] y')
    assert main([path, *given]) == 1
    assert 'FAILED, results depend on the batch (batch of one size' in capsys.readouterr().out


@pytest.mark.parametrize('axes', ['all_but_batch', 'pixels'])
def test_statistics_of_each_image_pass(axes, capsys):
    body = f"""high = ReduceMax(images, {axes})
        low = ReduceMin(images, {axes})
        range = Sub(high, low)
        some = Max(range, small)
        shifted = Sub(images, low)
        x = Div(shifted, some)
        y = ReduceMean<keepdims = 0>(x, pixels)"""
    assert main([write(body, 'float[B,3,64,96] images', 'float[B,3] y')]) == 0
    assert ': passed, ' in capsys.readouterr().out


def test_a_sound_file_of_mixed_scales_passes(capsys):
    """Whose small values are computed from the large ones, so that rounding changes them more."""
    body = f"""{CLASSIFIER}
        large = Mul(y, million)
        shifted = Add(large, y)
        rest = Sub(shifted, large)
        z = Concat<axis = 1>(large, rest, y)
    """
    assert main([write(body, 'float[B,3,64,96] images', 'float[B,9] z')]) == 0
    assert ': passed, ' in capsys.readouterr().out


OTHER_KINDS = {
    'text': (
        'best = ArgMax<axis = 1, keepdims = 0>(y)\n'
        'names = Constant<value: tensor = string[3] {"a", "b", "c"}>()\n z = Gather(names, best)',
        'string[B] z, float[B,3] y',
    ),
    'one row for the batch': ('z = Reshape(y, whole)', 'float[K,C] z'),
    'a sequence with an item for each image': (
        'z = SplitToSequence<axis = 0, keepdims = 0>(y)',
        'seq(float[C]) z',
    ),
    'a sequence of outputs': ('w = Neg(y)\n z = SequenceConstruct(y, w)', 'seq(float[B,C]) z'),
}


@pytest.mark.parametrize('name', OTHER_KINDS)
def test_outputs_of_other_kinds(name, capsys):
    body, outputs = OTHER_KINDS[name]
    path = write(f'{CLASSIFIER}\n{body}', 'float[B,3,64,96] images', outputs)
    assert main([path, '--batch-size', '4']) == 0
    said = capsys.readouterr().out
    assert ': passed, ' in said and 'rounding' not in said
    assert ('divided, one row for the whole batch: z' in said) == (name == 'one row for the batch')


def test_probabilities_by_class_as_scikit_learn_exports_them(capsys):
    """ZipMap: a sequence of dictionaries."""
    file = onnx.load(write(CLASSIFIER, 'float[B,3,64,96] images', 'float[B,3] y'))
    names = {'classlabels_strings': ['cat', 'dog', 'eel']}
    node = onnx.helper.make_node('ZipMap', ['y'], ['by_class'], domain='ai.onnx.ml', **names)
    file.graph.node.append(node)
    file.graph.output.append(onnx.ValueInfoProto(name='by_class'))
    file.opset_import.append(onnx.helper.make_opsetid('ai.onnx.ml', 1))
    Path('foreign.onnx').write_bytes(file.SerializeToString())
    assert main(['foreign.onnx', '--batch-size', '4']) == 0
    assert ': passed, ' in capsys.readouterr().out


CLEAN = {
    'any size': ('float[B,3,H,W] images', CLASSIFIER, 'float[B,3] y'),
    'float16': ('float16[B,3,H,W] images', CLASSIFIER, 'float16[B,3] y'),
    'uint8, channels last': (
        'uint8[B,H,W,3] images',
        'first = Transpose<perm = [0, 3, 1, 2]>(images)\n float = Cast<to = 1>(first)\n'
        + CLASSIFIER.replace('images', 'float'),
        'float[B,3] y',
    ),
    'grey': ('float[B,1,H,W] images', CLASSIFIER, 'float[B,1] y'),
    'several outputs': (
        'float[B,3,H,W] images',
        f'{CLASSIFIER}\n best = ArgMax<axis = 1>(y)\n maps = Relu(images)\n'
        'bright = Greater(images, half)\n found = NonZero(bright)',
        'float[B,3] y, int64[B,1] best, float[B,3,H,W] maps, int64[4,N] found',
    ),
}


@pytest.mark.parametrize('backend', ['onnxruntime', 'openvino'])
@pytest.mark.parametrize('name', CLEAN)
def test_clean_files_pass(name, backend, capsys):
    images, body, outputs = CLEAN[name]
    path = write(body, images, outputs)
    assert main([path, '--backend', backend]) == 0
    *table, verdict = capsys.readouterr().out.splitlines()
    assert f'{path}, {backend} on CPU' in verdict and ': passed, ' in verdict
    assert verdict.endswith('not told the true sizes: batch images of one size')
    assert ('not compared, without a row for each image: found' in table) == (
        name == 'several outputs'
    )


def test_files_that_cannot_be_verified(capfd):
    for images, body, status, complaint in (
        ('float[1,3,64,96] images', CLASSIFIER, 2, 'has the fixed batch size 1; export it with'),
        (
            'float[B,3,H,W] images, float[B,2] scale',
            CLASSIFIER,
            2,
            'must take images of 4 dimensions and nothing else, got images [None, 3, ',
        ),
        ('float[B,8] images', 'y = Relu(images)', 2, 'must take images of 4 dimensions'),
        (
            'float[B,3,H,W] images',
            'w = ReduceMean<keepdims = 0>(images, pixels)\ny = Reshape(w, row)',
            1,
            'fails on a batch of 8 images, but not on one: ',
        ),
        (
            'float[B,3,H,W] images',
            'w = Sub(images, images)\n y = ReduceMean(w, pixels)',
            2,
            'the results are the same for all images',
        ),
        (
            'float[B,3,H,W] images',
            'w = NonZero(images)\n y = Cast<to = 1>(w)',
            2,
            'must return a row for each image, got the outputs y',
        ),
        (
            'float[B,3,H,W] images',
            'w = Sub(images, images)\n v = Div(w, w)\n y = ReduceMean(v, pixels)',
            2,
            'the results are NaN for each image alone; check the weights',
        ),
        (
            'float[B,3,H,W] images',
            'w = Sub(images, half)\n v = ReduceMean(w, pixels)\n y = Mul(v, nothing)',
            2,
            'the results are the same for all images',  # 0 and -0
        ),
        (
            'float[B,3,H,W] images',
            'v = ReduceMean(images, pixels)\n y = Div(v, nothing)',
            2,
            'the results are infinite for each image alone; check the weights',
        ),
        (
            'bfloat16[B,3,H,W] images',
            'w = Cast<to = 1>(images)\n y = ReduceMean(w, pixels)',
            2,
            'its images must be float32, float16 or integers, got ',
        ),
        (
            'float[B,3,H,W] images',
            'w = Reshape(images, fixed)\n y = ReduceMean(w, pixels)',
            2,
            'fails on an image of 256 x 320; --size gives another',
        ),
    ):
        assert main([write(body, images, 'float[B,C] y')]) == status
        (line,) = capfd.readouterr().err.splitlines()  # also what C++ prints
        assert line.startswith('cpvt verify: foreign.onnx') and complaint in line


NOT_OPENED = {
    'a newer opset': ('"" : 18', '"" : 99', 'cannot be opened by onnxruntime .* Opset 99 '),
    'a newer format': ('version: 10', 'version: 99', 'cannot be opened .* IR version: 99, max'),
    'an unknown operator': ('Relu', 'Rely', 'cannot be opened .* No Op registered for Rely'),
    'a value that nothing computes': (
        '(images)',
        '(image)',
        "cannot .* input 'image' is",
    ),
    'half of the file': ('', '', 'cannot be opened by .*; it may be incomplete, or need'),
    'an empty file': ('', '', 'cannot be opened by .*; it may be incomplete, or need'),
}


@pytest.mark.parametrize('name', NOT_OPENED)
def test_files_that_onnxruntime_does_not_open(name, tmp_path, monkeypatch, capfd):
    """The line ends with what onnxruntime says."""
    monkeypatch.chdir(tmp_path)
    old, new, message = NOT_OPENED[name]
    text = (
        '<ir_version: 10, opset_import: ["" : 18]> '
        'foreign (float[B,3,H,W] images) => (float[B,3,H,W] y) {y = Relu(images)}'
    )
    data = onnx.parser.parse_model(text.replace(old, new)).SerializeToString()
    if name == 'half of the file':
        data = data[: len(data) // 2]
    Path('foreign.onnx').write_bytes(b'' if name == 'an empty file' else data)
    assert main(['foreign.onnx']) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(f'cpvt verify: foreign.onnx {message}', line) and 'onnxruntime_src' not in line


def test_the_promise_of_the_runtime_and_that_it_can_fail(model, monkeypatch):
    """With a model that takes padding for image, as many heads do: its scores are means over
    the padded batch."""
    file = onnx.load(model('detection', resize=None, score_thr=0.0))
    for node in file.graph.node:
        if node.op_type == 'ReduceMax':
            node.op_type = 'ReduceMean'
    onnx.save(file, 'careless.onnx')
    predictor = Predictor('careless.onnx', batch_size=4)
    images = [draw(seed, *size) for seed, size in enumerate([(64, 96), (32, 64), (64, 96)])]

    def predict(images: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
        return [{'boxes': found.boxes, 'scores': found.scores} for found in predictor(images)]

    assert_batch_invariant(predict, images, stack=False)
    monkeypatch.setattr(ExportedModel, 'padded_size', lambda self, size: 'one for all')
    with pytest.raises(AssertionError, match='\npadded batch .* scores .* 1$'):
        assert_batch_invariant(predict, images, stack=False)


def test_files_of_this_package_must_know_padding(model, capsys):
    """Their input `valid` tells it; other files may read it."""
    file = onnx.load(model('detection'))
    assert main(['detection.onnx']) == 0
    for node in file.graph.node:
        if node.op_type == 'ReduceMax':
            node.op_type = 'ReduceMean'
    onnx.save(file, 'careless.onnx')
    capsys.readouterr()
    assert main(['careless.onnx']) == 1
    assert capsys.readouterr().out.endswith('FAILED, results depend on the padding of the batch\n')


@pytest.mark.parametrize(
    'options, message',
    [
        (['--tolerance', 'nan'], '--tolerance must be at least 0, got nan'),
        (['--value-range', '1', '0'], '--value-range must rise, got 1.0 0.0'),
    ],
)
def test_options_without_a_meaning(options, message, model, capsys):
    assert main([str(model('detection')), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_stride_that_no_image_can_have(model, capfd):
    assert main([str(model('detection', stride=0))]) == 2
    error = capfd.readouterr().err
    assert 'stride must be a whole number from 1, got 0' in error and 'Traceback' not in error


class SwappedInBatches:
    """A session of a detector with two boxes, in the other order in batches."""

    metadata = '{"format": 1, "task": "detection", "dtype": "float32"}'
    shapes = {'images': [None, 3, 64, 96]}
    dtypes = {'images': np.dtype('float32')}

    def __init__(self, more: float) -> None:
        self.more = more  # of the last score, in batches

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        images = inputs['images']
        count = len(images)
        level = images.mean((1, 2, 3))[:, None] / 1000
        boxes = np.array([[10, 10, 50, 50], [60, 20, 90, 40]], np.float32)
        scores = level + np.array([0.5, 0.5 + 1e-7], np.float32)
        if count > 1:
            boxes, scores = boxes[::-1], scores[:, ::-1] + np.array([0, self.more], np.float32)
        return {
            'boxes': np.repeat(boxes[None], count, 0),
            'scores': scores.astype(np.float32),
            'labels': np.zeros((count, 2), np.int64),
        }


@pytest.mark.parametrize(('more', 'passed'), [(0, True), (5e-4, False), (0.3, False)])
def test_the_order_of_ties_may_depend_on_the_batch(more, passed):
    """Boxes whose scores are almost equal may swap rows, but have the same scores."""
    file = ImageModel(Path('detector.onnx'), SwappedInBatches(more))
    assert batch_report(file, file.images(3, None, (0, 255))).passed == passed


def test_images_of_a_user(capsys):
    """A file that finds nothing in synthetic images."""
    bright = 'least = ReduceMin<keepdims = 0>(images, pixels)\n y = Relu(least)'
    path = write(bright, 'float[B,3,64,96] images', 'float[B,3] y')
    options = [path, '--batch-size', '2', '--value-range', '-2', '0.1']
    assert main(options) == 2
    assert 'give images that they depend on with --images' in capsys.readouterr().err
    Path('photographs').mkdir()
    for value in (240, 250):
        Image.new('RGB', (50, 40), (value, 255, 245)).save(f'photographs/{value}.png')
    assert main([*options, '--images', 'photographs']) == 0
    assert main([*options, '--images', 'nowhere']) == 2
    assert 'no image or folder at nowhere' in capsys.readouterr().err
