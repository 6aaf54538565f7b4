"""Inputs of a command line, and names for their results."""

import io
import json
import os
from pathlib import Path

import pytest

from cpvt_pyramid.app.images.inputs import RESULTS, find_inputs, name_results
from cpvt_pyramid.app.tooling.command import UserError


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def found(*inputs: str, lines: str = '', out_dir: str = 'out') -> dict[str, str]:
    pairs = find_inputs(inputs, io.StringIO(lines), out_dir).items()
    return {path.as_posix(): name for path, name in pairs}


def named(*inputs: str, out_dir: str = 'out') -> dict[str, str]:
    """The names of a run that then writes results."""
    pairs, folder = name_results(find_inputs(inputs, out_dir=out_dir), out_dir)
    for _, name in pairs:
        (folder / f'{name}{RESULTS[0]}').touch()
    return {path.as_posix(): name for path, name in pairs}


def test_paths_of_find_print0():
    touch('a.png')
    with pytest.raises(UserError, match='must not have zero bytes; list one path a line'):
        found('-', lines='a.png\0b.png\0')


@pytest.mark.filterwarnings('ignore:d. left out')
def test_inputs():
    touch('d/b.png', 'd/a.JPG', 'd/c.txt', 'd/e/f.gif', 'd/g.mp4', 'h.png', 'i [1].png', 'd/.j.png')
    touch('d/.hidden/k.png')
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
    with pytest.warns(UserWarning, match='earlier run: a.overlay.jpg, c.txt, '):
        assert list(found('d', out_dir='d')) == ['d/a.png']
    assert list(found('d/*.png', out_dir='d')) == ['d/a.png']


def test_links():
    touch('d/a.png')
    os.symlink('a.png', 'd/b.png')
    os.symlink('nothing.png', 'd/c.png')
    os.symlink('.', 'd/loop')
    touch('other/d.png')
    os.symlink('../other', 'd/e')
    assert found('d') == {'d/a.png': 'a', 'd/b.png': 'b', 'd/c.png': 'c', 'd/e/d.png': 'e/d'}


def test_results_never_overwrite_an_input():
    paths = dict.fromkeys(map(Path, ('a.png', 'b/a.png', 'a.overlay.jpg')), 'a')
    touch(*map(str, paths))
    assert [name for _, name in name_results(paths, '.')[0]] == ['a-2', 'a-3', 'a-4']
    assert [name for _, name in name_results(paths, 'out')[0]] == ['a', 'a-2', 'a-3']


def test_results_never_overwrite_each_other():
    """Within a run, and in one after the other, in any order."""
    touch('d/a.png', 'd/a.jpg', 'd/A.bmp', 'e/a.png', 'd/s/a.png', 'd/clip.mp4', 'd/clip.avi')
    first = named('d/a.png') | named('d/a.jpg') | named('e/a.png') | named('d/clip.mp4')
    assert list(first.values()) == ['a', 'a-2', 'a-3', 'clip']
    every = named('e', 'd')
    assert every == first | {'d/A.bmp': 'A-4', 'd/s/a.png': 's/a', 'd/clip.avi': 'clip-2'}
    assert len({name.casefold() for name in every.values()}) == len(every)
    assert named('d', 'e') == every  # the same names when the command is repeated
    os.remove(f'out/a-2{RESULTS[0]}')
    touch('f/a-2.png')
    assert named('f') == {'f/a-2.png': 'a-2'}
    Path('out/inputs.json').write_text('damaged')
    assert named('d/a.jpg') == {'d/a.jpg': 'a'}


def test_results_can_be_on_another_drive(tmp_path, monkeypatch):
    """As on Windows, where there is no relative path to them."""

    def no_relative_path(path: object, start: object) -> str:
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    monkeypatch.chdir(tmp_path)
    touch('a.jpg')
    monkeypatch.setattr(os.path, 'relpath', no_relative_path)
    assert named('a.jpg') == {'a.jpg': 'a'}
    assert str(tmp_path / 'a.jpg') in json.loads(Path('out/inputs.json').read_text()).values()


@pytest.mark.parametrize('ending', RESULTS)
def test_results_of_an_input_that_is_gone_are_kept(ending):
    """Of each kind, GeoJSON included."""
    assert '.geojson' in RESULTS
    touch('d/a.png', 'e/a.png')
    assert named('d/a.png') == {'d/a.png': 'a'}
    for path in Path('out').glob('a.*'):
        path.unlink()
    touch(f'out/a{ending}')
    assert named('e/a.png') == {'e/a.png': 'a-2'}
