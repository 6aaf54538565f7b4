import re

import cv2
import numpy as np
import pytest
from PIL import Image
from support import load_tool

tool = load_tool('benchmarks/seams')


@pytest.fixture
def image(tmp_path) -> str:
    """Smooth noise, 300 x 420 pixels."""
    small = np.random.default_rng(0).integers(0, 256, (40, 55, 3)).astype(np.uint8)
    pixels = cv2.resize(small, (420, 300), interpolation=cv2.INTER_CUBIC)
    Image.fromarray(pixels).save(tmp_path / 'image.png')
    return str(tmp_path / 'image.png')


def test_overlaps_smooth_the_borders(untrained, image, tmp_path, capsys):
    """With an overlap, tiling changes scores at borders hardly more than elsewhere."""
    out = tmp_path / 'seams.png'
    options = ['--tile', '128', '--overlaps', '0', '64', '--device', 'cpu', '--out', str(out)]
    assert tool.main([*untrained['segmentor'], image, *options]) == 0
    *_, none, half, path = capsys.readouterr().out.splitlines()
    assert path == str(out) and Image.open(out).width > 2 * 420
    ratios = []
    for line, overlap in ((none, 0), (half, 64)):
        numbers = [float(text) for text in re.findall(r'[\d.]+', line)]
        assert numbers[0] == overlap
        assert numbers[1] + numbers[4] == pytest.approx(100, abs=0.11)  # parts of the image
        ratios.append(numbers[3] / numbers[6])  # of the changes of scores
    assert ratios[1] < 1.3 < ratios[0]


def test_mistakes(untrained, image, capsys):
    for arguments, complaint in [
        ([*untrained['segmentor'], image], 'image.png fits into one tile of 512'),
        ([*untrained['detector'], image], 'must be the config of a segmentor'),
        ([*untrained['segmentor'], 'no.tif'], 'no.tif: '),
    ]:
        assert tool.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith('seams: ') and complaint in error and error.count('\n') == 1
