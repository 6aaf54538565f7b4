import torch
from support import ROOT, load_tool

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.flops import Counter

get_flops = load_tool('get_flops')


def test_a_detector():
    config = str(ROOT / 'configs/retinanet_cpvt_s.py')
    rows = {row.name: row for row in get_flops.count(config, (64, 96), depth=2)}
    parts = [rows[name].flops for name in ('backbone', 'neck', 'bbox_head')]
    assert min(parts) > 0 and sum(parts) == rows['model'].flops
    backbone = CPVTPyramid('pcpvt_small').to('meta')
    with Counter() as counter:
        backbone(torch.empty(1, 3, 64, 96, device='meta'))
    assert rows['backbone'].flops == counter.total
    assert rows['backbone'].parameters == sum(p.numel() for p in backbone.parameters())
    assert rows['bbox_head.cls_convs'].flops > 0


def test_a_model_of_mm_itself(fcn, capsys):
    assert get_flops.main([str(fcn), '--size', '64', '64', '--depth', '1']) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ['parameters', 'GFLOPs', 'share']
    assert 'ResNetV1c' in out and 'FCNHead' in out and '100.0%' in out
    for options, complaint in (
        (['--size', '0', '5'], '--size must be at least 1 1, got 0 5'),
        (['--depth', '-1'], '--depth must be at least 0, got -1'),
    ):
        assert get_flops.main([str(fcn), *options]) == 2
        assert capsys.readouterr().err == f'cpvt get-flops: {complaint}\n'
