"""Errors of the user: one line, and exit status 2."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from support import ROOT, load_tool

from cpvt_pyramid.runner.config.check import check_data
from cpvt_pyramid.tooling.command import UserError

TOOLS = {name: load_tool(name) for name in ('train', 'test', 'infer')}
SET = 'DETECTOR.py --cfg-options'


@pytest.fixture
def mistaken(untrained: dict[str, list[str]]) -> Callable[[str], str]:
    """Replaces names in a command by the paths of valid and invalid files."""
    Path('syntax.py').write_text('model = dict(\n')
    Path('part.py').write_text('data_root = "/"\n')
    Path('empty').mkdir()
    names = {}
    for name, (config, checkpoint) in untrained.items():
        names |= {f'{name.upper()}.py': config, f'{name.upper()}.pth': checkpoint}
        names['USED'] = str(Path(checkpoint).parent)
    Path('torn.pth').write_bytes(Path(names['DETECTOR.pth']).read_bytes()[:100_000])
    training = {'meta': {'seed': 3}, 'optimizer': {}}
    torch.save(torch.load(names['SEGMENTOR.pth']) | training, 'training.pth')

    def fill_in(text: str) -> str:
        for name, path in names.items():
            text = text.replace(name, path)
        return text

    return fill_in


@pytest.mark.parametrize(
    'tool, command, complaint',
    [
        ('train', 'nowhere.py', 'no config at nowhere.py'),
        ('train', 'syntax.py', 'config syntax.py: SyntaxError: '),
        ('train', 'part.py', 'part.py has no model'),
        ('train', f'{SET} default_scope=mmrotate', 'DETECTOR.py must set default_scope to mmdet'),
        ('train', f'{SET} load_from=x.pth', 'no checkpoint at x.pth'),
        ('train', f'{SET} model.backbone.init_cfg.type=Pretrained '
         'model.backbone.init_cfg.checkpoint=x.pth', 'no checkpoint at x.pth'),
        ('train', 'DETECTOR.py --launcher pytorch', '--launcher pytorch is for processes started'),
        ('train', f'{SET} a', "--cfg-options takes key=value, not 'a'"),
        ('train', f'{SET} =1', "--cfg-options : no setting has the name ''"),
        ('train', f'{SET} trian_cfg.max_epochs=1', '--cfg-options trian_cfg.max_epochs: no setting '
         "has the name 'trian_cfg'; did you mean 'train_cfg'?"),
        ('train', f'{SET} train_dataloader.dataset.data_root=x', 'no train data at'),
        ('train', f'{SET} val_evaluator.ann_file=x', 'no annotations at '),
        ('train', 'DETECTOR.py --work-dir syntax.py/x', 'cannot create the folder syntax.py/x: '),
        ('train', 'DETECTOR.py --work-dir USED', 'USED already has checkpoints of a training'),
        ('train', 'DETECTOR.py --resume nowhere.pth', 'no checkpoint at nowhere.pth'),
        ('train', 'DETECTOR.py --resume torn.pth', 'torn.pth is not a complete checkpoint'),
        ('train', 'DETECTOR.py --resume training.pth', 'training.pth does not fit the model'),
        ('train', f'{SET} auto_scale_lr.enable=1 auto_scale_lr.base_batch_size=-1',
         'auto_scale_lr.enable needs auto_scale_lr.base_batch_size in the config'),
        ('train', f'{SET} optim_wrapper.type=ApexOptimWrapper --amp', '--amp needs an Optim'),
        ('train', f'{SET} activation_checkpointing=backbone --amp', 'model.backbone (CPVTPyramid): '
         'activation_checkpointing of the whole backbone would leave it without gradients'),
        ('test', 'DETECTOR.py nowhere.pth', 'no checkpoint at nowhere.pth'),
        ('test', 'DETECTOR.py torn.pth', 'torn.pth is not a complete checkpoint'),
        ('test', 'SEGMENTOR.py DETECTOR.pth', 'DETECTOR.pth does not fit the model'),
        ('test', 'DETECTOR.py DETECTOR.pth --out all.json', '--out must end in .pkl or .pickle'),
        ('infer', 'DETECTOR.py nowhere.pth syntax.py', 'no checkpoint at nowhere.pth'),
        ('infer', 'DETECTOR.py DETECTOR.pth nowhere.jpg', 'no image or folder at nowhere.jpg'),
        ('infer', 'DETECTOR.py DETECTOR.pth empty', 'no images or videos in the folder empty'),
        ('infer', 'DETECTOR.py DETECTOR.pth *.jpg', 'no files match *.jpg'),
        ('infer', 'DETECTOR.py DETECTOR.pth empty --batch-size 0',
         '--batch-size must be at least 1, got 0'),
        ('infer', 'DETECTOR.py DETECTOR.pth empty --gpu-memory 1G',
         '--overlap and --gpu-memory need --tile'),
        ('infer', 'DETECTOR.py DETECTOR.pth empty --tile 100',
         'tile and overlap must be multiples of 32'),
        ('infer', 'DETECTOR.py DETECTOR.pth empty --tile 64 --memory much',
         "--memory must be a size such as 2GiB, got 'much'"),
        ('infer', 'DETECTOR.py DETECTOR.pth syntax.py --device gpu', 'no device gpu: '),
        ('infer', 'SEGMENTOR.py DETECTOR.pth syntax.py', 'DETECTOR.pth does not fit the model'),
    ],
)  # fmt: skip
def test_mistakes(tool, command, complaint, mistaken, capsys):
    assert TOOLS[tool].main(mistaken(command).split()) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f'{tool}: {mistaken(complaint)}') and errors.count('\n') == 1


def test_missing_data_names_the_path_and_the_layout(monkeypatch, capsys):
    config = ROOT / 'configs/retinanet_cpvt_s.py'
    monkeypatch.setenv('COCO_ROOT', '/nowhere/data/coco')
    assert TOOLS['train'].main([str(config)]) == 2
    assert capsys.readouterr().err == (
        'train: no train data at /nowhere/data/coco/annotations/instances_train2017.json. '
        'Expected in /nowhere/data/coco: annotations/instances_train2017.json, train2017/, '
        'annotations/instances_val2017.json, val2017/. '
        'If it is elsewhere: COCO_ROOT=/path/to/coco\n'
    )
    assert not Path('work_dirs').exists()


def test_data_sets_are_found_inside_their_wrappers(tmp_path):
    (tmp_path / 'a').mkdir()
    inner = [dict(data_root=str(tmp_path), data_prefix=dict(img=name)) for name in ('a', 'b')]
    wrapped = dict(type='RepeatDataset', dataset=dict(type='ConcatDataset', datasets=inner))
    cfg = Config({'train_dataloader': {'dataset': wrapped}})
    with pytest.raises(UserError, match=f'no train data at {tmp_path}/b. Expected'):
        check_data(cfg, 'train')
    check_data(cfg, 'val')
    (tmp_path / 'b').mkdir()
    check_data(cfg, 'train')
