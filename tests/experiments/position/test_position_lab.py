"""The command: a question to files, and mistakes in one line."""

import json
import re
import shlex

import pytest
from matplotlib import pyplot as plt
from support import ROOT

from cpvt_pyramid.app.tooling.command import parser_of
from experiments import runs
from experiments.position import __main__ as tool
from experiments.position import encodings, sizes
from experiments.position.tasks import ceilings

FINDINGS = ROOT / 'experiments/position/findings'
PAGES = [ROOT / 'docs/position.md', *FINDINGS.glob('*.md')]
SMOKE = ['encodings', '--preset', 'smoke', '--workers', '1', '--seed', '7', '--work-dir']
FEW = ('none', 'peg')


@pytest.fixture
def few(monkeypatch):
    chosen = {name: encodings.ENCODINGS[name] for name in FEW}
    monkeypatch.setattr(encodings, 'ENCODINGS', chosen)


@pytest.fixture(scope='module')
def answered(tmp_path_factory):
    """The question about encodings, of two of them, with the smallest preset."""
    folder = tmp_path_factory.mktemp('lab')
    with pytest.MonkeyPatch.context() as patch:
        chosen = {name: encodings.ENCODINGS[name] for name in FEW}
        patch.setattr(encodings, 'ENCODINGS', chosen)
        assert tool.main([*SMOKE, str(folder)]) == 0
    return folder


def test_the_answer_is_whole(answered):
    found = json.loads((answered / 'encodings.json').read_text())
    assert found['notes'] and found['settings']['seeds'] == [7, 8] and found['versions']['torch']
    for table in found['tables']:
        assert {len(row) for row in table['rows']} == {len(table['header'])}
    accuracy, differences, position, control, miou, _ = [t['rows'] for t in found['tables']]
    assert [row[0] for row in accuracy] == ['bag of patches, ceiling', *FEW]
    assert accuracy[0][1:7] == ['35.0', '33.3', '33.3', '50.0', '25.0', '33.3']
    assert [row[-1] for row in accuracy] == ['', '68.2', '72.4']
    assert [row[0] for row in differences] == ['none']
    assert found['tables'][2]['header'][1:3] == ['canvas 1', 'canvas 2']
    assert position[0][:3] == ['bag of patches, ceiling', '35.0', '35.1']
    assert control[0][1] == '100.0' and len(miou) == 2
    trained = [run for one in found['data'] for run in one['runs']]
    assert {run['settings']['seed'] for run in trained} == {7, 8}
    # Only what the settings determine: a command that was killed gives the same file.
    assert {*trained[0]} == {'settings', 'metrics', 'losses', 'failure'}
    for name in found['figures']:
        assert (answered / name).stat().st_size > 5000


def test_every_column_of_sizes_has_an_axis(tmp_path, monkeypatch):
    """Also where the last row is not full."""
    saved = []
    monkeypatch.setattr(plt, 'close', saved.append)
    metrics = dict.fromkeys((*ceilings(), 'mIoU', 'AP'), 0.5)
    tests = {f'{kind} {scale}': metrics for kind in ('canvas', 'zoom') for scale in (1, 2)}
    sizes.draw_sizes(tmp_path / 'a.png', {str(i): [tests, tests] for i in range(5)}, (1, 2))
    labels = [
        {text.get_text() for text in axis.get_xticklabels() if text.get_visible()}
        for axis in saved[0].axes
        if axis.get_visible()
    ]
    assert labels == [set(), {'1', '2'}, {'1', '2'}, {'1', '2'}, {'1', '2'}]


def test_asked_again_nothing_is_trained(answered, few, tmp_path, monkeypatch, capsys):
    """Findings are written into a page. An interrupted training ends in one line."""

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, 'train', interrupt)
    before = (answered / 'encodings.json').read_bytes()
    page = tmp_path / 'position.md'
    page.write_text('before\n<!-- findings -->\nold\n<!-- /findings -->\nafter\n')
    for _ in range(2):  # the second time it replaces what the first has written
        assert tool.main([*SMOKE, str(answered), '--page', str(page)]) == 0
        text = page.read_text()
        assert text.startswith('before\n<!-- findings -->') and text.endswith('-->\nafter\n')
        assert 'old' not in text and re.findall('^### (.*)', text, re.M) == ['Which encoding?']
        first, others = text.split('<details><summary>', 1)
        assert first.count('| --- |') == 1 and others.count('| --- |') == 5
        for name in re.findall(r'!\[[^]]*\]\(([^)]+)\)', text):
            assert (tmp_path / name).is_file()
    assert (answered / 'encodings.json').read_bytes() == before
    assert page.with_suffix('.json').read_bytes() == before
    assert 'not significant' in capsys.readouterr().out
    assert tool.main([*SMOKE, str(tmp_path)]) == 130
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(': interrupted; run the same command to continue')


def test_the_docs():
    """Commands parse, and the ceilings are those that are computed."""
    text = '\n'.join(page.read_text() for page in PAGES)
    lines = ''.join(re.findall(r'```bash\n(.*?)```', text, re.S)).splitlines()
    commands = [
        shlex.split(line, comments=True) for line in lines if 'experiments.position ' in line
    ]
    assert len(commands) >= 3
    for words in commands:
        parser_of(tool.position_lab).parse_args(words[3:])
    for name, value in ceilings().items():
        assert re.search(rf'^\| {name} \|.*\| {100 * value:.1f} % \|$', text, re.M), name


@pytest.mark.parametrize(
    ('arguments', 'complaint'),
    [
        (['encodings', '--seed', '-1'], '--seed must be at least 0, got -1'),
        (['encodings', '--page', 'no.md'], 'there is no page no.md'),
        (['encodings', '--page', 'empty.md'], 'must have one line <!-- findings -->'),
    ],
)
def test_mistakes(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty.md').touch()
    assert tool.main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert complaint in error
    assert not list(tmp_path.rglob('*.json')) and not (tmp_path / 'work_dirs').exists()
