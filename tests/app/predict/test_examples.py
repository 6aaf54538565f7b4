"""The model in examples/: small, with a licence, and right on the images next to it."""

from support import ROOT

from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.predict import Predictor, sessions
from cpvt_pyramid.app.predict.sessions import has_bfloat16

EXAMPLES = ROOT / 'examples'
# Trees that anyone sees in the photographs, and a place without one, by their (x, y) in pixels.
TREES = {
    'florida.jpg': [(72, 95), (336, 195)],
    'california.jpg': [(296, 251), (344, 250), (142, 242)],
    'yellowstone.jpg': [(547, 208), (60, 170), (492, 445)],
}
ROAD = (250, 270)


def opened(name: str, **options: float) -> Predictor:
    path = EXAMPLES / name
    predictor = Predictor(path, **options)
    assert path.stat().st_size <= 5e6 and path.with_suffix('.report.md').is_file()
    assert predictor.model.about['license'] == 'Apache-2.0'
    return predictor


def test_trees_are_found():
    predictor = opened('trees.onnx', score_thr=0.3, batch_size=2)
    results = predictor([EXAMPLES / 'trees' / name for name in TREES])
    for found, trees in zip(results, TREES.values()):
        for x, y in trees:
            assert any(x1 < x < x2 and y1 < y < y2 for x1, y1, x2, y2 in found.boxes)
    x, y = ROAD  # of the last photograph; in the trial of another recipe it was taken for trees
    assert not any(x1 < x < x2 and y1 < y < y2 for x1, y1, x2, y2 in found.boxes)


def test_the_example_verifies_itself():
    """It has test data, so that any machine can compare itself with PyTorch. Its results do not
    depend on the batch: of eight images, which show more than three."""
    assert main(['verify', str(EXAMPLES / 'trees.onnx'), '--size', '128x160']) == 0


def test_the_example_in_bfloat16(monkeypatch, capsys):
    monkeypatch.setattr(sessions, 'has_bfloat16', lambda device: True)  # else OpenVINO ignores it
    small = ['--size', '128x160', '--batch-size', '3']
    options = ['--backend', 'openvino', '--dtype', 'bfloat16', *small]
    assert main(['verify', str(EXAMPLES / 'trees.onnx'), *options]) == 0
    assert 'openvino on CPU in bfloat16: passed' in capsys.readouterr().out
    predictor = opened('trees.onnx', backend='openvino', dtype='bfloat16')
    hint = predictor.model.session.model.get_property('INFERENCE_PRECISION_HINT')
    assert hint.to_string() == 'bf16' or not has_bfloat16()
