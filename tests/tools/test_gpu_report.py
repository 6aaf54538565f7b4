"""The GPU report, on a CPU: its parts, its page, and how it continues."""

import json
import time

import pytest
from support import load_tool

tool = load_tool('benchmarks/gpu_report')


@pytest.fixture
def processes(monkeypatch):
    """Commands instead of processes; each measures one row, or fails."""
    commands = []

    def run_process(options, deadline):
        commands.append(options)
        if '--json' not in options:
            return {'failed': None}
        case = dict(step='forward', dtype='tf32', height=64, width=64, batch=2)
        row = dict(model='ours', ms=4.0, ratio=1.0, ratio_spread=(1.0, 1.0), **case)
        results = {'rates': {'tf32': {'square, torch': 900.0, 'copy': 30.0}}, 'rows': [row]}
        with open(options[options.index('--json') + 1], 'w') as file:
            json.dump(results, file)
        return {'failed': 'the time limit of its part' if '--compile' in options else None}

    monkeypatch.setattr(tool, 'run_process', run_process)
    return commands


def test_page(processes, tmp_path):
    folder = tmp_path / 'report'
    options = ['--device', 'cpu', '--out', str(folder), '--parts', 'peers', 'compiled']
    assert tool.main(options) == 1
    page = (folder / 'report.md').read_text()
    assert '| ours | 4.0 | 500 | 1.00 (1.00 to 1.00) |' in page
    assert 'tf32: products 900 GFLOP/s, copy 30 GB/s.' in page
    assert page.count('**Failed:** the time limit of its part') == 2
    assert page.index('## Compiled') < page.index('## Other backbones')
    assert len(processes) == 3 and '--plot' in processes[0]


def test_continues_and_repeats_a_part_whose_file_is_deleted(processes, tmp_path):
    options = ['--device', 'cpu', '--out', str(tmp_path)]
    assert tool.main([*options, '--parts', 'peers']) == 0
    assert tool.main([*options, '--parts', 'peers', 'whole-models']) == 0
    assert len(processes) == 3
    (tmp_path / 'peers.json').unlink()
    assert tool.main([*options, '--parts', 'peers', 'whole-models']) == 0
    assert len(processes) == 4


def test_small_runs_the_benchmark(tmp_path):
    options = ['--device', 'cpu', '--small', '--parts', 'inference', '--out', str(tmp_path)]
    assert tool.main(options) == 0
    ((run,),) = json.loads((tmp_path / 'inference.json').read_text()).values()
    assert [row['model'] for row in run['rows']] == ['ours']
    assert not list(tmp_path.glob('.*'))


def test_a_failing_process_and_one_out_of_time():
    assert tool.run_process(['-c', 'raise SystemExit("no memory")'], time.monotonic() + 60) == {
        'failed': 'exit status 1: no memory'
    }
    assert 'time limit' in tool.run_process(['-c', 'import time; time.sleep(60)'], 0)['failed']


def test_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    assert tool.main(['--out', str(tmp_path / 'report')]) == 2
    assert 'finds no GPU' in capsys.readouterr().err
    assert not (tmp_path / 'report').exists()


def test_all_parts_fit_into_40_minutes():
    assert sum(part.minutes for part in tool.PARTS.values()) <= 40
