"""Names for the results of inputs."""

import json
import os
from pathlib import Path

import pytest

from cpvt_pyramid.app.images.inputs import find_inputs
from cpvt_pyramid.app.predict.result_files import RESULTS, is_result, name_results


def touch(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def named(*inputs: str, out_dir: str = 'out') -> dict[str, str]:
    """The names of a run that then writes results."""
    pairs = name_results(find_inputs(inputs, leave_out=is_result), out_dir)
    for _, name in pairs:
        Path(out_dir, f'{name}{RESULTS[0]}').touch()
    return {path.as_posix(): name for path, name in pairs}


def test_results_never_overwrite_an_input():
    paths = dict.fromkeys(map(Path, ('a.png', 'b/a.png', 'a.overlay.jpg')), 'a')
    touch(*map(str, paths))
    assert [name for _, name in name_results(paths, '.')] == ['a-2', 'a-3', 'a-4']
    assert [name for _, name in name_results(paths, 'out')] == ['a', 'a-2', 'a-3']


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
