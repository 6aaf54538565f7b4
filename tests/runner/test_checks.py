"""Data, heads and weights that do not fit together give one line before a run starts."""

import json
import os
from pathlib import Path

import pytest
import torch
from foreign import of_mmseg, of_timm
from mmdet.models import FCNMaskHead
from support import load_tool

from cpvt_pyramid.runner.config import check as checks
from cpvt_pyramid.runner.config.load import load_config
from cpvt_pyramid.runner.models import build_model
from cpvt_pyramid.runner.tool_runner import ToolRunner
from cpvt_pyramid.tooling.command import UserError

TOOLS = {name: load_tool(name) for name in ('train', 'test', 'infer')}


class Began(Exception):
    """Raised instead of a training or an evaluation."""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> list:
    """The runner that is about to train or to test."""
    runners = []

    def begin(self: ToolRunner) -> None:
        runners.append(self)
        raise Began

    monkeypatch.setattr(ToolRunner, 'train', begin)
    monkeypatch.setattr(ToolRunner, 'test', begin)
    return runners


@pytest.fixture
def files(configs: dict[str, Path], sample_dataset: Path) -> dict[str, str]:
    """The files that the commands below name."""
    nano = of_timm('pcpvt_nano').state_dict()
    model = build_model(load_config(configs['detector']), 'cpu').state_dict()
    for name, tensors in {
        'nano.pth': nano,
        'svt.pth': of_timm('svt').state_dict(),
        'resnet.pth': {'conv1.weight': torch.ones(2, 2)},
        'detector.pth': model,
        'mmseg.pth': {
            **{k: v for k, v in model.items() if not k.startswith('backbone.')},
            **{f'backbone.{k}': v for k, v in of_mmseg('pcpvt_nano').state_dict().items()},
        },
        'classes.pth': model
        | {f'bbox_head.retina_cls.{k}': torch.ones(27, 16, 3, 3) for k in ('weight', 'bias')},
        'svt_detector.pth': {f'backbone.{k}': v for k, v in of_timm('svt').state_dict().items()},
    }.items():
        torch.save({'state_dict': tensors}, name)
    Path('torn.pth').write_bytes(Path('nano.pth').read_bytes())
    os.truncate('torn.pth', 100_000)

    annotations = sample_dataset / 'coco/annotations/instances_train2017.json'
    coco = json.loads(annotations.read_text())
    coco['categories'].reverse()
    Path('reversed.json').write_text(json.dumps(coco))
    return {'DETECTOR.py': str(configs['detector']), 'SEGMENTOR.py': str(configs['segmentor'])}


INIT = 'model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint='
MISTAKES = [
    *(
        ('train', 'DETECTOR.py', options, complaint)
        for options, complaint in (
            (f'{INIT}svt.pth', 'svt.pth: the checkpoint is of another arch'),
            (f'{INIT}resnet.pth', 'resnet.pth: the checkpoint has no tensor of'),
            (f'{INIT}torn.pth', 'torn.pth is not a complete checkpoint'),
            ('load_from=svt.pth', 'svt.pth: the checkpoint is of another arch'),
            ('load_from=svt_detector.pth', 'svt_detector.pth: the checkpoint is of'),
            ('load_from=torn.pth', 'torn.pth is not a complete checkpoint'),
            ('model.bbox_head.num_classes=80',
             'model.bbox_head has 80 classes but the train data have 10: set '
             'model.bbox_head.num_classes=10, or change the classes of the data'),
            ('train_dataloader.dataset.metainfo.classes=a,b,two,three,four,five,six,seven,eight,nine',
             'DATA/annotations/instances_train2017.json must have the classes of the train data in '
             'their order, a, b, two, three, four, five and 4 more; it has zero, one'),
            ('train_dataloader.dataset.ann_file=REVERSED',
             'REVERSED must have the classes of the train data in their order, zero, one'),
        )
    ),
    ('train', 'SEGMENTOR.py', 'model.decode_head.num_classes=150',
     'model.decode_head has 150 classes but the train data have 11'),
    *(
        (tool, command, options, f'model.backbone (CPVTPyramid): {complaint}')
        for tool, command in (
            ('train', 'DETECTOR.py'),
            ('test', 'DETECTOR.py detector.pth'),
            ('infer', 'DETECTOR.py detector.pth nano.pth'),
        )
        for options, complaint in (
            ('model.backbone.arch=pcpvt_smal', "unknown arch 'pcpvt_smal'; one of pcpvt_nano, "),
            ('model.backbone.position=none model.backbone.peg.after=0',
             "peg={'after': 0} needs a position with a PEG"),
        )
    ),
    ('test', 'DETECTOR.py classes.pth', 'randomness.seed=1', 'classes.pth does not fit the model'),
    ('infer', 'DETECTOR.py classes.pth nano.pth', 'randomness.seed=1', 'classes.pth does not fit'),
]  # fmt: skip


@pytest.mark.parametrize('tool, command, options, complaint', MISTAKES)
def test_mistakes(tool, command, options, complaint, files, sample_dataset, runner, capsys):
    files |= {'REVERSED': os.path.abspath('reversed.json'), 'DATA': f'{sample_dataset}/coco'}
    for name, path in files.items():
        command, options, complaint = (
            text.replace(name, path) for text in (command, options, complaint)
        )
    assert TOOLS[tool].main([*command.split(), '--cfg-options', *options.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f'{tool}: {complaint}') and errors.count('\n') == 1
    assert not runner


@pytest.mark.parametrize('load_from', ['nano.pth', 'mmseg.pth', 'classes.pth', 'detector.pth'])
def test_load_from(load_from, files, runner, capsys):
    """A backbone, a detector with mmseg's backbone, and one with other classes."""
    with pytest.raises(Began):
        TOOLS['train'].main([files['DETECTOR.py'], '--cfg-options', f'load_from={load_from}'])
    (began,) = runner
    model = began.model
    (log,) = Path('work_dirs').rglob('*.log')
    if load_from == 'nano.pth':
        model.backbone.init_weights()
        for name, value in torch.load('nano.pth')['state_dict'].items():
            if name in model.backbone.state_dict():
                assert torch.equal(value, model.backbone.state_dict()[name])
        assert 'nano.pth holds only a backbone: loading it into' in log.read_text()
        return
    began.load_or_resume()
    saved, state = torch.load(load_from)['state_dict'], model.state_dict()
    assert torch.equal(saved['neck.fpn_convs.0.conv.weight'], state['neck.fpn_convs.0.conv.weight'])
    bias = {'mmseg.pth': 'position_encodings.2.proj.bias'}.get(load_from, 'pos_block.2.proj.0.bias')
    assert torch.equal(saved[f'backbone.{bias}'], state['backbone.pos_block.2.proj.0.bias'])
    said = capsys.readouterr().out  # by mmengine
    assert ('size mismatch for bbox_head.retina_cls' in said) == (load_from == 'classes.pth')


def test_a_class_agnostic_mask_head_may_have_any_number_of_classes():
    def detector(class_agnostic: bool) -> torch.nn.Module:
        head = FCNMaskHead(1, 8, 8, 8, num_classes=80, class_agnostic=class_agnostic)
        return torch.nn.ModuleDict({'roi_head': torch.nn.ModuleDict({'mask_head': head})})

    checks.check_head_classes(detector(True), 10, 'train')
    with pytest.raises(UserError, match='model.roi_head.mask_head has 80 classes but the train'):
        checks.check_head_classes(detector(False), 10, 'train')


def test_the_class_check_can_be_left_out_and_custom_keys_are_checked(files, runner, capsys):
    command = [files['DETECTOR.py'], '--cfg-options', 'model.bbox_head.num_classes=80']
    assert TOOLS['train'].main(command) == 2
    assert capsys.readouterr().err.endswith('If both are right, set check_classes=False\n')
    key = 'optim_wrapper.paramwise_cfg.custom_keys.absolute_pos_embed.decay_mult=0'
    with pytest.raises(Began):
        TOOLS['train'].main([*command, 'check_classes=False', key])
    assert 'warning: no parameter has a name with these custom_keys' in capsys.readouterr().out
