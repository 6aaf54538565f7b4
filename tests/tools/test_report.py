"""The reports, on a CPU: their parts, the page, and how a report continues."""

import time
from xml.etree import ElementTree

import pytest
from support import load_tool

from cpvt_pyramid.tooling.command import parser_of

tool = load_tool('benchmarks/report')


@pytest.fixture
def processes(monkeypatch):
    """Commands instead of processes; those that compile fail."""
    commands = []

    def run_process(options, deadline):
        commands.append(options)
        failed = 'the time limit of its part' if '--compile' in options else None
        return {'output': f'table {len(commands)}', 'failed': failed}

    monkeypatch.setattr(tool, 'run_process', run_process)
    return commands


def test_page(processes, tmp_path):
    folder = tmp_path / 'report'
    options = ['--device', 'cpu', '--out', str(folder), '--parts', 'peers', 'compiled']
    assert tool.main(options) == 1
    page = (folder / 'report.md').read_text()
    assert '| torch | 2.' in page and '| processor | ' in page
    assert '```\n$ python tools/benchmarks/speed.py --models ours timm swin_tiny' in page
    assert '\ntable 1\n```' in page
    assert page.count('**Failed:** the time limit of its part') == 2
    assert page.index('## Compiled') < page.index('## Other backbones')
    assert (
        len(processes) == 4
        and ['--plot' in options for options in processes] == [True] + [False] * 3
    )


def test_continues_and_repeats_a_part_whose_file_is_deleted(processes, tmp_path):
    options = ['--device', 'cpu', '--out', str(tmp_path)]
    assert tool.main([*options, '--parts', 'peers']) == 0
    assert tool.main([*options, '--parts', 'peers', 'whole-models']) == 0
    assert len(processes) == 4
    (tmp_path / 'peers.json').unlink()
    assert tool.main([*options, '--parts', 'peers', 'whole-models']) == 0
    assert len(processes) == 6


def test_small_runs_the_benchmark(tmp_path):
    options = ['--device', 'cpu', '--small', '--parts', 'peers', '--out', str(tmp_path)]
    assert tool.main(options) == 0
    page = (tmp_path / 'report.md').read_text()
    assert 'forward, float32, 64x64' in page and '\nours ' in page and '](peers.png)' in page
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'peers.json',
        'peers.png',
        'report.md',
    ]


def test_a_failing_process_and_one_out_of_time():
    """What it printed before is kept."""
    code = 'print("first", flush=True); raise SystemExit("no memory")'
    assert tool.run_process(['-c', code], time.monotonic() + 60) == {
        'output': 'first', 'failed': 'exit status 1: no memory'
    }  # fmt: skip
    assert 'time limit' in tool.run_process(['-c', 'import time; time.sleep(60)'], 0)['failed']


def test_a_process_out_of_time_is_interrupted_and_then_killed(monkeypatch):
    """It can draw what it measured, and ends in any case."""
    sleep = 'import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print("drawn")'
    run = tool.run_process(['-c', sleep], time.monotonic() + 3)
    assert run == {'output': 'drawn', 'failed': 'the time limit of its part'}
    monkeypatch.setattr(tool, 'GRACE', 1)
    start = time.monotonic()
    run = tool.run_process(['-c', f'while True:\n exec({sleep!r})'], start + 3)
    assert run['failed'] == 'the time limit of its part' and time.monotonic() - start < 30


def test_outcomes_of_tests():
    cases = ElementTree.fromstring(
        '<suite><testcase classname="a" name="x" time="1"/>'
        '<testcase classname="a" name="y" time="2"><failure message="E  no&#10;more"/></testcase>'
        '<testcase classname="a" name="z" time="0"><skipped message="no GPU"/></testcase></suite>'
    )
    assert tool.outcomes(list(cases)) == '1 passed, 1 failure, 1 skipped in 3 s\na.y: E  no'


def test_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    assert tool.main(['--device', 'cuda', '--out', str(tmp_path / 'report')]) == 2
    assert 'finds no GPU' in capsys.readouterr().err
    assert not (tmp_path / 'report').exists()


def test_an_unknown_part(capsys, tmp_path):
    assert tool.main(['--device', 'cpu', '--parts', 'tests', '--out', str(tmp_path / 'x')]) == 2
    assert 'no part tests; one of runtimes' in capsys.readouterr().err


def test_time_limits_are_those_of_the_help():
    limits = [sum(part.minutes for part in parts.values()) for parts in tool.REPORTS.values()]
    assert 'have {} minutes on a GPU and {} on a CPU'.format(*limits) in tool.__doc__
    assert limits[0] <= 40


def test_commands_parse():
    """All options are those of the tools."""
    for parts in tool.REPORTS.values():
        for part in parts.values():
            if part.runs:
                measured = load_tool(f'benchmarks/{part.tool.removesuffix(".py")}')
                function = getattr(measured, part.tool.removesuffix('.py'))
                for options in part.runs:
                    parser_of(function).parse_args(options.split())
