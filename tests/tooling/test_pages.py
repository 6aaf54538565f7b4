"""The commands of docs/results.md run, and those of docs/own_data.md are understood."""

import re
import shlex
from pathlib import Path

import pytest
from support import ROOT, load_tool

from cpvt_pyramid.runtime import __main__ as runtime
from cpvt_pyramid.tooling.command import parser_of


def commands(page: str) -> list[str]:
    text = (ROOT / 'docs' / page).read_text()
    return re.findall(r'^    (python .*)$', text, re.M)


def test_results(untrained, sample_dataset):
    config, checkpoint = untrained['detector']
    image = sorted((sample_dataset / 'coco/val2017').iterdir())[0]
    given = {
        'CONFIG': config, 'CHECKPOINT': checkpoint, 'IMAGES': str(image),
        'MODEL.onnx': str(ROOT / 'examples/digits-detection.onnx'),
    }  # fmt: skip
    for command in commands('results.md'):
        tool, *words = [given.get(word, word) for word in shlex.split(command)[1:]]
        if tool == '-m':
            assert words.pop(0) == 'cpvt_pyramid.runtime'
            assert runtime.main(words) == 0, command
        else:
            assert load_tool(Path(tool).stem).main(words) == 0, command
    written = {path.suffix for path in Path('predictions').iterdir()}
    assert written >= {'.csv', '.json', '.geojson', '.png'}
    assert {path.name for path in Path('predictions/yolo').iterdir()} == {'labels', 'classes.txt'}
    assert Path('predictions/labelme').is_dir() and Path('predictions/coco.json').is_file()
    assert Path('analysis.html').is_file() and Path('analysis.json').is_file()


@pytest.mark.parametrize('command', commands('own_data.md'))
def test_own_data(command):
    tool, *words = shlex.split(command)[1:]
    module = load_tool(Path(tool).stem)
    parser_of(getattr(module, Path(tool).stem)).parse_args(words)


@pytest.mark.parametrize('page', ['results.md', 'own_data.md'])
def test_links(page):
    text = (ROOT / 'docs' / page).read_text()
    for path in re.findall(r'\]\((?!http)([^)#]+)\)', text):
        assert (ROOT / 'docs' / path).is_file(), path
