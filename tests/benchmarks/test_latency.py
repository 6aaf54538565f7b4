"""latency.py, on a tiny image."""

import json
from pathlib import Path

import mmdet
import pytest
import yaml
from PIL import Image
from support import ROOT

from benchmarks import latency as tool
from benchmarks.published import COMPARED, RETINANET_1X


def test_table_and_figure(tmp_path, capsys):
    names = ['retinanet_pvt_v2_b0', 'ResNet-50']
    options = ['--models', *names, '--size', '64x96', '--rounds', '1', '--out', str(tmp_path)]
    assert tool.main(options) == 0
    results = json.loads((tmp_path / 'latency.json').read_text())
    assert results['size'] == [64, 96] and results['machine']['processor']
    ours, other = results['rows']
    assert [row['name'] for row in (ours, other)] == names
    for row in (ours, other):
        assert len(row['seconds']) == len(row['clock_seconds']) == 2
        assert len(row['bfloat16_seconds']) == 2
        assert all(0 < seconds < 60 for seconds in row['seconds'])
    assert 'plain_seconds' not in ours and len(other['plain_seconds']) == 2
    table = (tmp_path / 'latency.md').read_text()
    assert table in capsys.readouterr().out
    cells = [line.strip('| ').split(' | ') for line in table.splitlines()[2:]]
    assert cells[0][:4] == ['PVTv2-B0', '37.1', 'MMDetection', '12.9M']
    assert cells[1][:4] == ['ResNet-50', '36.5', 'MMDetection', '38.0M']
    assert cells[1][-1] == '1.00'
    assert min(Image.open(tmp_path / 'latency.png').size) > 400
    (tmp_path / 'latency.png').unlink()
    again = ['--again', str(tmp_path / 'latency.json'), '--out', str(tmp_path)]
    assert tool.main(again) == 0
    assert table in capsys.readouterr().out and (tmp_path / 'latency.png').is_file()


def test_the_page_has_the_times_of_the_file():
    results = json.loads((ROOT / 'benchmarks/detectors.json').read_text())
    page = (ROOT / 'docs/performance.md').read_text()
    assert f'\n\n{tool.latency_table(results["rows"])}\n' in page
    assert f'commit {results["commit"]}' in page


def test_every_published_backbone_is_a_row():
    ours = [detector for detector in tool.DETECTORS.values() if detector.family]
    assert [[row.box_ap] for row in ours] == [list(v) for v in RETINANET_1X.results.values()]
    assert {row.family for row in ours} == set(tool.COLORS)
    assert all(row.config.is_file() for row in tool.DETECTORS.values())


def test_resnet_has_the_result_of_its_metafile():
    path = Path(mmdet.__file__).parent / '.mim/configs/retinanet/metafile.yml'
    (other,) = (each for each in COMPARED if each.backbone == 'ResNet-50')
    (model,) = (
        model
        for model in yaml.safe_load(path.read_text())['Models']
        if model['Config'] == f'configs/{other.config}'
    )
    assert model['Results'][0]['Metrics']['box AP'] == other.box_ap


@pytest.mark.parametrize(
    'arguments, complaint',
    [
        ('--models retinanet_r50', "unknown model 'retinanet_r50'; one of retinanet_cpvt_s, "),
        ('--rounds 0', '--rounds must be at least 1'),
        ('--size 31', '--size must be at least 32, got 31'),
    ],
)
def test_mistakes(arguments, complaint, capsys, tmp_path):
    out = tmp_path / 'out'
    assert tool.main([*arguments.split(), '--out', str(out)]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count('\n') == 1
    assert not out.exists()
