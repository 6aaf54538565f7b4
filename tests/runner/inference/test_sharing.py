"""Processes that share the work of infer.py and test.py through files."""

import contextlib
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from support import assert_same, film, in_processes, load_tool, photograph

from cpvt_pyramid.runner.config.load import load_config
from cpvt_pyramid.runner.inference import shared_test, sharing
from cpvt_pyramid.runner.inference.sharing import Task
from cpvt_pyramid.runner.inference.tiling import Journal
from cpvt_pyramid.tooling.command import UserError

infer = load_tool('infer')
test_tool = load_tool('test')


def save_photograph(path: str, height: int, width: int) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Image.fromarray(photograph(height, width)).save(path)


def contents(folder: str) -> dict[str, bytes]:
    """The results in a folder."""
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name[0] != '.'}


def all_done(ended: list[tuple[int, str]], status: int = 0) -> bool:
    return [found for found, _ in ended] == [status] * len(ended)


def die_or_wait(rank: int) -> None:
    """In the second process: be killed. In the first: wait for that."""
    if rank == 1:
        Path('dead').touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not Path('dead').exists():
        time.sleep(0.01)


# Tasks


def test_tasks_are_done_once_and_in_order(tmp_path):
    log = []
    tasks = [
        Task('a', 1, lambda: log.append('a')),
        Task('c', 1, lambda *outcomes: log.append(outcomes), ['a', 'b']),
        Task('b', 1, lambda: log.append('b') or ['outcome']),
    ]
    with mock.patch.object(sharing, 'WAIT', (0, 0)):
        records = sharing.share(tmp_path, tasks)
    assert log == ['a', 'b', (None, ['outcome'])] and records['b'].outcome == ['outcome']
    assert sharing.share(tmp_path, tasks) == records and len(log) == 3
    tasks[0] = tasks[0]._replace(about=2)
    tasks[2] = tasks[2]._replace(kept=lambda outcome: outcome != ['outcome'])
    tasks[2] = tasks[2]._replace(run=lambda: log.append('again'))
    sharing.share(tmp_path, tasks)
    assert log[3:] == ['a', 'again']
    assert {path.suffix for path in tmp_path.iterdir()} == {'.json'}
    sharing.file_of(tmp_path, tasks[0]).write_text('["torn')
    sharing.share(tmp_path, tasks)
    assert log[5:] == ['a']


def test_a_task_of_a_killed_process_is_taken_over(tmp_path):
    """The first process dies at work; the second waits for it, and then does it."""

    def work(rank: int) -> int:
        def run() -> str:
            (tmp_path / f'started{rank}').touch()
            if rank == 0:
                while not (tmp_path / 'refused').exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return 'done'

        while rank == 1 and not (tmp_path / 'started0').exists():
            time.sleep(0.01)
        task = Task('a', 1, run)
        if rank == 1:
            assert sharing.finish(tmp_path, task) is None
            (tmp_path / 'refused').touch()
        return sharing.share(tmp_path, [task])['a'].outcome != 'done'

    assert [status for status, _ in in_processes(2, work)] == [-signal.SIGKILL, 0]


def test_file_locks_are_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, 'locked', lambda path: None)
    with pytest.raises(UserError, match='sharing work needs file locks'):
        sharing.share(tmp_path, [Task('a', 1, lambda: None)])


def test_a_launcher_must_have_started_the_process(untrained, capsys):
    assert infer.main([*untrained['detector'], __file__, '--launcher', 'pytorch']) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == 'infer: --launcher pytorch is for processes started by pytorch'


# Images


def test_two_processes_write_what_one_writes(untrained, configs):
    """Images of several sizes, one that cannot be read, and a video."""
    load_config(configs['detector'])  # imports mm once, and not in each process
    for i in range(5):
        save_photograph(f'in/{i}.png', 60 + 10 * i, 80)
    Path('in/void.png').touch()
    film('in/v.mp4', [np.zeros((48, 64, 3), np.uint8)])
    command = [*untrained['detector'], 'in', '--score-thr', '0.01', '--out-dir']
    assert infer.main([*command, 'one']) == 1

    def work(rank: int) -> int:
        with Path(f'out{rank}').open('w') as sys.stdout:
            return infer.main([*command, 'two', '--launcher', 'pytorch'])

    ended = in_processes(2, work)
    assert all_done(ended, 1)
    assert ''.join(said for _, said in ended).count('infer: skipped in/void.png: the file is') == 1
    said = Path('out0').read_text() + Path('out1').read_text()
    assert said.count('6 of 7 done: results in two\n') == 1
    assert contents('two') == contents('one') and len(contents('two')) == 13

    times = {path: path.stat().st_mtime_ns for path in Path('two').iterdir() if path.is_file()}
    Path('two/3.overlay.png').unlink()
    Path('two/3.detections.json').unlink()
    assert all_done(in_processes(2, work), 1)
    again = {path for path, time_ in times.items() if path.stat().st_mtime_ns != time_}
    assert {path.name.split('.')[0] for path in again} <= {'3', 'inputs'}
    assert contents('two') == contents('one')


@pytest.mark.parametrize('name, overlap', [('segmentor', 32), ('segmentor', 96), ('detector', 32)])
def test_rows_of_tiles(untrained, configs, name, overlap):
    """With the large overlap, three rows of tiles contribute to a line. One of the processes is
    killed in its second row; the run goes on, and its results are those of one process."""
    load_config(configs[name])
    save_photograph('in/a.png', 400, 150)
    command = [*untrained[name], 'in', '--tile', '128', '--overlap', str(overlap), '--out-dir']
    assert infer.main([*command, 'one']) == 0
    done = Journal.done

    def dies(rank: int) -> Callable:
        def patched(self: object, rows: int) -> None:
            done(self, rows)
            die_or_wait(rank)

        return patched

    def work(rank: int) -> int:
        with mock.patch.object(Journal, 'done', dies(rank)):
            return infer.main([*command, 'two', '--launcher', 'pytorch'])

    statuses = [status for status, _ in in_processes(2, work)]
    assert statuses == [0, -signal.SIGKILL]
    assert contents('two') == contents('one')
    assert sorted(os.listdir('two')) == sorted([*os.listdir('one'), '.shared'])


# Evaluation


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_an_evaluation(untrained, configs, monkeypatch, name):
    """The second process is killed after its first part. The metrics and the predictions are those
    of one process, in its order; the same command does not repeat them."""
    load_config(configs[name])
    monkeypatch.setattr(shared_test, 'FEWEST', 1)
    command = [*untrained[name], '--work-dir', 'work', '--out', 'two.pkl']
    with Path('one.txt').open('w') as one, contextlib.redirect_stdout(one):
        assert test_tool.main([*untrained[name], '--out', 'one.pkl']) == 0
    part = shared_test.SharedTestLoop.results_of

    def work(rank: int, dies: bool = True) -> int:
        def results_of(self: object, *arguments: object) -> list:
            results = part(self, *arguments)
            if dies:
                die_or_wait(rank)
            return results

        with Path(f'out{rank}.txt').open('w') as sys.stdout:
            with mock.patch.object(shared_test.SharedTestLoop, 'results_of', results_of):
                return test_tool.main([*command, '--launcher', 'pytorch'])

    assert [status for status, _ in in_processes(2, work)] == [0, -signal.SIGKILL]
    metrics = [
        line
        for line in Path('one.txt').read_text().splitlines()
        if re.match(r'[\w/]+ +-?[\d.e-]+$', line)
    ]
    said = Path('out0.txt').read_text().splitlines()
    assert len(metrics) >= 3 and said[-len(metrics) :] == metrics
    one, two = (pickle.loads(Path(file).read_bytes()) for file in ('one.pkl', 'two.pkl'))
    assert len(one) == 4
    assert_same(one, two)
    assert not list(Path('work/.shared').glob('*.pkl'))
    times = Path('two.pkl').stat().st_mtime_ns
    assert all_done(in_processes(2, partial(work, dies=False)))
    assert Path('two.pkl').stat().st_mtime_ns == times
