"""Amounts, and messages with an amount of one."""

import pytest
from PIL import Image

from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.tooling.report import amount, duration


@pytest.mark.parametrize(
    'number, text', [(0, '0 classes'), (1, '1 class'), (2, '2 classes'), (1000, '1000 classes')]
)
def test_amounts(number, text):
    assert amount(number, 'class', 'classes') == text
    assert amount(number, 'image') == f'{number} image{"" if number == 1 else "s"}'


@pytest.mark.parametrize(
    'seconds, text',
    [
        (0.2, '0 seconds'),
        (1, '1 second'),
        (99, '99 seconds'),
        (100, '2 minutes'),
        (5990, '100 minutes'),
        (12_600, '3.5 hours'),
        (400_000, '4.6 days'),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_one_kind_of_error(tmp_path, monkeypatch, capsys):
    """An image without a label file, and one whose label file is damaged."""
    monkeypatch.chdir(tmp_path)
    for name in ('a', 'b'):
        image = tmp_path / f'data/images/train/{name}.png'
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (40, 30)).save(image)
    labels = tmp_path / 'data/labels/train'
    labels.mkdir(parents=True)
    (labels / 'a.txt').write_text('0 0.5 0.5 0.2 0.2\n')
    (labels / 'b.txt').write_text('not a label\n')
    (tmp_path / 'data/classes.txt').write_text('tree\n')
    assert main(['check-data', 'data']) == 1
    out = capsys.readouterr().out
    assert out.endswith('\n1 kind of error\n')
    assert 'train: 2 images' in out
