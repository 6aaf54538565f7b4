import time

import pytest

from benchmarks import parts as tool


def test_a_part_inside_another_interrupts_it(monkeypatch):
    clock = iter([0, 1, 3, 7, 15])
    monkeypatch.setattr(time, 'process_time', lambda: next(clock))
    stopwatch = tool.Stopwatch()  # at 0
    stopwatch.timed('head', stopwatch.timed, 'losses', int)  # from 1 to 15, and from 3 to 7
    assert stopwatch.seconds == {'other': 1, 'head': 2 + 8, 'losses': 4}


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_every_part_is_measured(untrained, name, capsys, monkeypatch):
    found = []
    monkeypatch.setattr(tool, 'table', lambda title, columns: found.extend(columns) or title)
    config, checkpoint = untrained[name]
    options = ['--checkpoint', checkpoint, '--size', '64x96', '--rounds', '1', '--threads', '1']
    assert tool.main([config, *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith('64x96, 1 threads')
    (_, inference), (_, training) = found
    forward = {'data', 'backbone', 'neck', 'head', 'other', 'whole'}
    backward = {f'{part}, backward' for part in ('backbone', 'neck', 'head')}
    assert set(inference) == forward | {'post-processing'}
    assert set(training) == forward | backward | {'losses', 'optimizer'}
    for seconds in (inference, training):
        assert min(seconds.values()) > 0
        assert sum(seconds.values()) == pytest.approx(2 * seconds['whole'])
