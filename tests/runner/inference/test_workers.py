"""Forked processes that share the images of infer.py and test.py on a CPU."""

import contextlib
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from support import assert_same, film, in_processes, load_tool, photograph

from cpvt_pyramid.runner.inference import workers
from cpvt_pyramid.runner.inference.workers import Cores, Workers
from cpvt_pyramid.tooling.command import UserError
from cpvt_pyramid.tooling.threads import ahead

infer, test_tool = load_tool('infer'), load_tool('test')
TWO = Cores(2, processes=2)


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def shared(function: Callable, items: list, cores: Cores = TWO) -> list:
    with Workers(function, len(items), cores) as forks:
        results = [result() for result in ahead(forks, items, len(forks))]
        children = forks.processes
    assert not any(process.is_alive() for process in children)
    return results


# How many


@pytest.mark.parametrize('count, items, expected', [
    (1, 9, (1, 1)), (2, 1, (1, 2)), (2, 3, (1, 2)), (2, 4, (2, 1)), (16, 1, (1, 16)),
    (16, 200, (16, 1)), (16, 3, (3, 5)), (16, 24, (8, 2)),
])  # fmt: skip
def test_the_cores_are_divided(count, items, expected, monkeypatch):
    monkeypatch.setattr(workers.memory, 'available', lambda: 2**40)
    assert Cores(count).divided(items) == expected
    assert Cores(count, processes=2).divided(items) == (2, max(count // 2, 1))


def test_memory_bounds_the_processes(monkeypatch):
    monkeypatch.setattr(workers.memory, 'available', lambda: 6 * 2**30)
    assert Cores(16).divided(200, 2 * 2**30) == (3, 5)
    assert Cores(16, memory=2**30).divided(200, 2 * 2**30) == (1, 16)
    assert Cores(16, 4, memory=2**30).divided(200) == (4, 4)


def test_where_forks_do_not_help(monkeypatch):
    monkeypatch.setattr(workers, 'usable_cores', lambda: 3)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 64)
    assert Cores.for_model(torch.device('cpu'), None) == Cores(3)
    gpu = torch.device('cuda')
    assert Cores.for_model(gpu, None).divided(100) == (1, 3)
    with pytest.raises(UserError, match='--processes needs a CPU and Linux'):
        Cores.for_model(gpu, 2)


# Processes that end


def test_a_killed_process_costs_no_result():
    """One of two, then both: this process does the rest."""
    here = os.getpid()
    for deadly in ({3}, {1, 2, 5}):

        def square(item: int, deadly: set = deadly) -> int:
            if item in deadly and os.getpid() != here:
                os.kill(os.getpid(), signal.SIGKILL)
            return item * item

        assert shared(square, list(range(8))) == [i * i for i in range(8)]


def test_an_error_is_raised_here():
    assert shared(lambda item: item, [0]) == [0]
    with pytest.raises(ZeroDivisionError) as error:
        shared(lambda item: 1 // item, [1, 0, 1])
    assert '1 // item' in str(error.traceback[-1].statement)


def test_openmp_works_in_a_fork():
    """The thread that is forked has started a team of threads, which the fork does not have."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.ones(2**20)
    assert x.add(1).sum() == 2**21
    torch.set_num_threads(before)
    sums = shared(lambda item: x.add(item).sum().item(), [1, 2], Cores(4, processes=2))
    torch.set_num_threads(before)
    assert sums == [2**21, 3 * 2**20]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_first(number, tmp_path):
    """Of a signal to the first one. The items at work are finished, others are not started."""

    def work(item: int) -> None:
        (tmp_path / f'{item}-{os.getpid()}').touch()
        time.sleep(0.5)
        (tmp_path / f'done{item}').touch()

    def first(_: int) -> int:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def fell() -> None:
            while len(list(tmp_path.glob('*-*'))) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        with Workers(work, 9, TWO) as forks:
            threads = ahead(lambda item: fell() if item < 0 else forks(item), [-1, *range(9)], 3)
            with contextlib.suppress(KeyboardInterrupt):
                [result() for result in threads]
        return 6

    status = {signal.SIGINT: 6, signal.SIGKILL: -9, signal.SIGTERM: 1}[number]
    ((found, said),) = in_processes(1, first)
    assert found == status or number == signal.SIGTERM, said
    started = dict(path.name.split('-') for path in tmp_path.glob('*-*'))
    assert len(started) == 2
    ended = time.monotonic() + 5
    while any(Path('/proc', pid).exists() for pid in started.values()):
        assert time.monotonic() < ended
        time.sleep(0.02)
    assert {path.name for path in tmp_path.glob('done*')} == {f'done{item}' for item in started}


# The tools


def save(path: str, height: int, width: int) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Image.fromarray(photograph(height, width, seed=height)).save(path)


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_processes_write_what_one_writes(untrained, capsys, name):
    """Images of several sizes, one that cannot be read, and a video."""
    for i in range(5):
        save(f'in/{i}.png', 60 + 10 * i, 80)
    Path('in/void.png').touch()
    film('in/v.mp4', [photograph(48, 64, seed=i) for i in range(5)])
    said = []
    for count in '1', '3':
        options = ['--processes', count, '--out-dir', count]
        options += ['--score-thr', '0.01'] * (name == 'detector')
        assert infer.main([*untrained[name], 'in', *options]) == 1
        out, err = capsys.readouterr()
        assert err.count('infer: skipped in/void.png: the file is empty\n') == 1
        assert f'images per second with {count} processes\n' in out
        said.append(out[out.index('6 of 7 done') :].replace(f'in {count}\n', ''))
    assert said[0] == said[1]
    assert contents('1') == contents('3')


def test_a_forward_that_raises(untrained, monkeypatch):
    save('a.png', 60, 80)
    save('b.png', 60, 80)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError('of the model')

    monkeypatch.setattr('mmdet.models.RetinaNet.predict', broken)
    with pytest.raises(RuntimeError, match='of the model'):
        infer.main([*untrained['detector'], 'a.png', 'b.png', '--processes', '2'])


def test_where_processes_are_not_an_option(untrained, capsys):
    save('a.png', 60, 80)
    for options in (['--tile', '64'], ['--launcher', 'pytorch']):
        assert infer.main([*untrained['detector'], 'a.png', '--processes', '2', *options]) == 2
        assert '--processes is not for --tile' in capsys.readouterr().err
    assert infer.main([*untrained['detector'], 'a.png', '--processes', '0']) == 2


@pytest.mark.parametrize('name', ['detector', 'segmentor'])
def test_an_evaluation(untrained, name):
    for count in '1', '2':
        options = ['--processes', count, '--out', f'{count}.pkl', '--show-dir', f'shown{count}']
        with Path(f'{count}.txt').open('w') as out, contextlib.redirect_stdout(out):
            assert test_tool.main([*untrained[name], *options]) == 0
    metrics = [
        re.findall(r'^[\w/]+ +-?[\d.e-]+$', Path(f'{count}.txt').read_text(), re.M)
        for count in '12'
    ]
    assert metrics[0] == metrics[1] and len(metrics[0]) >= 3
    one, two = (pickle.loads(Path(f'{count}.pkl').read_bytes()) for count in '12')
    assert len(one) == 4
    assert_same(one, two)
    assert contents('shown1') == contents('shown2')
