"""The models in examples/: small, with a licence, and right on the images next to them."""

from support import ROOT

from cpvt_pyramid.runtime import Predictor

EXAMPLES = ROOT / 'examples'
# Digits that anyone sees in the images, by their (x, y) in pixels, with score at least 0.5.
DIGITS = {
    '1.jpg': {'seven': (70, 100), 'one': (175, 115)},
    '2.jpg': {'nine': (80, 30), 'zero': (73, 100)},
}


def opened(name: str, **options: float) -> Predictor:
    path = EXAMPLES / name
    predictor = Predictor(path, **options)
    assert path.stat().st_size <= 5e6 and path.with_suffix('.report.md').is_file()
    assert predictor.model.about['license'] == 'Apache-2.0'
    return predictor


def test_digits_are_found():
    predictor = opened('trees.onnx', score_thr=0.3, batch_size=2)
    for found, digits in zip(predictor([EXAMPLES / name for name in DIGITS]), DIGITS.values()):
        names = [found.classes[label] for label in found.labels]
        for digit, (x, y) in digits.items():
            x1, y1, x2, y2 = found.boxes[names.index(digit)]
            assert x1 < x < x2 and y1 < y < y2
    found = opened('digits.onnx')(EXAMPLES / 'digits/2.jpg')
    # Points on the strokes of a nine and a zero, and on the fur.
    names = [found.classes[found.labels[y, x]] for x, y in ((70, 63), (52, 110), (30, 30))]
    assert names == ['nine', 'zero', 'background']
