"""What a run did is in its folder, where only the same run goes on."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import ROOT, load_tool

from cpvt_pyramid.app.predict.opening import ModelFiles
from cpvt_pyramid.app.predict.options import InferOptions, option
from cpvt_pyramid.app.predict.run_record import LOCK, RUN, record_of
from cpvt_pyramid.app.tooling.files import locked

TREES = ROOT / 'examples/trees.onnx'
command = load_tool('infer')


@pytest.fixture(autouse=True)
def _photograph():
    shutil.copy(ROOT / 'examples/trees/florida.jpg', 'a.jpg')


def infer(*more: str, model: object = TREES) -> int:
    return command.main([str(model), 'a.jpg', '--shorter-side', '64', *more])


def test_the_same_run_goes_on():
    assert infer('--no-pictures') == 0
    record = json.loads(Path('predictions', RUN).read_text())
    assert len(record['exported_sha256']) == 64 and record['inputs'] == ['a.jpg']
    assert infer('--format', 'coco', '--skip-existing', '--batch-size', '2') == 0
    assert not Path('predictions', LOCK).exists()


def test_every_option_that_changes_results_is_in_the_record():
    """Also one that is new and says nothing about itself."""

    @dataclass(frozen=True)
    class New(InferOptions):
        new: tuple = option((1, 2))

    options = New(score_thr=0.25, cfg_options=('a=1',), batch_size=3)
    record = record_of(options, ModelFiles(trained='name'), ['a.jpg'], None)
    assert record == {
        'trained': 'name',
        'backend': None,
        'dtype': 'float32',
        'score_thr': 0.25,
        'shorter_side': None,
        'cfg_options': ['a=1'],
        'tile': 0,
        'overlap': 0,
        'new': [1, 2],
        'tiled_above': None,
        'inputs': ['a.jpg'],
    }
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize(
    'more, said',
    [(('--score-thr', '0.6'), '--score-thr None, now 0.6'), (('--tile', '64'), 'tile')],
)
def test_other_options_are_refused_or_replace_all(more, said, capsys):
    assert infer('--format', 'coco') == 0
    before = {path.name: path.read_bytes() for path in Path('predictions').iterdir()}
    arguments = [str(TREES), 'a.jpg', *more]
    assert command.main([*arguments, '--skip-existing']) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert 'predictions has results of another run' in line and '--overwrite' in line
    assert said in line
    assert {path.name: path.read_bytes() for path in Path('predictions').iterdir()} == before
    Path('predictions/mine.txt').touch()
    assert command.main([*arguments, '--overwrite', '--no-pictures']) == 0
    assert {path.name for path in Path('predictions').iterdir()} == {
        'a.detections.json',
        'inputs.json',
        'mine.txt',
        RUN,
    }


def test_another_model_is_refused(capsys):
    shutil.copy(TREES, 'model.onnx')
    assert infer(model='model.onnx') == 0
    with open('model.onnx', 'ab') as file:  # a field that no reader knows
        file.write(b'\xf8\x7f\x00')
    assert infer(model='model.onnx') == 2
    assert 'another file of the exported model' in capsys.readouterr().err


def test_two_runs_at_once(capsys):
    Path('predictions').mkdir()
    lock = locked(Path('predictions', LOCK))
    assert infer() == 2
    assert 'another cpvt infer writes into predictions now' in capsys.readouterr().err
    lock.release()
    assert infer() == 0


def test_a_damaged_record_is_written_again():
    Path('predictions').mkdir()
    Path('predictions', RUN).write_text('{')
    assert infer() == 0
    assert json.loads(Path('predictions', RUN).read_text())['shorter_side'] == 64


def test_results_beside_a_damaged_record_are_those_of_another_run(capsys):
    assert infer() == 0
    Path('predictions', RUN).write_text('{')
    capsys.readouterr()
    assert infer() == 2
    assert 'run.json, which says of which, is damaged' in capsys.readouterr().err
    assert infer('--overwrite') == 0


def test_a_run_that_writes_nothing_leaves_nothing_to_other_runs(capsys):
    """No address of a cluster; no image that can be read."""
    Path('torn.jpg').write_bytes(Path('a.jpg').read_bytes()[:300])
    for arguments, status in ((['a.jpg', '--ray', 'nowhere'], 2), (['torn.jpg'], 1)):
        assert command.main([str(TREES), *arguments]) == status
        assert not Path('predictions').exists() or not any(Path('predictions').iterdir())
    assert infer('--score-thr', '0.6') == 0
