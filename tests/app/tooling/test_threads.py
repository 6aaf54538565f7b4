"""The environment of the tools' threads, memory that threads share, and usable cores."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import ROOT, run

from cpvt_pyramid.app.tooling import threads
from cpvt_pyramid.app.tooling.command import SPIN_COUNT, WAIT_VARIABLES, prepare_for_torch
from cpvt_pyramid.app.tooling.threads import Budget, prefetch, usable_cores

# torch is never imported: what is tried is whether the tool would have been in time.
TOOLS = """
import os, sys
from importlib import import_module
from cpvt_pyramid.__main__ import find_tools

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'torch':
            sys.exit()

sys.meta_path.insert(0, Finder())
names = 'GOMP_SPINCOUNT', 'THP_MEM_ALLOC_ENABLE'
for path in find_tools().values():
    for name in (*names, 'OMP_WAIT_POLICY', 'KMP_BLOCKTIME'):
        os.environ.pop(name, None)
    try:
        module = import_module(f'cpvt_pyramid.app.commands.{path.stem}')
        module.main(['--help'])
    except SystemExit:
        pass
    print('TOOL', path.stem, *(os.environ.get(name) for name in names))
"""


def test_every_tool_sets_up_its_environment_before_it_imports_torch():
    Path('script.py').write_text(TOOLS)
    done = run(sys.executable, 'script.py', PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith('TOOL')]
    assert {'train', 'infer'} < {name for name, *_ in lines}
    assert [name for name, *found in lines if found != [SPIN_COUNT, '1']] == []


def test_what_the_user_chose_is_kept(monkeypatch):
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('OMP_WAIT_POLICY', 'active')
    monkeypatch.setenv('THP_MEM_ALLOC_ENABLE', '0')
    prepare_for_torch()
    assert os.environ['OMP_WAIT_POLICY'] == 'active' and 'GOMP_SPINCOUNT' not in os.environ
    assert os.environ['THP_MEM_ALLOC_ENABLE'] == '0'


def test_a_budget_is_shared():
    """Never exceeded but by one that is larger, and alone."""
    budget, taken, totals = Budget(100), [], []

    def work(amount: int) -> None:
        with budget.take(amount):
            taken.append(amount)
            totals.append(sum(taken))
            time.sleep(0.02)
            taken.remove(amount)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, [30, 60, 500, 10, 100, 45] * 3))
    assert all(total <= 100 or total == 500 for total in totals) and 90 in totals
    assert budget.free == 100


def test_a_container_has_the_cores_of_its_quota(tmp_path, monkeypatch):
    file = tmp_path / 'cpu.max'
    monkeypatch.setattr(threads, 'CPU_QUOTA', file)
    monkeypatch.setattr(threads, 'bound_cores', lambda: 8)
    assert usable_cores() == 8
    for quota, expected in (('max 100000', 8), ('350000 100000', 3), ('50000 100000', 1), ('', 8)):
        file.write_text(f'{quota}\n')
        assert usable_cores() == expected


@pytest.mark.skipif(not hasattr(os, 'sched_setaffinity'), reason='cores cannot be chosen')
def test_a_bound_process_has_the_cores_that_it_is_bound_to():
    cores = os.sched_getaffinity(0)
    assert threads.bound_cores() == len(cores)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert threads.bound_cores() == 1
    finally:
        os.sched_setaffinity(0, cores)


def test_items_that_have_not_begun_are_cancelled():
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.02)

    results = prefetch(work, range(100), 2)
    next(results)()
    results.close()
    count = len(begun)
    assert count < 6
    time.sleep(0.05)
    assert len(begun) == count  # those that had begun were waited for
