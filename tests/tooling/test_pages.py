"""The commands of docs/results.md run."""

import re
import shlex
from pathlib import Path

from support import ROOT, load_tool

from cpvt_pyramid.runtime import __main__ as runtime


def test_results(untrained, sample_dataset):
    config, checkpoint = untrained['detector']
    image = sorted((sample_dataset / 'coco/val2017').iterdir())[0]
    given = {
        'CONFIG': config, 'CHECKPOINT': checkpoint, 'IMAGES': str(image),
        'MODEL.onnx': str(ROOT / 'examples/digits-detection.onnx'),
    }  # fmt: skip
    page = (ROOT / 'docs/results.md').read_text()
    for command in re.findall(r'^    (python .*)$', page, re.M):
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
