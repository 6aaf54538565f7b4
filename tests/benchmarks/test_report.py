"""The reports, on a CPU: their commands, the page, and how a report continues."""

import itertools
from importlib import import_module

import pytest

from benchmarks import report as tool
from cpvt_pyramid.tooling.command import parser_of


@pytest.fixture
def processes(monkeypatch):
    """Commands instead of processes; those that compile fail."""
    commands = []

    def run_process(options, seconds):
        commands.append(options)
        failed = 'the time limit' if '--compile' in options else None
        return f'table {len(commands)}', failed

    monkeypatch.setattr(tool, 'run_process', run_process)
    return commands


def test_page_and_continuation(processes, tmp_path):
    (tmp_path / 'peers.png').touch()
    options = ['--device', 'cpu', '--out', str(tmp_path), '--parts', 'compiled']
    assert tool.main(options) == 1
    assert tool.main([*options, 'peers']) == 0  # of the second part
    page = (tmp_path / 'report.md').read_text()
    assert '```\n$ python -m cpvt_pyramid.doctor\ntable 1\n```' in page and len(processes) == 5
    assert '```\n$ python -m benchmarks.speed --models ours timm swin_tiny' in page
    assert page.count('**Failed:** the time limit') == 2
    assert page.index('## compiled') < page.index('## peers') and page.count('](peers.png)') == 1


def test_a_report_in_several_calls(processes, tmp_path, monkeypatch, capsys):
    """A command starts if its time limit ends in time; none runs twice."""
    clock = itertools.count(step=11 * 60)  # seconds, at each look
    monkeypatch.setattr(tool.time, 'monotonic', clock.__next__)
    options = ['--device', 'cpu', '--out', str(tmp_path), '--parts', 'compiled']
    assert tool.main([*options, '--minutes', '45']) == 75
    assert len(processes) == 2
    assert '45 minutes are over; the same command continues' in capsys.readouterr().out
    assert tool.main([*options, '--minutes', '30']) == 1  # the last one fails
    assert len(processes) == 3
    assert tool.main([*options, '--minutes', '29']) == 2
    assert '--minutes must be at least 30' in capsys.readouterr().err


def test_a_failing_process_and_one_out_of_time(monkeypatch):
    """What they printed before is kept; what is interrupted ends in any case."""
    code = 'print("first", flush=True); raise SystemExit("no memory")'
    assert tool.run_process(['-c', code], 60) == ('first', 'exit status 1: no memory')
    sleep = 'import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print("drawn", flush=True)'
    output, failed = tool.run_process(['-c', sleep], 2)
    assert output == 'drawn' and failed.startswith('the time limit')
    monkeypatch.setattr(tool, 'GRACE', 0.2)
    _, failed = tool.run_process(['-c', f'while True:\n exec({sleep!r})'], 2)
    assert failed.startswith('the time limit')


def test_mistakes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    out = tmp_path / 'report'
    assert tool.main(['--device', 'cuda', '--out', str(out)]) == 2
    assert 'finds no GPU' in capsys.readouterr().err
    assert tool.main(['--device', 'cpu', '--parts', 'tests', '--out', str(out)]) == 2
    assert 'no part tests; one of machine, throughput' in capsys.readouterr().err
    assert not out.exists()


def test_commands_parse():
    """All options are those of the tools."""
    lines = []
    for parts in tool.REPORTS.values():
        for part in parts.values():
            lines += [line.strip() for line in part.splitlines() if '-m benchmarks.' in line]
    assert len(lines) > 25
    for line in lines:
        _, name, *options = line.split()
        function = getattr(import_module(name), name.removeprefix('benchmarks.'))
        parser_of(function).parse_args(options)
