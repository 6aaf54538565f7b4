"""Each kind of exported file in both runtimes: right, and told from one with a wrong layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import onnx
import pytest

from cpvt_pyramid.app.export.about import Settings, metadata
from cpvt_pyramid.app.export.comparison import Check
from cpvt_pyramid.app.export.files import CPU, add_metadata, finish, with_all_stages
from cpvt_pyramid.app.export.models import exportable
from cpvt_pyramid.app.export.self_test import verify_session
from cpvt_pyramid.app.export.verification import make_samples
from cpvt_pyramid.app.predict.sessions import OnnxRuntime, OpenVino
from tests.models.patches import Patches
from tests.models.ports import randomize
from tests.models.small import (
    dino,
    mask2former_detector,
    mask2former_segmentor,
    mask_rcnn,
    semantic_fpn,
    upernet,
)

SIZE = 64, 96  # of graphs for one size, which are captured faster


def write_file(
    path: Path, make: Callable, size: Optional[tuple[int, int]], **options: Any
) -> onnx.ModelProto:
    """Export a model without a comparison, but with test data."""
    model = exportable(make(), **options).eval()
    model.model.backbone = randomize(Patches(model.model.backbone), seed=2)
    settings = Settings(size=size)
    file = with_all_stages(model, settings)
    finish(file, model.output_names)
    assert {node.domain for node in file.graph.node} == {''}
    about = metadata(model, model.model, {'classes': ['a', 'b']}, settings)
    add_metadata(file, about, make_samples(model, settings))
    onnx.save(file, path)
    return file


def failed(path: Path) -> dict[str, list[Check]]:
    """The comparisons that a file fails, by runtime."""
    sessions = {'onnxruntime': OnnxRuntime(path, CPU), 'openvino': OpenVino(path)}
    checks = {name: verify_session(path, session) for name, session in sessions.items()}
    assert all(len(found) >= 2 for found in checks.values())  # alone and in a batch
    return {name: [check for check in found if not check.passed] for name, found in checks.items()}


def negate_a_layer(file: onnx.ModelProto, last: str) -> None:
    """Change the sign of the weights of a layer of the head."""
    for weight in file.graph.initializer:
        if weight.name.endswith(last):
            values = -onnx.numpy_helper.to_array(weight)
            weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
            return
    raise ValueError(f'no weights {last} in {[weight.name for weight in file.graph.initializer]}')


# `make test-foreign` runs them, of all maps; `test_tool.py` exports RetinaNet and Semantic FPN for
# all sizes, of one or two.
LONG = pytest.mark.foreign


@pytest.mark.parametrize(
    'make, size, options, layer',
    [
        (lambda: mask_rcnn(1), SIZE, {}, 'rpn_head.rpn_cls.weight'),
        pytest.param(lambda: mask_rcnn(2), None, {}, 'rpn_head.rpn_cls.weight', marks=LONG),
        pytest.param(semantic_fpn, SIZE, {'probabilities': True}, 'conv_seg.weight', marks=LONG),
        pytest.param(semantic_fpn, None, {}, 'conv_seg.weight', marks=LONG),
        pytest.param(lambda: dino(2), SIZE, {}, 'memory_trans_norm.weight', marks=LONG),
        pytest.param(lambda: mask2former_detector(1), SIZE, {}, 'mask_feature.weight', marks=LONG),
        pytest.param(lambda: dino(2), None, {}, 'memory_trans_norm.weight', marks=LONG),
        pytest.param(upernet, None, {}, 'conv_seg.weight', marks=LONG),
        pytest.param(lambda: mask2former_segmentor(1), None, {}, 'mask_feature.weight', marks=LONG),
    ],
    ids=[
        'Mask R-CNN for one size',
        'Mask R-CNN',
        'Semantic FPN with probabilities',
        'Semantic FPN',
        'DINO for one size',
        'Mask2Former for one size',
        'DINO',
        'UPerNet',
        'Mask2Former of segments',
    ],
)
def test_a_file_is_right_in_both_runtimes(make, size, options, layer, tmp_path, monkeypatch):
    path = tmp_path / 'model.onnx'
    file = write_file(path, make, size, **options)
    assert failed(path) == {'onnxruntime': [], 'openvino': []}
    negate_a_layer(file, layer)
    onnx.save(file, path)
    assert all(failed(path).values())
