"""The benchmark on tiny images, the counting behind it, and the FLOPs of configs."""

import functools
import json
from pathlib import Path

import matplotlib.image
import pytest
import torch
import torch.nn.functional as F
from support import ROOT, load_tool
from torch import nn
from torchvision.models import resnet50

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.flops import Counter

benchmark, get_flops = load_tool('benchmarks/speed'), load_tool('get_flops')


# Counting


@pytest.mark.parametrize(
    ('build', 'published'),
    [
        (lambda: CPVTPyramid('pcpvt_small'), 3.8),
        (lambda: CPVTPyramid('svt_small'), 2.9),
        (resnet50, 4.1),
    ],
    ids=['pcpvt_small', 'svt_small', 'resnet50'],
)
def test_published_flops(build, published):
    model = build().to('meta')
    with Counter() as counter:
        model(torch.empty(1, 3, 224, 224, device='meta'))
    assert counter.total / 1e9 == pytest.approx(published, abs=0.05)
    assert counter.by_module[type(model).__name__] == counter.total


@pytest.mark.parametrize('device', ['meta', 'cpu'])
@pytest.mark.parametrize('grad', [True, False])
def test_fused_attention_counts(device, grad):
    q, k = torch.randn(2, 3, 50, 8, device=device), torch.randn(2, 3, 20, 8, device=device)
    with Counter() as counter, torch.inference_mode(not grad):
        F.scaled_dot_product_attention(q, k, k)
    assert counter.total == 2 * (2 * 3 * 50 * 20 * 8)


def test_backward_pass_counts_twice():
    """Once for the gradient of the input, once for that of the weight; depthwise ones, too."""
    for layer in (nn.Linear(8, 8), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 3)):
        x = torch.randn(1, 8, 8, 8, requires_grad=True)
        with Counter() as forward:
            layer(x)
        with Counter() as both:
            layer(x).sum().backward()
        assert both.total == 3 * forward.total > 0
        assert both.by_module == forward.by_module


def test_bytes_of_a_layer():
    with Counter() as counter, torch.inference_mode():
        nn.Linear(8, 16)(torch.randn(2, 5, 8))
    assert counter.bytes == 4 * (10 * 8 + 8 * 16 + 16 + 10 * 16)


def test_modules_count_though_only_their_parts_are_called():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 6)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    with Counter() as counter:
        Model()(torch.randn(3, 4))
    assert counter.by_module == {
        'Model': 3 * 40, 'Model.layers': 3 * 40, 'Model.layers.0': 3 * 16, 'Model.layers.1': 3 * 24
    }  # fmt: skip


# The benchmark


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    """Files and output of one run, and what it returned."""
    folder = tmp_path_factory.mktemp('benchmark')
    results = benchmark.benchmark(
        arch='pcpvt_nano',
        sizes=[(64, 64), (50, 70)],
        steps=['forward', 'train'],
        rounds=2,
        memory=False,
        json_file=str(folder / 'speed.json'),
        plot=str(folder / 'speed.png'),
    )
    return folder, results


def test_rows(measured):
    folder, results = measured
    assert json.loads((folder / 'speed.json').read_text()) == json.loads(json.dumps(results))
    assert set(results) == {'machine', 'options', 'rates', 'rows'}
    assert all(rate > 0 for rate in results['rates']['float32'].values())
    assert [row['model'] for row in results['rows']] == ['ours', 'timm', 'mmseg'] * 4
    for row in results['rows']:
        assert len(row['rounds_ms']) == 2 and row['ms'] > 0 and row['floor_ms'] > 0
        low, high = row['ratio_spread']
        assert 0 < low <= high
        if row['model'] == 'ours':
            assert row['ratio'] == low == high == 1
        elif row['height'] == 64:
            assert row['difference'] < benchmark.TOLERANCE
        else:  # libraries may differ
            assert 'difference' in row
    train, forward = results['rows'][6], results['rows'][0]
    assert 2.9 < train['gflops'] / forward['gflops'] <= 3


def test_picture(measured):
    picture = matplotlib.image.imread(measured[0] / 'speed.png')
    assert picture.shape[0] > 300 and picture.shape[1] > 800
    assert picture[..., :3].std() > 0.05


def test_compiled_models_stand_behind_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))
    torch._dynamo.reset()
    rows = benchmark.benchmark(
        models=['ours', 'timm'],
        arch='pcpvt_nano',
        sizes=[(96, 128), (128, 160)],
        rounds=1,
        memory=False,
        with_compile=True,
        plot=str(tmp_path / 'speed.png'),
    )['rows']
    assert [row['model'] for row in rows] == ['ours', 'ours_compiled', 'timm', 'timm_compiled'] * 2
    for i, row in enumerate(rows):
        assert row['gflops'] > 0 and row.get('difference', 0) < benchmark.TOLERANCE
        if row['model'].endswith('compiled'):
            assert (row['graphs'], row['graph_breaks']) == (1 if i < 4 else 0, 0)
        else:
            assert 'graphs' not in row


def test_other_weights_differ():
    """What compares as equal does so because of the weights."""
    ours = benchmark.build_all(['ours'], 'pcpvt_nano')['ours']
    theirs = benchmark.build_all(['timm'], 'pcpvt_nano')['timm']
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert benchmark.difference(ours(image), theirs(image)) > 0.1


@pytest.mark.parametrize('name', benchmark.OTHERS)
def test_others_make_four_maps(name):
    maps = benchmark.build(name, 'pcpvt_nano')(torch.randn(1, 3, 64, 64))
    assert len(maps) == 4


def test_pvt_of_mmdet():
    models = benchmark.build_all(['ours', 'mmdet'], 'pvt_tiny')
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        ours, theirs = (model(image) for model in models.values())
    assert benchmark.difference(ours, theirs) < benchmark.TOLERANCE


def test_memory_of_a_process():
    """Of 32 MiB images, the step takes several times as much, and less than all there is."""
    case = benchmark.Case('forward', 'float32', 512, 512, 2, 'cpu')
    image = case.image().nbytes / benchmark.MIB
    peak = benchmark.peak_memory('ours', 'pcpvt_nano', case, None, None)
    assert image < peak < 100 * image


def test_a_model_that_fails_is_a_row(monkeypatch, capsys):
    def fails(name, *_):
        if name == 'timm':
            raise MemoryError('too large')
        return 7.0

    monkeypatch.setattr(benchmark, 'peak_memory', fails)
    monkeypatch.setattr(benchmark, 'machine_rates', lambda *_: {'square, torch': 100.0, 'copy': 10})
    rows = benchmark.benchmark(['ours', 'timm'], 'pcpvt_nano', [(64, 64)], rounds=1)['rows']
    assert rows[0]['peak_mib'] == 7 and 'ms' in rows[0]
    assert rows[1]['failed'] == 'too large' and 'ms' not in rows[1]
    assert 'too large' in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_is_done(monkeypatch, capsys, tmp_path):
    rows = [{'model': 'ours', 'height': 64, 'width': 64, 'batch': 1, 'ms': 3.0}]
    rows[0] |= dict(step='forward', dtype='float32', ratio=1.0, ratio_spread=(1.0, 1.0))
    rows[0] |= dict(gflops=1.0, gbytes=1.0)
    measures = iter([rows])

    def measure(*_):
        for done in measures:
            return done
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, 'measure', measure)
    monkeypatch.setattr(benchmark, 'machine_rates', lambda *_: {'square, torch': 100.0, 'copy': 10})
    monkeypatch.chdir(tmp_path)
    arguments = '--arch pcpvt_nano --sizes 64 96 --json a.json --plot a.png'.split()
    assert benchmark.main(arguments) == 130
    captured = capsys.readouterr()
    assert '3.0' in captured.out and 'interrupted' in captured.err
    assert len(json.loads(Path('a.json').read_text())['rows']) == 1 and Path('a.png').exists()


# The models of configs

RETINANET = str(ROOT / 'configs/demo/retinanet_cpvt_nano.py')
SEMANTIC_FPN = str(ROOT / 'configs/demo/semantic_fpn_cpvt_nano.py')
RESNET = """
default_scope = 'mmseg'
model = dict(
    type='EncoderDecoder',
    backbone=dict(type='ResNetV1c', depth=50, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4)),
    decode_head=dict(type='FCNHead', in_channels=2048, in_index=3, channels=8, num_classes=3),
    test_cfg=dict(mode='whole'))
"""


@pytest.mark.parametrize('config', [RETINANET, SEMANTIC_FPN])
def test_models_of_configs(config, monkeypatch, capsys):
    """The libraries' outputs agree, and what the operators take adds to no more than all."""
    monkeypatch.setattr(benchmark, 'machine_rates', lambda *_: {'square, torch': 100.0, 'copy': 10})
    rows = benchmark.benchmark(
        config=config,
        models=['ours', 'mmseg'],
        sizes=[(64, 96)],
        steps=['forward', 'train'],
        batch=2,
        rounds=1,
        with_profile=True,
        memory=False,
    )['rows']
    assert [row['model'] for row in rows] == ['ours', 'mmseg'] * 2
    for row in rows:
        assert row['config'] == config and row['ms'] > 0
        assert row.get('difference', 0) < benchmark.TOLERANCE
        shares = list(row['profile'].values())
        assert 0 < len(shares) <= benchmark.OPERATORS and 0 < sum(shares) <= 1
        assert shares == sorted(shares, reverse=True)
    assert rows[0]['gflops'] > 0
    out = capsys.readouterr().out
    assert f'{Path(config).stem}, train' in out and f'{shares[0]:.0%}' in out


@pytest.mark.parametrize('config', [RETINANET, SEMANTIC_FPN])
def test_a_training_step_of_a_config(config):
    """The loss reaches the backbone, and depends on its weights, which both libraries share."""
    models = benchmark.build_all(['ours', 'mmseg'], 'pcpvt_nano', config)
    case = benchmark.Case('train', 'float32', 64, 64, 2, 'cpu', config)
    image, losses = case.image(), []
    for model in models.values():
        for module in case.prepared(model).modules():
            if isinstance(module, nn.Dropout2d):  # of the segmentor's head
                module.p = 0
        losses.append(benchmark.loss(model, image))
        losses[-1].backward()
        gradients = [p.grad for p in model.model.backbone.parameters()]
        assert sum(gradient is not None and bool(gradient.any()) for gradient in gradients) > 50
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)
    with torch.no_grad():
        for p in model.model.backbone.parameters():
            p *= 1.5
        assert abs(benchmark.loss(model, image) / losses[0] - 1) > 1e-3


def test_targets_with_masks():
    config = str(ROOT / 'configs/mask_rcnn_cpvt_s.py')
    model, out_indices = benchmark.build_whole(config)
    case = benchmark.Case('train', 'float32', 64, 96, 2, 'cpu', config)
    samples = benchmark.targets(benchmark.Whole(model, out_indices, nn.Identity()), case)
    assert len(samples) == 2 and tuple(out_indices) == (0, 1, 2, 3)
    for sample in samples:
        boxes, labels, masks = (sample.gt_instances[k] for k in ('bboxes', 'labels', 'masks'))
        assert (boxes[:, 2:] - boxes[:, :2]).min() > 6 and boxes.min() >= 0
        assert (boxes <= torch.tensor([96, 64, 96, 64])).all()
        assert 0 <= labels.min() <= labels.max() < 80 and labels.unique().numel() > 1
        found = masks.get_bboxes('hbox').tensor
        torch.testing.assert_close(found, boxes, rtol=0, atol=1)


def test_memory_of_a_config():
    case = benchmark.Case('train', 'float32', 64, 64, 2, 'cpu', RETINANET)
    assert 1 < benchmark.peak_memory('ours', 'pcpvt_nano', case, None, None) < 1000


@pytest.mark.parametrize(
    ('arguments', 'complaint'),
    [
        (f'--config {RETINANET} --arch pcpvt_nano', '--arch is what the backbone of --config'),
        (f'--config {RETINANET} --models ours resnet50', 'resnet50 is not for --config'),
        (f'--config {RETINANET} --models ours swin_tiny', 'swin_tiny is not for --config'),
        (f'--config {RETINANET} --compile', '--compile is for backbones alone'),
        ('--config no.py', 'no config at no.py'),
        ('--config fcn.py', 'fcn.py: its backbone is ResNetV1c, not CPVTPyramid'),
        ('--config sincos.py', 'sincos.py: its backbone sets position'),
        ('--arch pcpvt_tiny', "unknown arch 'pcpvt_tiny'; one of pcpvt_nano"),
        ('--arch svt_small --models ours mmdet', 'mmdet has no svt_small'),
        ('--sizes 16', 'of 32 pixels'),
        ('--rounds 0', '--rounds'),
        ('--device cuda:99', 'no device cuda:99'),
        ('--device gpu', 'no device gpu'),
        ('--json there.json', 'there.json is there already'),
        ('--plot nowhere/a.png', 'no such folder'),
    ],
)
def test_mistakes(arguments, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('there.json').touch()
    Path('fcn.py').write_text(RESNET)
    Path('sincos.py').write_text(f"""
_base_ = '{RETINANET}'
model = dict(backbone=dict(position='sincos'))
""")
    monkeypatch.setattr(benchmark, 'machine_rates', lambda *_: pytest.fail('begun'))
    assert benchmark.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith('benchmark: ') and complaint in error and error.count('\n') == 1


@pytest.mark.parametrize('arguments', ['--sizes wide', '--models yours', '--dtypes int8'])
def test_mistakes_that_argparse_sees(arguments, capsys):
    with pytest.raises(SystemExit, match='2'):
        benchmark.main(arguments.split())
    assert 'benchmark: error: argument' in capsys.readouterr().err


# FLOPs of configs


def test_get_flops_of_a_detector(capsys):
    config = str(ROOT / 'configs/retinanet_cpvt_s.py')
    rows = {row.name: row for row in get_flops.get_flops(config, (64, 96), depth=2)}
    parts = [rows[name].flops for name in ('backbone', 'neck', 'bbox_head')]
    assert min(parts) > 0 and sum(parts) == rows['model'].flops
    backbone = CPVTPyramid('pcpvt_small').to('meta')
    with Counter() as counter:
        backbone(torch.empty(1, 3, 64, 96, device='meta'))
    assert rows['backbone'].flops == counter.total
    assert rows['backbone'].parameters == sum(p.numel() for p in backbone.parameters())
    assert 'bbox_head.cls_convs' in capsys.readouterr().out


def test_get_flops_of_mms_own(tmp_path, capsys):
    (tmp_path / 'fcn.py').write_text(RESNET)
    assert get_flops.main([str(tmp_path / 'fcn.py'), '--size', '64', '64', '--depth', '1']) == 0
    out = capsys.readouterr().out
    assert 'ResNetV1c' in out and 'FCNHead' in out and '100.0%' in out


@pytest.mark.parametrize(
    ('arguments', 'complaint'),
    [
        (['no.py'], 'no config at no.py'),
        (['configs/retinanet_cpvt_s.py', '--size', '0', '5'], '--size 0 5'),
        (
            ['configs/retinanet_cpvt_s.py', '--cfg-options', 'model.backbone.arch=x'],
            "unknown arch 'x'",
        ),
    ],
)
def test_get_flops_mistakes(arguments, complaint, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert get_flops.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith('get_flops: ') and complaint in error and error.count('\n') == 1
