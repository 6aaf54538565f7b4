"""speed.py, and its measurements."""

import functools
import json
from pathlib import Path

import pytest
import torch

from benchmarks import measuring
from benchmarks import speed as tool


@pytest.fixture
def one_block_each(monkeypatch: pytest.MonkeyPatch) -> None:
    shallow = tool.ARCHS['pcpvt_nano']._replace(depths=(1, 1, 1, 1))
    monkeypatch.setitem(tool.ARCHS, 'pcpvt_nano', shallow)


def rows_of(path: Path, **options) -> list[dict]:
    """The rows of a round, by default of a small backbone."""
    settings = dict(arch='pcpvt_nano', rounds=1, no_memory=True)
    tool.speed(json=str(path / 'speed.json'), **settings | options)
    return json.loads((path / 'speed.json').read_text())['rows']


def test_rows(one_block_each, tmp_path, capsys):
    steps = ['forward', 'train']
    rows = rows_of(tmp_path, sizes=['32', '50x70'], steps=steps, rounds=2, with_cp=True)
    results = json.loads((tmp_path / 'speed.json').read_text())
    assert set(results) == {'machine', 'options', 'rows'}
    names = ['ours', 'ours_cp', 'ours_accelerated', 'timm', 'mmseg']
    assert [row['model'] for row in rows] == names * 4
    for row in rows:
        assert len(row['rounds_ms']) == 2 and row['ms'] > 0
        low, high = row['ratio_spread']
        assert 0 < low <= high
        if row['model'] == 'ours':
            assert row['ratio'] == low == high == 1
        elif row['height'] == 32 or row['model'].startswith('ours'):
            assert row['difference'] < measuring.TOLERANCE
        else:  # libraries may differ
            assert 'difference' in row
    assert ' differs' in capsys.readouterr().out


def test_compiled_models_follow_their_own(one_block_each, monkeypatch, tmp_path):
    """In training there is a graph for each size, and one to compare the maps."""
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))
    torch._dynamo.reset()
    options = dict(models=['ours'], sizes=['96x128', '128x160'], steps=['train'], compile=True)
    rows = rows_of(tmp_path, **options)
    assert [row['model'] for row in rows] == ['ours', 'ours_compiled'] * 2
    assert all(row.get('difference', 0) < measuring.TOLERANCE for row in rows)
    assert [(row['graphs'], row['graph_breaks']) for row in rows[1::2]] == [(2, 0)] * 2
    assert 'graphs' not in rows[0]


def test_maps_are_equal_only_because_the_weights_are():
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        ours, theirs = (m(image) for m in tool.build_all(['ours', 'mmdet'], 'pvt_tiny').values())
        assert measuring.difference(ours, theirs) < measuring.TOLERANCE
        assert measuring.difference(ours, measuring.build('mmdet', 'pvt_tiny')(image)) > 0.1


def test_memory_of_a_process():
    """A step takes more memory than its image, and less than everything."""
    case = tool.Case('train', 'float32', 64, 64, 2, 'cpu')
    image = case.image().nbytes / measuring.MIB
    assert image < measuring.peak_memory('ours', 'pcpvt_nano', case, None, None) < 1000


def test_failures_are_rows_and_an_interrupt_keeps_finished_results(monkeypatch, capsys, tmp_path):
    def peak_memory(name, arch, case, *_):
        if case.height == 64:
            raise KeyboardInterrupt
        if name == 'timm':
            raise MemoryError('too large')
        return 7.0

    monkeypatch.setattr(measuring, 'peak_memory', peak_memory)
    monkeypatch.chdir(tmp_path)
    options = '--arch pcpvt_nano --models ours timm --sizes 32 64 --rounds 1 --json a.json'
    assert tool.main(options.split()) == 130
    out, err = capsys.readouterr()
    assert 'too large' in out and 'interrupted' in err
    ours, timm = json.loads(Path('a.json').read_text())['rows']
    assert ours['peak_mib'] == 7 and 'ms' in ours
    assert timm['failed'] == 'too large' and 'ms' not in timm


@pytest.mark.parametrize(
    ('arguments', 'complaint'),
    [
        ('--arch pcpvt_tiny', "unknown arch 'pcpvt_tiny'; one of pcpvt_nano"),
        ('--arch svt_small --models ours mmdet', 'mmdet has no svt_small'),
        ('--sizes 31', 'of at least 32 pixels, got 31'),
        ('--device cuda:99', 'no device cuda:99'),
        ('--json there.json', 'there.json already exists'),
        ('--json nowhere/a.json', 'no such directory'),
    ],
)
def test_mistakes(arguments, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('there.json').touch()
    monkeypatch.setattr(tool, 'measure', lambda *_: pytest.fail('begun'))
    assert tool.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith('speed: ') and complaint in error and error.count('\n') == 1
