"""Files are written after comparison with PyTorch, and are right at sizes of one and many windows,
with and without padding."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.app.commands.verify import main as verify
from cpvt_pyramid.app.export import verification
from cpvt_pyramid.app.export.base import Batch, Exportable, Preprocessing
from cpvt_pyramid.app.export.files import CPU, Settings, check_passed, write_verified
from cpvt_pyramid.app.export.models import BackboneGraph, exportable
from cpvt_pyramid.app.export.nms import batched_nms, best
from cpvt_pyramid.app.export.onnx_file import capture, translate
from cpvt_pyramid.app.export.onnx_weights import store_in_float16
from cpvt_pyramid.app.predict.sessions import OnnxRuntime, OpenVino
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.archs import Arch
from tests.models.ports import randomize

PHOTOGRAPHS = [np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)]


def small_model(blocks: int = 1) -> Exportable:
    """One stage, of a block with windows and perhaps a global one."""
    torch.manual_seed(0)
    arch = Arch(
        (16,),
        (blocks,),
        (2,),
        (2,),
        sr_ratios=(8,),
        stage_norm=True,
        attention=('WindowAttention', 'GlobalAttention'),
        window=7,
    )
    return exportable(randomize(CPVTPyramid(arch, out_indices=(0,))).eval())


def write(path: Path, blocks: int = 1, **options: object) -> list[Path]:
    model, about = small_model(blocks), {'arch': 'svt', 'classes': ['a', 'b']}
    settings = Settings(**options)
    return write_verified(path, model, model.backbone, about, PHOTOGRAPHS, settings).files


@pytest.fixture(scope='module')
def exported(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(tmp_path_factory.mktemp('exported') / 'model.onnx', blocks=2)


# Of 7 x 4 pixels are a window: one window, less than one, a multiple, no multiple, one row.
@pytest.mark.parametrize('size', [(28, 28), (5, 3), (112, 56), (75, 90), (20, 300), (33, 1)])
def test_every_number_of_windows(exported, size):
    model, run = small_model(2), OnnxRuntime(exported[0], CPU).run
    images = torch.rand(3, 3, *size) * 255
    valid = torch.tensor([size, (size[0] // 2 + 1, size[1]), (1, 1)])
    (found,) = run({'images': images.numpy(), 'valid': valid.numpy()}).values()
    with torch.no_grad():
        for row, image, (height, width) in zip(torch.from_numpy(found), images, valid.tolist()):
            (expected,) = model.reference(image[None, :, :height, :width]).values()
            inside = row[:, : expected.shape[2], : expected.shape[3]]
            torch.testing.assert_close(inside, expected[0], rtol=1e-4, atol=1e-4)
            assert row.count_nonzero() == inside.count_nonzero()  # zero outside


def test_the_file_describes_itself_and_the_report_every_comparison(exported):
    session = onnxruntime.InferenceSession(str(exported[0]), providers=['CPUExecutionProvider'])
    shapes = {value.name: value.shape for value in session.get_inputs()}
    assert shapes == {'images': ['batch', 3, 'height', 'width'], 'valid': ['batch', 2]}
    about = json.loads(session.get_modelmeta().custom_metadata_map['cpvt_pyramid'])
    assert about['format'] == 1 and about['task'] == 'features'
    assert about['classes'] == ['a', 'b'] and about['arch'] == 'svt'
    assert len(about['weights_sha256']) == 64 and about['versions']['torch'] in torch.__version__
    model = onnx.load(exported[0])
    assert {node.domain for node in model.graph.node} == {''}
    assert [(opset.domain, opset.version >= 18) for opset in model.opset_import] == [('', True)]
    assert b'/' + Path(__file__).parts[1].encode() not in exported[0].read_bytes()  # no paths

    report = json.loads(exported[1].read_text())
    assert report['passed'] and len(report['checks']) >= len(verification.BATCHES)
    done = {(check['runtime'], *check['sizes']) for check in report['checks']}
    for runtime in ('onnxruntime', 'openvino'):
        assert {(runtime, '160x213', '213x160', '97x130'), (runtime, '211x1341')} <= done
    assert exported[2].read_text().count('| yes ') == len(report['checks'])


def test_the_file_tests_itself(exported, tmp_path, capsys):
    model = onnx.load(exported[0])
    (entry,) = (x for x in model.metadata_props if x.key == 'cpvt_pyramid_test')
    assert len(entry.value) < 200_000
    weight = max(model.graph.initializer, key=lambda x: len(x.raw_data))
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[np.abs(values).argmax()] *= -1
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, damaged := tmp_path / 'damaged.onnx')
    for options in ([], ['--backend', 'openvino']):
        options = [*options, '--batch-size', '2', '--size', '64x96']
        assert verify([str(exported[0]), *options]) == 0
        assert '192x256 192x256' in capsys.readouterr().out
        assert verify([str(damaged), *options]) == 1
        assert 'FAILED, 4 of 4 comparisons' in capsys.readouterr().out


def test_a_failure_of_openvino_keeps_the_file_and_is_told(exported, monkeypatch):
    right = OnnxRuntime(exported[0], CPU).run

    def wrong(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: x * 1.1 for name, x in right(inputs).items()}

    failing = mock.Mock(side_effect=RuntimeError('no kernel'))
    monkeypatch.setattr(verification, 'BATCHES', verification.BATCHES[3:4])
    for openvino, message in ((wrong, 'map_0 differs by 0.1'), (failing, 'no kernel')):
        runners = {'openvino': openvino, 'onnxruntime': right}
        checks = verification.verify(small_model(2), runners, PHOTOGRAPHS, Settings())
        line = check_passed(checks, '')
        assert line.startswith('do not use the file in OpenVINO: ') and message in line
        assert {check.runtime for check in checks if not check.passed} == {'openvino'}


def test_weights_in_float16(exported, tmp_path):
    """They are stored so, and all else is in float32: results do not depend on rounding between
    operators, and differ from those of float32 by the rounding of weights."""
    path = write(tmp_path / 'half.onnx', blocks=2, half=True)[0]
    file = onnx.load(path)
    kinds = {tensor.name: tensor.data_type for tensor in file.graph.initializer}
    stored = [name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT16]
    casts = [node for node in file.graph.node if node.input and node.input[0] in stored]
    assert stored and {node.op_type for node in casts} == {'Cast'} and len(casts) == len(stored)
    assert kinds['mean'] == kinds['std'] == onnx.TensorProto.FLOAT
    branches = [node.op_type for node in file.graph.node].count('If')
    assert branches == [node.op_type for node in onnx.load(exported[0]).graph.node].count('If') > 0

    images = {
        'images': np.random.default_rng(0).uniform(0, 255, (2, 3, 75, 90)).astype(np.float32),
        'valid': np.array([[75, 90], [75, 90]]),
    }
    (expected,) = OnnxRuntime(exported[0], CPU).run(images).values()
    for session in (OnnxRuntime(path, CPU), OpenVino(path)):
        (found,) = session.run(images).values()
        assert 0 < np.abs(found - expected).max() < 5e-3 * np.abs(expected).max()
    assert verify([str(path), '--size', '64x96', '--tolerance', '1e-4']) == 0


def test_weights_of_products_are_halved_also_in_branches():
    """Coordinates, small weights and those out of range stay as they are."""
    code = """<ir_version: 10, opset_import: ["" : 18]>
        tiny (float[B,40] x, bool c) => (float[B,40] y) {
            inside = If(c) <
                then_branch = then () => (float[B,40] a) {a = MatMul(x, hidden)},
                else_branch = other () => (float[B,40] b) {b = Identity(x)}
            >
            huge = MatMul(inside, large)
            few = Gemm(huge, little)
            y = Add(few, places)
        }"""
    file = onnx.parser.parse_model(code)
    values = {
        'hidden': np.full((40, 40), 0.1),
        'large': np.full((40, 40), 1e5),
        'little': np.full((40, 1), 0.1),
        'places': np.full((40, 40), 1333.3),
    }
    for name, x in values.items():
        file.graph.initializer.append(onnx.numpy_helper.from_array(x.astype(np.float32), name))
    store_in_float16(file)
    onnx.checker.check_model(file)
    names = {tensor.name for tensor in file.graph.initializer}
    assert names == {'hidden_float16', 'large', 'little', 'places'}
    assert file.graph.node[0].op_type == 'Cast' and file.graph.node[0].output == ['hidden']


def test_failures_are_named_and_leave_no_file(tmp_path, monkeypatch):
    """A graph that cannot be captured, and a difference in one image of a padded batch."""
    path = tmp_path / 'model.onnx'
    reference = BackboneGraph.reference

    def branches(self: Exportable, batch: Batch) -> dict[str, Tensor]:
        return {'map_0': batch.images * 2 if batch.images.sum() > 0 else batch.images}

    def wrong(self: Exportable, image: Tensor, original: None) -> dict[str, Tensor]:
        found = reference(self, image)
        return {k: x * (1 + 0.01 * (image.shape[2:] == (50, 35))) for k, x in found.items()}

    with monkeypatch.context() as patch:
        patch.setattr(BackboneGraph, 'stages', branches)
        with pytest.raises(UserError, match='model.onnx was not written; torch.export: '):
            write(path)
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(BackboneGraph, 'reference', wrong)
    with pytest.raises(UserError, match='was not written; comparison: map_0 differs by'):
        write(path, size=(50, 70))
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {'model.report.json', 'model.report.md'}
    checks = json.loads(path.with_suffix('.report.json').read_text())['checks']
    assert {check['sizes'][-1] for check in checks if not check['passed']} == {'50x35'}


def candidates(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (B, N, 4), scores (B, N) and labels (B, N) from images of coordinates and scores."""
    first, size, scores = images.flatten(2).unbind(1)
    boxes = torch.stack([first, first, first + size, first + size], dim=-1)
    return boxes, scores, (scores * 1000).long() % 3


class Suppression(Exportable):
    """Non-maximum suppression alone."""

    task, output_names = 'detection', ('boxes', 'scores', 'labels')

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        boxes, scores, labels = candidates(batch.images)
        scores = batched_nms(boxes, scores, labels, 0.5)
        return dict(zip(self.output_names, best(scores, boxes, labels, 20)))


def test_suppression_in_onnx_is_that_of_mmcv(tmp_path):
    from mmcv.ops import batched_nms as mmcv_nms

    model = Suppression(Preprocessing())
    graph = translate(capture(model, Settings(size=(10, 30), has_valid=False)), model.output_names)
    onnx.save(graph, tmp_path / 'nms.onnx')
    run = OnnxRuntime(tmp_path / 'nms.onnx', CPU).run
    images = torch.rand(3, 3, 10, 30) * torch.tensor([60, 60, 1.0])[:, None, None]
    images[2, 2] = 0  # an image without candidates
    found = run({'images': images.numpy()})
    assert (found['labels'][2] == -1).all() and not found['scores'][2].any()
    for i, (boxes, scores, labels) in enumerate(zip(*candidates(images[:2]))):
        kept, index = mmcv_nms(boxes, scores, labels, dict(type='nms', iou_threshold=0.5))
        count = min(len(kept), 20)
        assert (found['labels'][i] >= 0).sum() == count
        np.testing.assert_allclose(found['boxes'][i, :count], kept[:count, :4], atol=1e-5)
        np.testing.assert_array_equal(found['labels'][i, :count], labels[index][:count])
