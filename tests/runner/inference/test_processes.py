"""Processes that share the work of infer.py and test.py: forks of one on a CPU, and those of a
launcher, through files."""

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

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from support import assert_same, film, in_processes, load_tool, photograph

from cpvt_pyramid.runner.config.load import load_config
from cpvt_pyramid.runner.inference import shared_test, sharing, workers
from cpvt_pyramid.runner.inference.sharing import Task
from cpvt_pyramid.runner.inference.tiling import Journal
from cpvt_pyramid.runner.inference.workers import Cores, Workers
from cpvt_pyramid.tooling.command import UserError

infer, test_tool = load_tool('infer'), load_tool('test')
TWO = Cores(2, processes=2)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, 'WAIT', 0.02)


def contents(folder: str) -> dict[str, bytes]:
    """The results in a folder."""
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name[0] != '.'}


def save(path: str, height: int, width: int) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Image.fromarray(photograph(height, width, seed=height)).save(path)


def statuses(count: int, work: Callable[[int], int]) -> list[int]:
    return [status for status, _ in in_processes(count, work)]


def die_or_wait(rank: int) -> None:
    """In the second process: be killed. In the first: wait for that."""
    if rank == 1:
        Path('dead').touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not Path('dead').exists():
        time.sleep(0.01)


# Forks


def test_the_cores_are_divided(monkeypatch):
    """So that the images are done soonest, within the memory, and not with a GPU."""
    monkeypatch.setattr(workers.memory, 'available', lambda: 20 * 2**30)
    for cores, items, need, expected in (
        (Cores(2), 1, 0.1, (1, 2)), (Cores(2), 3, 0.1, (1, 2)), (Cores(2), 4, 0.1, (2, 1)),
        (Cores(16), 200, 0.1, (16, 1)), (Cores(16), 3, 0.1, (3, 5)), (Cores(16), 200, 2, (8, 2)),
        (Cores(16), 2, 30, (1, 16)), (Cores(16, memory=2**30), 200, 2, (1, 16)),
        (Cores(16, 4, memory=2**30), 200, 2, (4, 4)), (Cores(2, 4), 200, 2, (4, 1)),
    ):  # fmt: skip
        assert cores.divided(items, int(need * 2**30)) == expected
    monkeypatch.setattr(workers, 'usable_cores', lambda: 3)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 64)
    assert Cores.for_model(torch.device('cpu'), None) == Cores(3)
    gpu = torch.device('cuda')
    assert Cores.for_model(gpu, None).divided(100) == (1, 3)
    with pytest.raises(UserError, match='--processes needs a CPU and Linux'):
        Cores.for_model(gpu, 2)


def shared(function: Callable, items: list, cores: Cores = TWO) -> list:
    with Workers(function, len(items), cores) as forks:
        results = list(forks.map(items))
        children = forks.processes
    assert not any(process.is_alive() for process in children)
    return results


def test_a_killed_process_costs_no_result_and_errors_are_raised_here():
    """One of two is killed, then both: this process does the rest."""
    here = os.getpid()
    for deadly in ({3}, {1, 2, 5}):

        def square(item: int, deadly: set = deadly) -> int:
            if item in deadly and os.getpid() != here:
                os.kill(os.getpid(), signal.SIGKILL)
            return item * item

        assert shared(square, list(range(8))) == [i * i for i in range(8)]
    with pytest.raises(ZeroDivisionError) as error:
        shared(lambda item: 1 // item, [1, 0, 1])
    assert '1 // item' in str(error.traceback[-1].statement)


def test_openmp_works_in_a_fork():
    """The thread that is forked has started a team of threads, which the fork does not have."""
    torch.set_num_threads(2)
    x = torch.ones(2**20)
    assert x.add(1).sum() == 2**21
    torch.set_num_threads(1)
    sums = shared(lambda item: x.add(item).sum().item(), [1, 2], Cores(4, processes=2))
    assert sums == [2**21, 3 * 2**20]


def test_opencv_works_in_a_fork():
    """The process that is forked has started threads of OpenCV, which the fork does not have."""
    image = np.random.default_rng(0).integers(256, size=(2000, 2000, 3), dtype=np.uint8)
    before = cv2.getNumThreads()
    cv2.setNumThreads(4)
    try:
        expected = int(cv2.GaussianBlur(image, (9, 9), 0).sum())
        sums = shared(lambda _: int(cv2.GaussianBlur(image, (9, 9), 0).sum()), [1, 2])
        assert sums == [expected, expected]
        assert cv2.getNumThreads() == 4
    finally:
        cv2.setNumThreads(before)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_first(number, tmp_path):
    """Of a signal to the first one. The items at work are finished, others are not started."""

    def work(item: int) -> None:
        if item < 0:  # in the first process
            while len(list(tmp_path.glob('*-*'))) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), number)
            return
        (tmp_path / f'{item}-{os.getpid()}').touch()
        time.sleep(0.5)
        (tmp_path / f'done{item}').touch()

    def first(_: int) -> int:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with Workers(work, 9, TWO) as forks:
            threads = workers.ahead(lambda i: (forks if i >= 0 else work)(i), [-1, *range(9)], 3)
            with contextlib.suppress(KeyboardInterrupt):
                [result() for result in threads]
        return 6

    (found,) = statuses(1, first)
    assert found == {signal.SIGINT: 6, signal.SIGKILL: -9}.get(number, found)
    started = dict(path.name.split('-') for path in tmp_path.glob('*-*'))
    assert len(started) == 2
    ended = time.monotonic() + 5
    while any(Path('/proc', pid).exists() for pid in started.values()):
        assert time.monotonic() < ended
        time.sleep(0.02)
    assert {path.name for path in tmp_path.glob('done*')} == {f'done{item}' for item in started}


# Tasks


def test_tasks_are_done_once_and_in_order(tmp_path, monkeypatch):
    log = []
    tasks = [
        Task('a', 1, lambda: log.append('a')),
        Task('c', 1, lambda *outcomes: log.append(outcomes), ['a', 'b']),
        Task('b', 1, lambda: log.append('b') or ['outcome']),
    ]
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
    task = Task('d', 1, lambda: log.append(sharing.try_to_finish(tmp_path, task)))
    sharing.share(tmp_path, [task])  # while it is at work, others leave it alone
    assert log[6:] == [None]
    monkeypatch.setattr(sharing, 'locked', lambda path: None)
    with pytest.raises(UserError, match='sharing work needs file locks'):
        sharing.share(tmp_path, [task._replace(about=2)])


# Images


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_processes_write_what_one_writes(untrained, configs, capsys, name):
    """Images of several sizes, one that cannot be read, and a video; by forks and by a launcher."""
    load_config(configs[name])  # imports mm once, and not in each process
    for i in range(5):
        save(f'in/{i}.png', 60 + 10 * i, 80)
    Path('in/void.png').touch()
    film('in/v.mp4', [photograph(48, 64, seed=i) for i in range(3)])
    command = [*untrained[name], 'in', *['--score-thr', '0.01'] * (name == 'detector')]
    command += ['--out-dir']
    said = []
    for count in '1', '3':
        assert infer.main([*command, count, '--processes', count]) == 1
        out, err = capsys.readouterr()
        assert err.count('cpvt infer: skipped in/void.png: the file is empty\n') == 1
        assert f'images per second with {count} processes\n' in out
        said.append(out[out.index('6 of 7 done') :].replace(f'in {count}\n', ''))
    assert said[0] == said[1]
    assert contents('1') == contents('3')

    def work(rank: int) -> int:
        with Path(f'out{rank}').open('w') as sys.stdout:
            return infer.main([*command, 'two', '--launcher', 'pytorch'])

    ended = in_processes(2, work)
    assert [status for status, _ in ended] == [1, 1]
    assert ''.join(said for _, said in ended).count('cpvt infer: skipped in/void.png: ') == 1
    text = Path('out0').read_text() + Path('out1').read_text()
    assert text.count('6 of 7 done: results in two\n') == 1
    assert contents('two') == contents('1')
    if name == 'segmentor':
        return
    times = {path: path.stat().st_mtime_ns for path in Path('two').iterdir() if path.is_file()}
    Path('two/3.overlay.jpg').unlink()
    Path('two/3.detections.json').unlink()
    assert statuses(2, work) == [1, 1]
    again = {path for path, time_ in times.items() if path.stat().st_mtime_ns != time_}
    assert {path.name.split('.')[0] for path in again} <= {'3', 'inputs'}
    assert contents('two') == contents('1')


@pytest.mark.parametrize('name, overlap', [('segmentor', 96), ('detector', 32)])
def test_rows_of_tiles(untrained, configs, name, overlap):
    """With the large overlap, three rows of tiles contribute to a line. One of the processes is
    killed in its second row; the run goes on, and its results are those of one process."""
    load_config(configs[name])
    save('in/a.png', 400, 150)
    command = [*untrained[name], 'in', '--tile', '128', '--overlap', str(overlap), '--out-dir']
    assert infer.main([*command, 'one']) == 0
    done = Journal.done

    def work(rank: int) -> int:
        def dies(self: object, rows: int) -> None:
            done(self, rows)
            die_or_wait(rank)

        with mock.patch.object(Journal, 'done', dies):
            return infer.main([*command, 'two', '--launcher', 'pytorch'])

    assert statuses(2, work) == [0, -signal.SIGKILL]
    assert contents('two') == contents('one')
    assert sorted(os.listdir('two')) == sorted([*os.listdir('one'), '.shared'])


# Evaluation


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_an_evaluation(untrained, configs, monkeypatch, name):
    """Two forks, and two processes of a launcher, of which the second is killed after its first
    part. The metrics and the predictions are those of one process, in its order; the same command
    does not repeat them."""
    load_config(configs[name])
    monkeypatch.setattr(shared_test, 'FEWEST', 1)

    def said(name: str) -> list[str]:
        return re.findall(r'^[\w/]+ +-?[\d.e-]+$', Path(name).read_text(), re.M)

    for count in '1', '2':
        options = ['--processes', count, '--out', f'{count}.pkl', '--show-dir', f'shown{count}']
        with Path(f'{count}.txt').open('w') as out, contextlib.redirect_stdout(out):
            assert test_tool.main([*untrained[name], *options]) == 0
    metrics = said('1.txt')
    assert said('2.txt') == metrics and len(metrics) >= 3
    assert contents('shown1') == contents('shown2')
    part = shared_test.SharedTestLoop.results_of

    def work(rank: int, dies: bool = True) -> int:
        def results_of(self: object, *arguments: object) -> list:
            results = part(self, *arguments)
            if dies:
                die_or_wait(rank)
            return results

        with Path(f'out{rank}.txt').open('w') as sys.stdout:
            with mock.patch.object(shared_test.SharedTestLoop, 'results_of', results_of):
                options = ['--work-dir', 'work', '--out', 'shared.pkl', '--launcher', 'pytorch']
                return test_tool.main([*untrained[name], *options])

    assert statuses(2, work) == [0, -signal.SIGKILL]
    assert said('out0.txt')[-len(metrics) :] == metrics
    one, *others = (pickle.loads(Path(f'{x}.pkl').read_bytes()) for x in ('1', '2', 'shared'))
    assert len(one) == 4
    for other in others:
        assert_same(one, other)
    assert not list(Path('work/.shared').glob('*.pkl'))
    times = Path('shared.pkl').stat().st_mtime_ns
    assert statuses(2, partial(work, dies=False)) == [0, 0]
    assert Path('shared.pkl').stat().st_mtime_ns == times
