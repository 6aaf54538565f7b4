"""Inputs of a command line."""

import errno
import io
import os
from pathlib import Path

import pytest
from PIL import Image

from cpvt_pyramid.app.export.photographs import given_photographs
from cpvt_pyramid.app.images.inputs import find_inputs
from cpvt_pyramid.app.images.reading import load_image
from cpvt_pyramid.app.predict.result_files import is_result
from cpvt_pyramid.app.tooling.command import UserError


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def found(*inputs: str, lines: str = '') -> dict[str, str]:
    pairs = find_inputs(inputs, io.StringIO(lines), is_result).items()
    return {path.as_posix(): name for path, name in pairs}


def test_paths_of_find_print0():
    touch('a.png')
    with pytest.raises(UserError, match='must not have zero bytes; list one path a line'):
        found('-', lines='a.png\0b.png\0')


@pytest.mark.filterwarnings('ignore:d. left out')
def test_inputs():
    touch('d/b.png', 'd/a.JPG', 'd/c.txt', 'd/e/f.gif', 'd/g.mp4', 'h.png', 'i [1].png', 'd/.j.png')
    touch('d/.hidden/k.png', 'd/lost+found/l.jpg')
    assert found('d') == {'d/a.JPG': 'a', 'd/b.png': 'b', 'd/g.mp4': 'g', 'd/e/f.gif': 'e/f'}
    assert found('d/**/*.[pg]*') == {'d/b.png': 'b', 'd/e/f.gif': 'e/f'}
    assert list(found('i [1].png', 'h.png', './h.png')) == ['i [1].png', 'h.png']
    assert found('h.png', '-', lines='d/b.png\n\nd/no such.png\r\n') == {
        'h.png': 'h',
        'd/b.png': 'b',
        'd/no such.png': 'no such',
    }
    for inputs, lines, complaint in (
        ('-', '', 'no paths on stdin'),
        ('d/*.webp', '', 'no files match'),
        ('j', '', 'at j'),
        ('http://host/a.png', '', 'got the address http://host/a.png; download it'),
        ('-', 's3://host/a.png', 'got the address s3://host/a.png; download it'),
    ):
        with pytest.raises(UserError, match=complaint):
            found(inputs, lines=lines)


def test_what_is_left_out_of_a_folder_is_said():
    touch('d/a.png', 'd/c.txt', 'd/e/f.psd', 'd/a.overlay.jpg', *(f'd/z{i}.txt' for i in range(9)))
    with pytest.warns(UserWarning, match=r'd: left out .* c.txt, z0.txt, .*, z8.txt and 1 more$'):
        assert list(found('d')) == ['d/a.overlay.jpg', 'd/a.png']


@pytest.fixture
def unreadable(monkeypatch) -> None:
    """The folder d/e cannot be read, also by the user that may read all."""
    scandir = os.scandir

    def refuse(path: str) -> object:
        if os.fspath(path) == 'd/e':
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, 'scandir', refuse)


@pytest.mark.parametrize('text', ['d', 'd/**/*.png'])
def test_a_folder_that_cannot_be_read(text, unreadable):
    """It is an input whose reading reports the error, as that of a file does."""
    touch('d/a.png', 'd/e/b.png', 'd/f/c.png')
    assert found(text) == {'d/a.png': 'a', 'd/f/c.png': 'f/c', 'd/e': 'e'}
    with pytest.raises(OSError, match='permission denied'):
        load_image('d/e')
    with pytest.raises(PermissionError):
        found('d/e')


@pytest.mark.filterwarnings('ignore:d. left out')
@pytest.mark.parametrize('results', ['d', 'd/e'])
def test_results_of_any_run_are_no_inputs(results):
    """Wherever a run has written them, unless they are named themselves."""
    result = f'{results}/f/a.overlay.jpg'
    touch('d/a.png', result, f'{results}/inputs.json', f'{results}/f/a.labels.png')
    with pytest.warns(UserWarning, match='written by an earlier run: .*a.overlay.jpg'):
        assert list(found('d')) == ['d/a.png']
    assert list(found('d/**/*.*g')) == ['d/a.png']
    os.symlink('d', 'link')
    assert list(found('link')) == ['link/a.png']
    assert list(found(result)) == [result]
    for name in ('d/a.png', result):
        Image.new('RGB', (9, 9)).save(name)
    assert len(given_photographs(['d'])) == 1  # as of cpvt verify and cpvt quantize


def test_links():
    touch('d/a.png')
    os.symlink('a.png', 'd/b.png')
    os.symlink('nothing.png', 'd/c.png')
    os.symlink('.', 'd/loop')
    touch('other/d.png')
    os.symlink('../other', 'd/e')
    assert found('d') == {'d/a.png': 'a', 'd/b.png': 'b', 'd/c.png': 'c', 'd/e/d.png': 'e/d'}
