"""speed.py and the files that it is made of, and busy.py."""

import functools
import itertools
import json
import os
from pathlib import Path

import matplotlib.image
import pytest
import torch
from support import ROOT
from torch import nn

from benchmarks import busy, contestants, machine, measuring
from benchmarks import speed as tool
from benchmarks.models import ports
from cpvt_pyramid import Arch, CPVTPyramid
from cpvt_pyramid.export import onnx_file

RETINANET = str(ROOT / 'configs/demo/pages_retinanet_cpvt_nano.py')
SEMANTIC_FPN = str(ROOT / 'configs/demo/pages_semantic_fpn_cpvt_nano.py')


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of a machine, where they do not matter."""
    monkeypatch.setattr(tool, 'machine_rates', lambda *_: {'square, torch': 100.0, 'copy': 10})


@pytest.fixture
def one_block_each(monkeypatch: pytest.MonkeyPatch) -> None:
    shallow = tool.ARCHS['pcpvt_nano']._replace(depths=(1, 1, 1, 1))
    monkeypatch.setitem(tool.ARCHS, 'pcpvt_nano', shallow)


def rows_of(path: Path, **options) -> list[dict]:
    """The rows of a round, by default of a small backbone."""
    settings = dict(arch='' if 'config' in options else 'pcpvt_nano', rounds=1, no_memory=True)
    tool.speed(json=str(path / 'speed.json'), **settings | options)
    return json.loads((path / 'speed.json').read_text())['rows']


def test_rows_and_picture(one_block_each, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, 'machine_rates', functools.cache(tool.machine_rates))
    monkeypatch.setattr(machine, 'least_seconds', lambda step: measuring.elapsed(step, 'cpu'))
    picture, steps = tmp_path / 'speed.png', ['forward', 'train']
    rows = rows_of(
        tmp_path, sizes=['32', '50x70'], steps=steps, rounds=2, plain=True, plot=str(picture)
    )
    results = json.loads((tmp_path / 'speed.json').read_text())
    assert set(results) == {'machine', 'options', 'rates', 'rows'}
    assert all(rate > 0 for rate in results['rates']['float32'].values())
    names = ['ours', 'ours_plain', 'timm', 'mmseg']
    assert [row['model'] for row in rows] == names * 4
    for row in rows:
        assert len(row['rounds_ms']) == 2 and row['ms'] > 0 and row['floor_ms'] > 0
        low, high = row['ratio_spread']
        assert 0 < low <= high
        if row['model'] == 'ours':
            assert row['ratio'] == low == high == 1
        elif row['height'] == 32 or row['model'] == 'ours_plain':
            assert row['difference'] < measuring.TOLERANCE
        else:  # libraries may differ
            assert 'difference' in row
    assert 2.9 < rows[8]['gflops'] / rows[0]['gflops'] <= 3  # training and forward
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 800 and pixels[..., :3].std() > 0.05


def test_least_seconds_are_those_of_the_fastest_call():
    durations = itertools.cycle([0.3, 0.1, 0.2])
    now = 0.0

    def function() -> None:
        nonlocal now
        now += next(durations)

    assert measuring.least_seconds(function, lambda: now) == pytest.approx(0.1)


def test_floor_is_of_the_highest_rates_so_far(tmp_path, monkeypatch):
    rates = iter([{'torch': 1, 'copy': 4}, {'torch': 3, 'copy': 2}, {'torch': 2, 'copy': 5}])
    monkeypatch.setattr(tool, 'machine_rates', lambda *_: next(rates))
    first, second = rows_of(tmp_path, models=['ours'], sizes=['32', '64'])
    for row, best in ((first, {'torch': 3, 'copy': 4}), (second, {'torch': 3, 'copy': 5})):
        assert row['floor_ms'] == 1e3 * machine.floor(row, best)


def test_compiled_models_follow_their_own(rates, one_block_each, monkeypatch, tmp_path):
    """In training there is a graph for each size, and one to compare the maps."""
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))
    torch._dynamo.reset()
    options = dict(models=['ours'], sizes=['96x128', '128x160'], steps=['train'], compile=True)
    rows = rows_of(tmp_path, **options)
    assert [row['model'] for row in rows] == ['ours', 'ours_compiled'] * 2
    assert all(row['gflops'] > 0 for row in rows)
    assert all(row.get('difference', 0) < measuring.TOLERANCE for row in rows)
    assert [(row['graphs'], row['graph_breaks']) for row in rows[1::2]] == [(2, 0)] * 2
    assert 'graphs' not in rows[0]


def test_runtimes_follow_their_models(rates, monkeypatch, tmp_path, capsys):
    """Each is compared with its own model: maps of timm's are smaller than ours."""
    suffixes = [f'_{runtime}' for runtime in tool.RUNTIMES]
    monkeypatch.setattr(
        contestants, 'in_runtimes', lambda name, model: ((name + x, model) for x in suffixes)
    )
    options = dict(runtimes=True, dtypes=['float32', 'bfloat16'])
    rows = rows_of(tmp_path, models=['ours', 'timm'], sizes=['50x70'], **options)
    names = [name + suffix for name in ('ours', 'timm') for suffix in ('', *suffixes)]
    assert [row['model'] for row in rows] == [*names, 'ours', 'timm']
    assert [row['difference'] for row in rows if '_' in row['model']] == [0] * 6
    assert rows[4]['difference'] is None and all(row['cpu_ms'] > 0 for row in rows)
    assert ' cpu ms ' in capsys.readouterr().out


@pytest.mark.parametrize('name', ['ours', 'timm'])
def test_runtimes_give_the_maps_of_pytorch(name, monkeypatch):
    """With windows, which timm's exports need help with. The graph of ours is captured for one
    size, which is quick; all sizes are tested elsewhere."""
    capture = onnx_file.capture
    monkeypatch.setattr(
        onnx_file, 'capture', lambda model, has_valid: capture(model, has_valid, (40, 56))
    )
    arch = Arch((16,), (2,), (2,), (1,), sr_ratios=(8,), window=7)
    model = ports.build(name, arch) if name == 'timm' else CPVTPyramid(arch, out_indices=(0,))
    model, image = ports.randomize(model).eval(), torch.randn(1, 3, 40, 56)
    with torch.inference_mode():
        (expected,) = model(image)
        for runtime, found in contestants.in_runtimes(name, model):
            tolerance = 0.1 if runtime.endswith('bf16') else 1e-4
            torch.testing.assert_close(found(image)[0], expected, rtol=0, atol=tolerance)


def test_maps_are_equal_only_because_the_weights_are():
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        ours, theirs = (m(image) for m in tool.build_all(['ours', 'mmdet'], 'pvt_tiny').values())
        assert measuring.difference(ours, theirs) < measuring.TOLERANCE
        assert measuring.difference(ours, contestants.build('mmdet', 'pvt_tiny')(image)) > 0.1


def test_memory_of_a_process():
    """A step takes more memory than its image, and less than everything."""
    case = tool.Case('train', 'float32', 64, 64, 2, 'cpu')
    image = case.image().nbytes / measuring.MIB
    assert image < measuring.peak_memory('ours', 'pcpvt_nano', case, None, None) < 1000


def test_failures_are_rows_and_an_interrupt_keeps_finished_results(
    rates, monkeypatch, capsys, tmp_path
):
    def peak_memory(name, arch, case, *_):
        if case.height == 64:
            raise KeyboardInterrupt
        if name == 'timm':
            raise MemoryError('too large')
        return 7.0

    monkeypatch.setattr(measuring, 'peak_memory', peak_memory)
    monkeypatch.chdir(tmp_path)
    options = '--arch pcpvt_nano --models ours timm --sizes 32 64 --rounds 1'
    assert tool.main([*options.split(), '--json', 'a.json', '--plot', 'a.png']) == 130
    out, err = capsys.readouterr()
    assert 'too large' in out and 'interrupted' in err and Path('a.png').exists()
    ours, timm = json.loads(Path('a.json').read_text())['rows']
    assert ours['peak_mib'] == 7 and 'ms' in ours
    assert timm['failed'] == 'too large' and 'ms' not in timm


@pytest.mark.parametrize('config', [RETINANET, SEMANTIC_FPN])
def test_models_of_configs(config, rates, capsys, tmp_path):
    """The libraries' outputs agree, and so do their losses, which depend on the backbone."""
    names = ['ours', 'mmseg']
    options = dict(models=names, sizes=['64x96'], steps=['forward', 'train'], batch=2)
    rows = rows_of(tmp_path, config=config, **options)
    assert [row['model'] for row in rows] == names * 2 and rows[0]['gflops'] > 0
    for row in rows:
        assert row['config'] == config and row['ms'] > 0
        assert row.get('difference', 0) < measuring.TOLERANCE
    assert f'{Path(config).stem}, train' in capsys.readouterr().out

    models = tool.build_all(names, 'pcpvt_nano', config)
    case = tool.Case('train', 'float32', 64, 64, 2, 'cpu', config)
    image, losses = case.image(), []
    for model in models.values():
        for module in case.prepared(model).modules():
            if isinstance(module, nn.Dropout2d):  # of the segmentor's head
                module.p = 0
        losses.append(measuring.loss(model, image))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)
    with torch.no_grad():
        for p in model.model.backbone.parameters():
            p *= 1.5
        assert abs(measuring.loss(model, image) / losses[0] - 1) > 1e-3


def test_waiting_on_busy_cores(monkeypatch, capsys):
    calls, started = [], []

    def in_process(function, *arguments, environment):
        calls.append((environment, len(started)))
        return function(*arguments)

    start = busy.subprocess.Popen
    record = lambda *a, **k: started.append(start(*a, **k)) or started[-1]  # noqa: E731
    monkeypatch.setattr(busy.subprocess, 'Popen', record)
    monkeypatch.setattr(busy, 'in_process', in_process)
    monkeypatch.setenv('GOMP_SPINCOUNT', '7')
    options = '--arch pcpvt_nano --size 32 --rounds 2 --threads 1'
    assert busy.main(options.split()) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[0] for row in rows] == list(busy.WAITS) and rows[0][3] == '1.00'
    assert min(float(cell) for row in rows for cell in row[1:4]) > 0
    cores = os.cpu_count()
    assert [n for _, n in calls] == [0, cores, cores, 2 * cores, 2 * cores, 3 * cores]
    counts = [environment.get('GOMP_SPINCOUNT') for environment, _ in calls]
    assert counts == [None, None, '10000', '10000', '300000', '300000']
    assert all(process.poll() is not None for process in started)
    assert busy.main(['--rounds', '0']) == 2 and 'at least 1' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('arguments', 'complaint'),
    [
        (f'--config {RETINANET} --arch pcpvt_nano', '--config determines the architecture'),
        (f'--config {RETINANET} --models ours resnet50', 'as --models, not resnet50'),
        ('--runtimes --steps train', '--runtimes measures float32 forward passes'),
        ('--config fcn.py', 'fcn.py: the backbone must be CPVTPyramid, got ResNetV1c'),
        ('--arch pcpvt_tiny', "unknown arch 'pcpvt_tiny'; one of pcpvt_nano"),
        ('--arch svt_small --models ours mmdet', 'mmdet has no svt_small'),
        ('--sizes 31', 'of at least 32 pixels, got 31'),
        ('--device cuda:99', 'no device cuda:99'),
        ('--json there.json', 'there.json already exists'),
        ('--plot nowhere/a.png', 'no such directory'),
    ],
)
def test_mistakes(arguments, complaint, capsys, tmp_path, monkeypatch, fcn):
    monkeypatch.chdir(tmp_path)
    Path('there.json').touch()
    monkeypatch.setattr(tool, 'machine_rates', lambda *_: pytest.fail('begun'))
    assert tool.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith('speed: ') and complaint in error and error.count('\n') == 1
