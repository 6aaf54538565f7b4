"""The command: questions to files, and mistakes in one line."""

import base64
import json
import math
import re
import shlex
from typing import get_args, get_type_hints

import pytest
import timm
import torch
from matplotlib import pyplot as plt
from support import ROOT
from torch import nn

from cpvt_pyramid.lab.probes import Subject
from cpvt_pyramid.tooling.command import UserError, parser_of
from experiments.parallel import in_parallel
from experiments.position import __main__ as tool
from experiments.position import groups, questions, runs, sizes
from experiments.position.given_models import load_subject
from experiments.position.laboratory import PRESETS, Lab, metric_of
from experiments.position.tasks import ceilings
from experiments.statistics import estimate

FINDINGS = ROOT / 'experiments/position/findings'
PAGES = [ROOT / 'docs/position.md', FINDINGS / 'protocol.md', FINDINGS / 'tables.md']
TRAINED = tuple(
    name for name in tool.TRAINED if name not in tool.OF_PHOTOS
)  # these: test_paper.py,
# test_anchoring.py
SMOKE = ['--preset', 'smoke', '--workers', '1', '--seed', '7', '--work-dir']


@pytest.fixture(scope='module')
def answered(tmp_path_factory):
    """All questions but `paper`, with the smallest preset."""
    folder = tmp_path_factory.mktemp('lab')
    assert tool.main([*TRAINED, *tool.MEASURED, *SMOKE, str(folder)]) == 0
    return folder


def test_answers_are_whole(answered):
    for question in (*TRAINED, *tool.MEASURED):
        found = json.loads((answered / f'{question}.json').read_text())
        assert found['tables'] and found['figures'] and found['notes'] and found['data']
        assert found['settings']['seeds'] == [7, 8] and found['versions']['torch']
        for table in found['tables']:
            assert {len(row) for row in table['rows']} == {len(table['header'])}
    encodings = json.loads((answered / 'encodings.json').read_text())
    table = encodings['tables'][0]['rows']
    assert [row[0] for row in table] == ['bag of patches, ceiling', 'none', 'peg']
    assert table[0][1:7] == ['35.0', '33.3', '33.3', '50.0', '25.0', '33.3']
    assert [row[-1] for row in table] == ['', '68.2', '72.4']
    trained = [run for one in encodings['data']['column'] for run in one['runs']]
    assert {run['settings']['seed'] for run in trained} == {7, 8}
    # Only what the settings determine: a command that was killed gives the same file.
    assert {*trained[0]} == {'settings', 'metrics', 'losses', 'failure'}
    sizes = json.loads((answered / 'resolution.json').read_text())['tables']
    assert sizes[0]['header'][1:3] == ['canvas 1', 'canvas 2']
    assert sizes[0]['rows'][0][:3] == ['bag of patches, ceiling', '35.0', '35.1']
    assert sizes[1]['rows'][0][1] == '100.0' and len(sizes[2]['rows']) == 2

    page = (answered / 'report.html').read_text()
    pictures = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == len(list(answered.glob('*.png'))) >= 9
    assert all(base64.b64decode(data).startswith(b'\x89PNG') for data in pictures)
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # self-contained
    assert page.count('<h2>') == len(TRAINED + tool.MEASURED)


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


def test_asked_again_nothing_is_trained(answered, tmp_path, monkeypatch, capsys):
    """Findings are written into a page. An interrupted training ends in one line."""

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, 'train', interrupt)
    before = (answered / 'encodings.json').read_bytes()
    page = tmp_path / 'position.md'
    page.write_text('before\n<!-- findings -->\nold\n<!-- /findings -->\nafter\n')
    for _ in range(2):  # the second time it replaces what the first has written
        assert tool.main(['encodings', *SMOKE, str(answered), '--page', str(page)]) == 0
        text = page.read_text()
        assert text.startswith('before\n<!-- findings -->') and text.endswith('-->\nafter\n')
        assert 'old' not in text and re.findall('^### (.*)', text, re.M) == ['Which encoding?']
        first, others = text.split('<details><summary>', 1)
        assert first.count('| --- |') == others.count('| --- |') == others.count('</details>') == 1
        for name in re.findall(r'!\[[^]]*\]\(([^)]+)\)', text):
            assert (tmp_path / name).is_file()
    assert (answered / 'encodings.json').read_bytes() == before
    out = capsys.readouterr().out
    assert 'Is A above B? 50.0' in out and 'not significant' in out
    assert tool.main(['encodings', *SMOKE, str(tmp_path)]) == 130
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(': interrupted; run the same command to continue')


def test_the_docs(tmp_path, monkeypatch, capsys):
    """Commands parse, code runs, the ceilings are those that are computed."""
    text = '\n'.join(page.read_text() for page in PAGES)
    (code,) = re.findall(r'```python\n(.*?)```', text, re.S)
    lines = ''.join(re.findall(r'```bash\n(.*?)```', text, re.S)).splitlines()
    commands = [
        shlex.split(line, comments=True) for line in lines if 'experiments.position ' in line
    ]
    assert len(commands) == 15
    for words in commands:
        parser_of(tool.position_lab).parse_args(words[3:])
    assert set(get_args(get_type_hints(tool.position_lab)['preset'])) == set(PRESETS)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert 'ResNet-18, border replaced' in capsys.readouterr().out
    for name, value in ceilings().items():
        assert re.search(rf'^\| {name} \|.*\| {100 * value:.1f} % \|$', text, re.M), name


def test_the_page_of_canvases_has_what_its_runs_say():
    page = (FINDINGS / 'canvas.md').read_text()
    tests = json.loads((FINDINGS / 'canvas.json').read_text())['data']['tests']
    for metric in ('position', 'control'):
        for name, seeds in tests.items():
            cells = []
            for test in seeds[0]:
                values = [metric_of(seed[test], metric) for seed in seeds]
                cells.append(estimate(values).show())
            assert f'| {name} | {" | ".join(cells)} | {len(seeds)} |' in page


def test_workers_give_the_results_in_order():
    assert in_parallel([(math.sqrt, (n,)) for n in (9, 4, 1)], 2, 'roots') == [3, 2, 1]
    with pytest.raises(ValueError):  # of a worker
        in_parallel([(math.sqrt, (n,)) for n in (9, -1, 1)], 2, 'roots')


@pytest.mark.parametrize(
    ('arguments', 'complaint'),
    [
        (['encodings', '--seed', '-1'], '--seed must be at least 0, got -1'),
        (['probe', '--size', '100'], '--size must be a multiple of 32, got 100'),
        (['encodings', '--model', 'pcpvt_nano'], 'encodings trains models of its own'),
        (['probe', '--checkpoint', 'a.pth'], '--checkpoint needs one --model, got 0'),
        (['probe', '--model', 'pcpvt_nano', '--checkpoint', 'a.pth'], 'no checkpoint at a.pth'),
        (['probe', '--model', 'timm:convnext_tinny'], 'close: convnext_tiny'),
        (['probe', '--model', 'resnet'], "unknown --model 'resnet'; timm:NAME"),
        (['probe', '--model', 'pcpvt_nano', 'pcpvt_nano'], 'models must have different names'),
        (['encodings', '--page', 'no.md'], 'there is no page no.md'),
    ],
)
def test_mistakes(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tool.main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert complaint in error
    assert not list(tmp_path.rglob('*.json'))


# Swin's maps have channels last, and torchvision's are more than resolutions.
@pytest.mark.parametrize('name', ['pcpvt_nano', 'torchvision:swin_t', 'timm:resnet10t'])
def test_names_of_models(name):
    maps = load_subject(name, None, 64).maps(torch.zeros(1, 3, 64, 64))
    sides = [32] * (name == 'timm:resnet10t') + [16, 8, 4, 2]
    assert [tuple(m.shape[2:]) for m in maps] == [(n, n) for n in sides]


@pytest.mark.parametrize(
    'name, options',
    [
        ('convnext_atto', {}),
        ('vit_tiny_patch16_224', {'img_size': 64}),
        ('swin_tiny_patch4_window7_224', {'img_size': 64}),
    ],
)
def test_state_dicts_of_timm(name, options, tmp_path):
    torch.manual_seed(1)
    model = timm.create_model(name, num_classes=3, **options).eval()
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'a.pth')
    subject = load_subject(f'timm:{name}', str(tmp_path / 'a.pth'), 64)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model.forward_intermediates(x, intermediates_only=True)[-1]
    torch.testing.assert_close(subject.maps(x)[-1], expected, rtol=1e-3, atol=1e-4)


def test_weights_must_fit(tmp_path):
    """mmengine's own loading only warns, and random weights would be measured."""
    config = tmp_path / 'config.py'
    stages = dict(num_stages=1, strides=(1,), dilations=(1,), out_indices=(0,))
    backbone = dict(type='mmseg.ResNet', depth=18, **stages)
    head = dict(type='mmseg.FCNHead', in_channels=64, channels=4, num_classes=2)
    model = dict(type='mmseg.EncoderDecoder', backbone=backbone, decode_head=head)
    config.write_text(f"default_scope = 'mmseg'\nmodel = {model}\n")
    (maps,) = load_subject(str(config), None, 64).maps(torch.zeros(1, 3, 64, 64))
    assert maps.shape == (1, 64, 16, 16)
    torch.save({'state_dict': {'backbone.nothing': torch.zeros(1)}}, tmp_path / 'other.pth')
    (tmp_path / 'text.pth').write_text('no weights')
    weights = timm.create_model('resnet10t').state_dict()
    weights.pop('layer4.0.conv1.weight')
    torch.save(weights, tmp_path / 'part.pth')
    for file in ('other.pth', 'text.pth', 'part.pth'):
        with pytest.raises(UserError, match=file):
            name = str(config) if file == 'other.pth' else 'timm:resnet10t'
            load_subject(name, str(tmp_path / file), 64)


def test_any_module_is_measured(tmp_path):
    """The Python API. The report says which weights are random."""
    lab = Lab(PRESETS['smoke'], tmp_path, seeds=2)
    for question in ('shift', 'padding', 'probe'):
        own = Subject('own', nn.Conv2d(3, 8, 5, 4, padding=2))
        found = questions.MEASURED[question](lab, [own], 64)
        assert (tmp_path / found.figures[0]).stat().st_size > 5000
    assert {row[0] for row in found.tables[0].rows} == {'own', 'own, border replaced'}
    group = groups.groups_of(lab, [load_subject('timm:resnet18', None, 64)], 64)
    assert 'all 0 (timm:resnet18, random weights: 8)' in groups.origin_of(group)
