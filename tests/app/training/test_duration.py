"""A training says early how long it takes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support import clear_global_instances, load_tool
from tiny_mm import SMALL

from cpvt_pyramid.app.training import duration

LINE = re.compile(
    r'this training ends in about (.*?), .*?: (\d+) iterations of [\d.e-]+ s are left'
)
SHORTER = '(cpvt new-config --base, --epochs)'


@pytest.fixture
def output_of(configs, capsys) -> Callable[..., str]:
    def train(name: str, text: str, *options: str, status: int = 0) -> str:
        Path('mine.py').write_text(f"_base_ = ['{configs[name]}']\n{text}\n{SMALL}")
        assert load_tool('train').main(['mine.py', '--work-dir', 'work', *options]) == status
        clear_global_instances()
        return capsys.readouterr().out

    return train


def test_a_short_training_says_nothing(output_of):
    assert not LINE.search(output_of('segmentor', 'train_cfg = dict(max_iters=4)'))


@pytest.mark.parametrize(
    'name, text, left',
    [
        ('detector', 'train_cfg = dict(max_epochs=2, val_interval=1)', '6'),  # of 8
        ('segmentor', 'train_cfg = dict(max_iters=6)', '4'),
    ],
)
def test_once_after_two_iterations(name, text, left, output_of, monkeypatch):
    monkeypatch.setattr(duration, 'MEASURED', 0)
    text = output_of(name, text)
    ((time, iterations),) = LINE.findall(text)
    assert iterations == left and re.fullmatch(r'\d+ seconds?', time)
    assert SHORTER not in text


def test_what_is_left_of_a_training_that_resumes(output_of, monkeypatch):
    monkeypatch.setattr(duration, 'MEASURED', 0)
    monkeypatch.setattr(duration, 'LONG', 0)
    text = (
        'train_cfg = dict(max_iters=9)\n'
        "custom_hooks = [dict(type='Interruptions', moments=[('iteration', 3, 15)])]"
    )
    ((_, before),) = LINE.findall(output_of('segmentor', text, status=75))
    resumed = output_of('segmentor', text, '--resume')
    ((_, after),) = LINE.findall(resumed)
    assert (before, after) == ('7', '4') and SHORTER in resumed
