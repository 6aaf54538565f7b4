"""Which files are opened as images."""

import ast
from pathlib import Path

import mmcv
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, UnidentifiedImageError
from support import ROOT

from cpvt_pyramid.app.images.formats import (
    FORMATS,
    IMAGE_ENDINGS,
    open_image,
    without_ghostscript,
)
from cpvt_pyramid.app.images.gate import UNREAD
from cpvt_pyramid.app.images.label_maps import read_label_map
from cpvt_pyramid.app.images.reading import load_image, size_of

PROGRAM = b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n'


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `gs` on PATH; the file that it creates when it is called to draw."""
    called = tmp_path / 'called'
    program = tmp_path / 'bin' / 'gs'
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] || touch {called}\n')
    program.chmod(0o755)
    monkeypatch.setenv('PATH', str(program.parent), prepend=':')
    monkeypatch.setattr(EpsImagePlugin, 'gs_binary', None)
    return called


def test_a_program_is_not_run(ghostscript):
    path = Path('photo.jpg')
    path.write_bytes(PROGRAM)
    for opened in (path, str(path), path.open('rb')):
        with pytest.raises(UnidentifiedImageError), open_image(opened):
            pass
    with pytest.raises(OSError, match='not an image in one of the formats'):
        load_image(path)
    assert size_of(path) is None
    assert not ghostscript.exists()
    with pytest.raises(OSError), Image.open(path) as image:  # the check can fail
        image.load()
    assert ghostscript.exists()


def test_a_turned_tiff():
    """Which Pillow, given a path, maps into memory and scrambles."""
    labels = np.random.default_rng(0).integers(0, 256, (20, 30), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    Image.fromarray(labels).save('a.tif', exif=exif)
    turned = np.rot90(labels, -1)
    with open_image('a.tif') as image:
        np.testing.assert_array_equal(np.asarray(image), turned)
    np.testing.assert_array_equal(read_label_map(Path('a.tif')).values, turned)


def test_a_training_runs_no_program_that_is_called_a_mask(ghostscript):
    """mmcv opens masks by Pillow itself."""
    without_ghostscript()
    with pytest.raises(OSError, match='Unable to locate Ghostscript'):
        mmcv.imfrombytes(PROGRAM, flag='unchanged', backend='pillow')
    assert not ghostscript.exists()


def test_no_other_part_of_the_package_opens_images():
    for path in sorted((ROOT / 'cpvt_pyramid').rglob('*.py')):
        if path.name == 'formats.py' and path.parent.name == 'images':
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == 'open':
                assert getattr(node.value, 'id', '') != 'Image', f'{path}:{node.lineno}'


@pytest.mark.parametrize('name', [name for name in FORMATS if name not in UNREAD])
def test_all_formats_are_read(name):
    pixels = np.full((16, 20, 3), 200, np.uint8)
    for ending in FORMATS[name].endings:
        path = Path(f'image{ending}')
        Image.fromarray(pixels).save(path, name)
        assert ending in IMAGE_ENDINGS
        assert load_image(path).shape == pixels.shape
