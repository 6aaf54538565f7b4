"""cpvt quantize: a small segmentor in 8 bits, what it says about itself, and what is refused."""

import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest
from PIL import Image
from support import ROOT

from cpvt_pyramid.app.commands import quantize as tool
from cpvt_pyramid.app.commands import verify as verify_tool
from cpvt_pyramid.app.export import quantization
from cpvt_pyramid.app.export.accuracy import agreement_of
from cpvt_pyramid.app.export.quantization import (
    Latency,
    computed_products,
    evenly_spaced,
    float32_model,
    split_images,
    stored_bytes,
)
from cpvt_pyramid.app.export.self_test import draw, own_test, pack, verify_session
from cpvt_pyramid.app.export.stored_files import stored_files
from cpvt_pyramid.app.predict import Predictor
from cpvt_pyramid.app.predict.exported import ExportedModel
from cpvt_pyramid.app.predict.options import DEFAULTS, ModelOptions
from cpvt_pyramid.app.predict.sessions import OpenVino, SessionError, read_openvino
from cpvt_pyramid.app.predictions.kinds import Detections

CLASSES = ('red', 'green', 'blue')
FILES = ['model-int8.bin', 'model-int8.report.json', 'model-int8.xml']
DIM = 8
# A patch embedding, a block, a PEG and a head, for pixels; the class is the brightest channel.
BODY = """
    shifted = Sub(images, mean)
    pixels = Div(shifted, std)
    embedded = Conv<pads = [1, 1, 1, 1]>(pixels, backbone.patch_embeds.0.proj.weight)
    tokens = Transpose<perm = [0, 2, 3, 1]>(embedded)
    normed = LayerNormalization<axis = -1>(tokens, scale)
    hidden = MatMul(normed, fc1)
    biased = Add(hidden, backbone.blocks.0.0.mlp.fc1.bias)
    active = Relu(biased)
    output = MatMul(active, fc2)
    branch = Add(output, backbone.blocks.0.0.mlp.fc2.bias)
    block = Add(tokens, branch)
    map = Transpose<perm = [0, 3, 1, 2]>(block)
    position = Conv<group = 8, pads = [1, 1, 1, 1]>(map, backbone.pos_block.0.proj.0.weight)
    map_0 = Add(map, position)
    logits = Conv(map_0, decode_head.conv_seg.weight)
    sizes = Abs(logits)
    clipped = Min(logits, sizes)
    probabilities = Softmax<axis = 1>(clipped)
"""


def write_segmentor(path: str = 'model.onnx', **changes: object) -> Path:
    body = BODY
    random = np.random.default_rng(0)
    identity = np.eye(3, DIM)
    embedding = 0.01 * random.normal(size=(DIM, 3, 3, 3))
    embedding[:, :, 1, 1] += identity.T
    head = 3 * identity + 0.1 * random.normal(size=(3, DIM))
    weights = {
        'mean': np.full((1, 3, 1, 1), 127),
        'std': np.full((1, 3, 1, 1), 64),
        'scale': np.ones(DIM),
        'backbone.patch_embeds.0.proj.weight': embedding,
        'fc1': 0.2 * random.normal(size=(DIM, 2 * DIM)),
        'backbone.blocks.0.0.mlp.fc1.bias': np.zeros(2 * DIM),
        'fc2': 0.1 * random.normal(size=(2 * DIM, DIM)),
        'backbone.blocks.0.0.mlp.fc2.bias': np.zeros(DIM),
        'backbone.pos_block.0.proj.0.weight': 0.05 * random.normal(size=(DIM, 1, 3, 3)),
        'decode_head.conv_seg.weight': head[..., None, None],
    }
    for number, name in enumerate(weights):  # the parser's names have no dots
        body = body.replace(name, f'w{number}') if '.' in name else body
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> '
        f'tiny (float[B,3,H,W] images) => (float[B,3,H,W] probabilities) {{{body}}}'
    )
    for number, (name, values) in enumerate(weights.items()):
        for node in model.graph.node:
            for place, given in enumerate(node.input):
                if given == f'w{number}':
                    node.input[place] = name
        array = onnx.numpy_helper.from_array(values.astype(np.float32), name)
        model.graph.initializer.append(array)
    about = {
        'format': 1,
        'task': 'segmentation',
        'classes': CLASSES,
        'palette': [[255, 0, 0], [0, 255, 0], [0, 0, 255]],
        'resize': {'short': 40, 'long': 60},
        'stride': 1,
        'masks': None,
        'score_thr': 0.3,
        'dtype': 'float32',
    }
    entries = {'cpvt_pyramid': json.dumps(about | changes)}
    onnx.helper.set_model_props(model, entries)
    onnx.save(model, path)
    entries['cpvt_pyramid_test'] = own_test(OpenVino(Path(path)), first_test())
    onnx.helper.set_model_props(model, entries)
    onnx.save(model, path)
    return Path(path)


def first_test() -> str:
    """Test data of which `own_test` fills in the results."""
    sample = {
        'image': {'seed': np.array(3), 'size': np.array([37, 53]), 'original': np.array([37, 53])},
        'shapes': {'probabilities': np.array([3, 37, 53])},
        'stages': {'map_0': np.zeros(1)},
    }
    return pack([sample])


pytestmark = pytest.mark.filterwarnings('ignore:few images to calibrate with')


def write_photos(folder: Path) -> None:
    """Images of several sizes, one grey and one with a palette."""
    folder.mkdir()
    for seed, size in enumerate([(40, 60), (60, 40), (45, 45), (80, 100), (30, 64), (40, 60)]):
        Image.fromarray(draw(seed, *size)).save(folder / f'{seed}.png')
    Image.fromarray(draw(7, 50, 50)[..., 0]).save(folder / '7.png')
    Image.fromarray(draw(8, 50, 50)).quantize(64).save(folder / '8.png')


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of photographs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    folder = Path('photos')
    write_photos(folder)
    return folder


@pytest.fixture(scope='module')
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a segmentor, its quantized form, and photographs; tests only read them."""
    folder = tmp_path_factory.mktemp('made')
    write_photos(folder / 'photos')
    path = write_segmentor(str(folder / 'model.onnx'))
    assert tool.main([str(path), str(folder / 'photos'), '--agreement', '0.9']) == 0
    return folder


def left(folder: Path = Path()) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def error_of(capsys: pytest.CaptureFixture) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_segmentor(photos, capsys):
    path = write_segmentor()
    (photos / 'damaged.jpg').write_bytes(b'\xff\xd8')
    (photos / 'notes.txt').write_text('no image')
    warnings.filterwarnings('always', 'few images to calibrate with')
    assert tool.main(['model.onnx', 'photos', '--agreement', '0.9']) == 0
    shown = capsys.readouterr()
    assert 'cpvt quantize: skipped photos/damaged.jpg: ' in shown.err
    assert 'cpvt quantize: few images to calibrate with: 4;' in shown.err
    assert 'images to calibrate with: 4; to compare on: 4' in shown.out
    assert 'times as fast' in shown.out
    assert left() == [*FILES, 'model.onnx', 'photos']

    report = json.loads(Path('model-int8.report.json').read_text())
    assert report['agreement'] > 0.9 and report['accuracy'] is None
    assert report['latency_ms'].keys() == {'float32', 'int8', 'bfloat16', 'size', 'cores'}
    expected = Predictor(path)('photos/3.png')
    predictor = Predictor('model-int8.xml')
    assert agreement_of(predictor('photos/3.png'), expected).share > 0.9
    assert predictor.model.about['dtype'] == 'int8'
    assert predictor.model.about['quantized']['agreement'] == report['agreement']
    checks = verify_session(predictor.model.path, predictor.model.session)
    assert all(check.passed for check in checks)

    # 7 bits: a processor without VNNI adds two products in 16 bits, but for depthwise convolutions.
    weights = [n for n in read_openvino(Path('model-int8.xml')).get_ops() if is_weight(n)]
    paired = [node for node in weights if len(node.get_output_shape(0)) < 5]
    assert (len(weights), len(paired)) == (5, 4)
    assert all(np.abs(node.get_data()).max() <= 64 for node in paired)

    # Nothing is overwritten, nor quantized twice.
    assert tool.main(['model.onnx', 'photos']) == 2
    assert 'model-int8.xml exists; remove it' in error_of(capsys)
    assert tool.main(['model-int8.xml', 'photos', '--out', 'again.xml']) == 2
    assert 'model-int8.xml is quantized already' in capsys.readouterr().err


def is_weight(node) -> bool:
    return node.get_type_name() == 'Constant' and node.get_element_type().get_type_name() == 'i8'


SMALL = ('--size', '40x60', '--batch-size', '2')


def test_verify_allows_the_steps_of_8_bits_and_finds_a_wrong_layer(made, tmp_path, capsys):
    path = made / 'model-int8.xml'
    assert verify_tool.main([str(path), *SMALL]) == 0
    assert 'its results where it was quantized' in capsys.readouterr().out
    model = read_openvino(path)
    for node in filter(is_weight, model.get_ordered_ops()):
        halved = openvino.op.Constant(node.get_data() // 2)
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(halved.output(0))
    openvino.save_model(model, tmp_path / 'wrong.xml')
    assert verify_tool.main([str(tmp_path / 'wrong.xml'), *SMALL]) == 1
    assert 'FAILED' in capsys.readouterr().out


def test_a_processor_without_vnni_has_the_same_results(made, tmp_path):
    path, photo = made / 'model-int8.xml', made / 'photos/3.png'
    code = (
        'import sys\n'
        'from cpvt_pyramid.app.predict import Predictor\n'
        'Predictor(sys.argv[1])(sys.argv[2]).labels.tofile(sys.argv[3])'
    )
    command = [sys.executable, '-c', code, path, photo, tmp_path / 'labels']
    subprocess.run(command, env=os.environ | {'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE'}, check=True)
    expected = Predictor(path)(photo).labels
    labels = np.fromfile(tmp_path / 'labels', expected.dtype).reshape(expected.shape)
    assert (labels == expected).mean() > 0.99


def test_annotated_data_decide(photos, capsys):
    """The masks are the model's own, so that it has 100%; their values begin at 1."""
    path = write_segmentor()
    Path('data/images').mkdir(parents=True)
    Path('data/masks').mkdir()
    for name in ('0', '2', '4'):
        shutil.copy(photos / f'{name}.png', 'data/images')
        labels = Predictor(path)(photos / f'{name}.png').labels
        Image.fromarray((labels + 1).astype(np.uint8)).save(f'data/masks/{name}.png')
    classes = Predictor(path).model.classes
    names = {value: name for value, name in enumerate(classes, 1)}
    declared = f'format: masks\nval: images\nannotations: masks\nnames: {names}\n'
    Path('data/data.yaml').write_text(declared)
    command = ['model.onnx', 'photos', '--data', 'data/data.yaml', '--drop', '10']
    assert tool.main(command) == 0
    assert 'data/data.yaml: the val data, 3 images' in capsys.readouterr().out
    report = json.loads(Path('model-int8.report.json').read_text())
    assert report['accuracy']['measure'] == 'mIoU'
    assert report['accuracy']['float32'] == 100 and 90 < report['accuracy']['int8'] < 100
    assert (report['calibration_images'], report['compared_images']) == (8, 3)
    for more, message in (
        (['--compare', 'photos'], '--data has the images to compare on; leave out --compare'),
        (['--split', 'test'], 'has no test data with annotations'),
    ):
        assert tool.main([*command, '--out', 'b.xml', *more]) == 2
        assert message in capsys.readouterr().err


def test_a_model_that_loses_too_much_is_not_written(photos, capsys):
    write_segmentor()
    assert tool.main(['model.onnx', 'photos', '--agreement', '1']) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('cpvt quantize: model-int8.xml was not written: it has agreement 9')
    assert 'but 100.00% is wanted' in line
    assert left() == ['model.onnx', 'photos']


def test_a_model_that_8_bits_make_slower_is_told_in_the_last_line(photos, capsys, monkeypatch):
    write_segmentor()
    in_bfloat16 = 'use model.onnx here with --backend openvino --dtype bfloat16'
    opened = quantization.ExportedModel

    def in_float32(path: Path, options: ModelOptions = DEFAULTS) -> object:
        return opened(path, replace(options, dtype='float32'))

    monkeypatch.setattr(quantization, 'ExportedModel', in_float32)  # no processor is asked
    for times, ending in (
        (Latency(84.0, 100.0, None, (50, 50), 1), '0.84 times as fast: use model.onnx here'),
        (Latency(100.0, 84.0, None, (50, 50), 1), 'model-int8.report.json'),
        (Latency(100.0, 84.0, 90.0, (50, 50), 1), 'model-int8.report.json'),
        (Latency(100.0, 84.0, 42.0, (50, 50), 1), f'0.50 times as fast: {in_bfloat16}'),
        (Latency(84.0, 100.0, 90.0, (50, 50), 1), '0.84 times as fast: use model.onnx here'),
    ):
        has_bfloat16 = times.bfloat16 is not None
        monkeypatch.setattr(quantization, 'has_bfloat16', lambda known=has_bfloat16: known)
        monkeypatch.setattr(quantization, 'measure_latency', lambda *_, times=times: times)
        assert tool.main(['model.onnx', 'photos', '--agreement', '0']) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith(ending)
        for path in Path().glob('model-int8.*'):
            path.unlink()


def test_refusals(photos, capsys):
    write_segmentor()
    write_segmentor('task.onnx', task='features')
    Path('empty').mkdir()
    foreign = onnx.load('model.onnx')
    del foreign.metadata_props[:]
    onnx.save(foreign, 'foreign.onnx')
    for command, message in [
        (['model.onnx', 'photos/0.png'], 'at least 2 images are needed'),
        (['model.onnx', 'photos', '--out', 'model.onnx'], '--out must end in .xml'),
        (['model.onnx', 'empty'], 'no images or videos in the folder empty'),
        (['model.onnx', 'photos', '--drop', 'nan'], '--drop must be at least 0'),
        (['foreign.onnx', 'photos'], 'export the model with cpvt export'),
        (['task.onnx', 'photos'], 'its task must be one of'),
        (['photos/0.png', 'photos'], 'photos/0.png must be an exported model'),
        (['model.onnx', 'photos', '--data', 'nowhere'], 'no folder or file nowhere'),
        (['model.onnx', 'photos', '--split', 'val'], '--split needs --data'),
        (['model.onnx', 'photos', '--agreement', '95'], '--agreement must be in [0, 1]'),
    ]:
        assert tool.main(command) == 2
        assert message in error_of(capsys)
    assert left() == ['empty', 'foreign.onnx', 'model.onnx', 'photos', 'task.onnx']


def test_an_image_on_which_the_model_fails_is_named(photos, capsys, monkeypatch):
    write_segmentor()

    def fail(*_):
        raise SessionError('no memory')

    monkeypatch.setattr(ExportedModel, 'predict', fail)
    assert tool.main(['model.onnx', 'photos']) == 2
    assert error_of(capsys).endswith('photos/1.png: the model fails on it: no memory')
    assert left() == ['model.onnx', 'photos']


def test_nothing_is_left_of_an_interrupted_run(photos, capsys, monkeypatch):
    write_segmentor()

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantization, 'measure_latency', interrupt)
    assert tool.main(['model.onnx', 'photos', '--agreement', '0']) == 130
    assert 'interrupted; nothing was written' in capsys.readouterr().err
    assert left() == ['model.onnx', 'photos']


def test_a_killed_run_does_not_stop_the_next(photos, monkeypatch):
    """It leaves its hidden folder and, if it was killed while it moved the files, some of them."""
    write_segmentor()
    kept: list[int] = []

    class Killed(BaseException):
        pass

    def replace_some(source: Path, target: Path) -> None:
        if len(kept) == moved:
            raise Killed
        kept.append(1)
        shutil.move(source, target)

    command = ['model.onnx', 'photos', '--agreement', '0']
    for moved in range(3):
        kept.clear()
        with monkeypatch.context() as patch:
            patch.setattr(quantization.os, 'replace', replace_some)
            patch.setattr(quantization.shutil, 'rmtree', lambda *_, **__: None)  # a SIGKILL
            with pytest.raises(Killed):
                tool.main(command)
        assert not Path('model-int8.xml').exists() and len(left()) == 3 + moved
        assert tool.main(command) == 0
        assert left() == [*FILES, 'model.onnx', 'photos']
        for name in FILES:
            Path(name).unlink()

    Path('model-int8.bin').write_bytes(b'of something else')
    assert tool.main(command) == 2
    assert Path('model-int8.bin').read_bytes() == b'of something else'


@pytest.mark.parametrize('dtype', [np.float32, np.float16])
def test_every_file_of_a_model_counts_once(dtype, tmp_path):
    """Also one that two tensors share, one of them within a branch."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> '
        'tiny (float[B,100] x, bool c) => (float[B,500] y) {'
        'large = Cast<to = 1>(weights) z = MatMul(x, large)'
        'y = If (c) <then_branch = a () => (u) {v = Cast<to = 1>(bias) u = Add(z, v)}, '
        'else_branch = b () => (w) {w = Identity(z)}>}'
    )
    random = np.random.default_rng(0)
    weights = random.normal(size=(100, 500)).astype(dtype)
    bias = random.normal(size=500).astype(dtype)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, 'weights'))
    branch = model.graph.node[2].attribute[0].g
    branch.initializer.append(onnx.numpy_helper.from_array(bias, 'bias'))
    onnx.save(model, inside := tmp_path / 'inside.onnx')
    assert stored_files(inside) == [inside]
    assert inside.stat().st_size > weights.nbytes + bias.nbytes
    options = dict(save_as_external_data=True, location='weights.data', size_threshold=0)
    onnx.save(model, outside := tmp_path / 'outside.onnx', **options)
    data = tmp_path / 'weights.data'
    assert stored_files(outside) == [outside, data]
    assert stored_bytes(outside) == outside.stat().st_size + data.stat().st_size
    openvino.save_model(read_openvino(inside), xml := tmp_path / 'inside.xml', False)
    assert stored_files(xml) == [xml, xml.with_suffix('.bin')]
    with pytest.raises(ValueError, match='not a complete protocol buffer'):
        (tmp_path / 'torn.onnx').write_bytes(outside.read_bytes()[:-400])
        stored_files(tmp_path / 'torn.onnx')


def test_nncf_is_named_if_it_is_not_installed(photos, capsys, monkeypatch):
    write_segmentor()
    monkeypatch.setitem(sys.modules, 'nncf', None)
    assert tool.main(['model.onnx', 'photos']) == 2
    assert "cpvt quantize needs nncf; pip install '.[quantize]'" in error_of(capsys)


def test_images_are_split():
    paths = [Path(str(number)) for number in range(5)]
    assert split_images(paths) == ([paths[0], paths[2], paths[4]], [paths[1], paths[3]])
    assert evenly_spaced(paths, 3) == [paths[0], paths[2], paths[4]]
    assert evenly_spaced(paths, 9) == paths


def detections(*rows: Sequence[float]) -> Detections:
    """Of rows x1, y1, x2, y2, score, label."""
    table = np.array(rows, np.float32).reshape(-1, 6)
    image = np.zeros((50, 50, 3), np.uint8)
    labels = table[:, 5].astype(int)
    return Detections(image, CLASSES, [(0, 0, 0)] * 3, table[:, :4], table[:, 4], labels)


def test_agreement_of_boxes():
    expected = detections((0, 0, 10, 10, 0.9, 0), (20, 20, 30, 30, 0.5, 1))
    cases = [
        (expected, 1.0),
        (detections((1, 0, 10, 10, 0.85, 0), (20, 20, 30, 30, 0.5, 1)), 1.0),
        (detections((6, 0, 16, 10, 0.9, 0), (20, 20, 30, 30, 0.5, 1)), 0.5),  # IoU 0.25
        (detections((0, 0, 10, 10, 0.7, 0), (20, 20, 30, 30, 0.5, 1)), 0.5),  # score
        (detections((0, 0, 10, 10, 0.9, 0), (20, 20, 30, 30, 0.5, 2)), 0.5),  # label
        (detections((0, 0, 10, 10, 0.9, 0)), 2 / 3),
        (detections(), 0.0),
    ]
    assert [agreement_of(found, expected).share for found, _ in cases] == [x for _, x in cases]
    assert agreement_of(detections(), detections()).share == 1


@pytest.mark.parametrize('name', ['nncf', 'torch.utils.cpp_extension'])
def test_lines_of_others_are_not_shown(name, capsys):
    """`torch.utils.cpp_extension` warns of a CUDA without a GPU. Logging is as before then."""
    quantization.import_nncf()
    logger = logging.getLogger(name)
    level = logger.level
    with quantization.quiet():
        print('not shown')
        assert not logger.isEnabledFor(logging.WARNING)
    assert not capsys.readouterr().out
    assert logger.level == level


def test_clipping_is_never_quantized(made):
    """Interpolation clips coordinates, and 8 bits would move pixels."""
    model = read_openvino(made / 'model-int8.xml')
    (clip,) = [node for node in model.get_ops() if node.get_type_name() == 'Minimum']
    kinds = [value.get_node().get_type_name() for value in clip.input_values()]
    assert 'FakeQuantize' not in kinds


def test_products_of_queries_keys_and_values_stay_in_float32():
    model = float32_model(ROOT / 'examples/trees.onnx')
    products = [node for node in model.get_ordered_ops() if node.get_type_name() == 'MatMul']
    assert len(products) == 56  # seven in each of eight blocks
    assert len(computed_products(model)) == 16  # two in each of eight blocks


def test_a_quantized_file_runs_in_8_bits(made):
    """A change to the graph, even folding constants, would turn the weights into float32."""
    session = Predictor(made / 'model-int8.xml').model.session
    kinds = set()
    for node in session.model.get_runtime_model().get_ops():
        if node.get_rt_info()['layerType'].astype(str) in ('FullyConnected', 'Convolution'):
            kinds.add(node.get_rt_info()['runtimePrecision'].astype(str))
    assert kinds & {'i8', 'u8'}
