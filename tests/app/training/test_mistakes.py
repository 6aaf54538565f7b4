"""Mistakes of the user end in one line and exit status 2."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from foreign import of_mmseg, of_timm
from mmdet.models import FCNMaskHead
from mmengine.config import Config
from support import ROOT, load_tool

from cpvt_pyramid.app.config.check import check_data, check_head_classes
from cpvt_pyramid.app.config.load import import_custom, load_config
from cpvt_pyramid.app.config.parts import data_of
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.app.training.runner import CommandRunner

TOOLS = {name: load_tool(name) for name in ('train', 'test', 'infer')}
THERE = 'no checkpoint at USED/best_*.pth; USED has '
DETECTOR, SEGMENTOR = 'detector.py detector.pth', 'segmentor.py segmentor.pth'


@pytest.fixture(scope='module')
def files(
    untrained: dict[str, list[str]], sample_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """Replaces names in a text by the paths of valid and invalid files."""
    folder = tmp_path_factory.mktemp('files')
    paths = {Path(file).name: file for files in untrained.values() for file in files}
    paths['USED'] = str(Path(paths['detector.pth']).parent)
    model = torch.load(paths['detector.pth'])['state_dict']
    mmseg = {f'backbone.{k}': v for k, v in of_mmseg('pcpvt_nano').state_dict().items()}
    layer = {f'bbox_head.retina_cls.{k}': torch.ones(27, 16, 3, 3) for k in ('weight', 'bias')}
    for name, tensors in {
        'nano.pth': of_timm('pcpvt_nano').state_dict(),
        'svt.pth': of_timm('svt').state_dict(),
        'mmseg.pth': {k: v for k, v in model.items() if not k.startswith('backbone.')} | mmseg,
        'classes.pth': model | layer,
    }.items():
        torch.save({'state_dict': tensors}, folder / name)
    training = {'meta': {'seed': 3}, 'optimizer': {}}
    older = torch.load(paths['segmentor.pth']) | training
    torch.save(older, folder / 'older.pth')  # as of MMDetection 2
    torch.save(older | {'message_hub': {}}, folder / 'training.pth')
    (folder / 'torn.pth').write_bytes(Path(paths['detector.pth']).read_bytes()[:100_000])
    (folder / 'syntax.py').write_text('model = dict(\n')
    (folder / 'bom.py').write_text('\ufeffmodel = dict()\n', encoding='utf-8')
    (folder / 'part.py').write_text('data_root = "/"\n')
    coco = json.loads((sample_dataset / 'coco/annotations/instances_train2017.json').read_text())
    coco['categories'].reverse()
    (folder / 'reversed.json').write_text(json.dumps(coco))
    paths |= {path.name: str(path) for path in folder.iterdir()}
    paths['IMAGE'] = str(next(sample_dataset.rglob('*.jpg')))
    return lambda text: re.sub(r'[\w.]+', lambda name: paths.get(name[0], name[0]), text)


class Began(BaseException):
    """Raised instead of a training or an evaluation."""


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[CommandRunner]:
    """The runners that are about to train or to test."""
    runners = []

    def begin(self: CommandRunner) -> None:
        runners.append(self)
        raise Began

    monkeypatch.setattr(CommandRunner, 'train', begin)
    monkeypatch.setattr(CommandRunner, 'test', begin)
    return runners


SET = 'detector.py --cfg-options'
INIT = f'{SET} model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint'


@pytest.mark.parametrize(
    'tool, command, complaint',
    [
        # Configs and options
        ('train', 'nowhere.py', 'no config at nowhere.py'),
        ('train', 'syntax.py', 'config syntax.py: SyntaxError: '),
        ('train', 'part.py', 'part.py has no model'),
        ('train', f'{SET} default_scope=mmrotate', 'detector.py must set default_scope to mmdet'),
        (
            'train',
            f'{SET} custom_imports.imports=nothing.here',
            'custom_imports of detector.py: Fail',
        ),
        ('train', f'{SET} a', "--cfg-options takes key=value, not 'a'"),
        (
            'train',
            f'{SET} trian_cfg.max_epochs=1',
            "--cfg-options trian_cfg.max_epochs: 'trian_cfg' is no setting; did you mean train_cfg",
        ),
        (
            'train',
            f'{SET} data_root=x',
            "--cfg-options data_root: 'data_root' is no setting.",
        ),
        ('train', f'{SET} train_dataloader=None', 'the config must set train_dataloader'),
        (
            'infer',
            f'{DETECTOR} IMAGE --cfg-options test_dataloader=None',
            'the config must set test_d',
        ),
        (
            'train',
            f'{SET} optim_wrapper.type=ApexOptimWrapper --amp',
            '--amp needs an OptimWrapper',
        ),
        (
            'train',
            f'{SET} optim_wrapper.type=AmpOptimWrapper',
            'the AmpOptimWrapper of the config needs a GPU, and there is none; to train in bf',
        ),
        ('train', 'detector.py --launcher pytorch', '--launcher pytorch is for processes started'),
        ('test', f'{DETECTOR} --out all.json', '--out must end in .pkl or .pickle'),
        ('test', f'{DETECTOR} --report a.htm', '--report must end in .html, got a.htm'),
        (
            'train',
            f'{SET} optim_wrapper.constructor=LearningRateDecayOptimizerConstructor',
            'LearningRateDecayOptimizerConstructor does not know the layers of CPVTPyramid: set '
            "optim_wrapper.constructor='LayerDecayConstructor'",
        ),
        ('train', f'{SET} load_from=nano.pth', 'nano.pth holds only a backbone: instead of load_'),
        (
            'test',
            f'{DETECTOR} --tta --cfg-options tta_pipeline=None',
            '--tta needs tta_model and tta_pipeline in the config; mmdet has them for boxes',
        ),
        # Files
        ('train', f'{SET} load_from=x.pth', 'load_from: no checkpoint at x.pth'),
        (
            'train',
            f'{INIT}=None',
            'model.backbone.init_cfg.checkpoint must be a path or an address, got None',
        ),
        ('train', f'{SET} load_from=3', 'load_from must be a path or an address, got 3'),
        ('train', 'bom.py', 'bom.py must be UTF-8 without a byte order mark (BOM): save it so'),
        ('train', f'{SET} val_evaluator.ann_file=x', 'no annotations at '),
        (
            'train',
            'detector.py --work-dir syntax.py/x',
            'syntax.py/x must be a folder to write to, but syntax.py is a file',
        ),
        ('train', 'detector.py --work-dir USED', 'USED already has checkpoints of a training'),
        ('train', 'detector.py --resume=nowhere.pth', 'no checkpoint at nowhere.pth'),
        ('train', 'detector.py --resume=part.py', 'part.py is a text file; a checkpoint is a file'),
        ('test', 'detector.py IMAGE', 'IMAGE is an image; a checkpoint is a file'),
        ('train', 'detector.py --resume=torn.pth', 'torn.pth is not a complete checkpoint'),
        ('test', 'detector.py USED/best_*.pth', THERE),
        ('infer', 'detector.py USED/best_*.pth syntax.py', THERE),
        ('infer', 'USED/best_*.pth syntax.py', THERE),
        ('train', f'{SET} load_from=USED/best_*.pth', f'load_from: {THERE}'),
        ('train', 'detector.py --resume=USED/best_*.pth', THERE),
        ('test', 'detector.py torn.pth', 'torn.pth is not a complete checkpoint'),
        ('infer', 'detector.py nowhere.pth syntax.py', 'no checkpoint at nowhere.pth'),
        ('infer', f'{DETECTOR} nowhere.jpg', 'no image or folder at nowhere.jpg'),
        ('infer', f'{DETECTOR} x --batch-size 0', '--batch-size must be at least 1, got 0'),
        ('infer', f'{DETECTOR} IMAGE --tile 100', '--tile must be a multiple of 32, got 100'),
        ('infer', f'{DETECTOR} syntax.py --device gpu', 'no device gpu: '),
        # Weights and classes
        ('train', f'{INIT}=svt.pth', 'svt.pth: the checkpoint is of another arch'),
        ('train', f'{SET} load_from=svt.pth', 'svt.pth: the checkpoint is of another arch'),
        ('train', f'{SET} load_from=torn.pth', 'torn.pth is not a complete checkpoint'),
        ('train', 'detector.py --resume=training.pth', 'training.pth does not fit the model'),
        ('train', 'detector.py --resume=older.pth', 'older.pth must be of a training by MMEngine'),
        ('test', 'segmentor.py detector.pth', 'detector.pth does not fit the model'),
        ('infer', 'detector.py classes.pth IMAGE', 'classes.pth does not fit'),
        (
            'train',
            f'{SET} model.bbox_head.num_classes=80',
            'model.bbox_head has 80 classes but the train data have 10: set '
            'model.bbox_head.num_classes=10, or change the classes of the data. If both are '
            'right, set check_classes=False',
        ),
        (
            'train',
            'segmentor.py --cfg-options model.decode_head.num_classes=150',
            'model.decode_head has 150 classes but the train data have 11',
        ),
        (
            'train',
            f'{SET} train_dataloader.dataset.ann_file=reversed.json',
            'reversed.json must have the classes of the train data in their order, ant, bee',
        ),
        *(
            (
                tool,
                f'{command} --cfg-options model.backbone.arch=pcpvt_smal',
                "ValueError: unknown arch 'pcpvt_smal'; one of pcpvt_nano, ",
            )
            for tool, command in (
                ('train', 'detector.py'),
                ('test', DETECTOR),
                ('infer', f'{DETECTOR} IMAGE'),
            )
        ),
    ],
)
def test_before_a_run(tool, command, complaint, files, runners, capsys):
    assert TOOLS[tool].main(files(command).split()) == 2
    *notes, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f'cpvt {tool}: {files(complaint)}')
    assert all(f'cpvt {tool}: --cfg-options creates what' in note for note in notes)


SHORT = (
    'train_cfg.max_epochs=1',
    'train_dataloader.dataset.indices=2',
    'val_cfg=None',
    'val_dataloader=None',
    'val_evaluator=None',
)
RESIZE = 'test_dataloader.dataset.pipeline.1'


@pytest.mark.parametrize(
    'tool, options, complaint',
    [
        # While building
        ('train', 'train_dataloader.dataset.mine=3', 'TypeError: '),
        (
            'train',
            'train_dataloader.dataset.filter_cfg.min_size=10000',
            'ValueError: there are no images in the data set, or all are filtered out',
        ),
        (
            'train',
            'model.type=RetinNet',
            "KeyError: 'RetinNet is not in the mmdet::model registry.",
        ),
        ('train', 'randomness.seed=a', 'TypeError: '),
        # While running
        ('train', 'default_hooks.checkpoint.out_dir=/proc/x', 'FileNotFoundError: '),
        (
            'train',
            'model.neck.in_channels=[1,2,3,4]',
            'RuntimeError: Given groups=1, weight of size',
        ),
        (
            'train',
            'model.neck.in_channels=[32,64,128]',
            'AssertionError: assert len(inputs) == len(self.in_channels)',
        ),
        (
            'train',
            'activation_checkpointing=backbone',
            'ValueError: activation_checkpointing of the whole backbone would leave',
        ),
        (
            'train',
            'train_dataloader.dataset.pipeline.2.scale=(96,-96) train_dataloader.num_workers=1',
            'error: Caught error in DataLoader worker process 0. ',
        ),
        (
            'train',
            'model.data_preprocessor.std=[0,0,0]',
            'the first loss must be finite, got nan: che',
        ),
        ('infer', 'model.test_cfg.score_thr=a', 'Type'),
        ('infer', f'{RESIZE}.scale=a', 'error: OpenCV'),
        (
            'infer',
            'test_dataloader.dataset.pipeline=[]',
            'the test pipeline must end with PackDetInputs or PackSegInputs',
        ),
    ],
)
def test_in_a_run(tool, options, complaint, files, capsys):
    options = options.split()
    command = {'train': 'detector.py --amp', 'test': SEGMENTOR, 'infer': f'{DETECTOR} IMAGE'}[tool]
    if tool == 'train':
        keys = tuple(option.partition('=')[0] for option in options)
        options += [other for other in SHORT if not other.startswith(keys)]
    assert TOOLS[tool].main([*files(command).split(), '--cfg-options', *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f'cpvt {tool}: {complaint}')


def test_the_traceback_is_in_the_log(files, capfd):
    """Of an error that may come after days."""
    options = ['model.neck.in_channels=[1,2,3,4]', *SHORT]
    assert TOOLS['train'].main([files('detector.py'), '--cfg-options', *options]) == 2
    assert 'Traceback' not in ''.join(capfd.readouterr())
    (log,) = Path('work_dirs/detector').rglob('*.log')
    assert 'Traceback (most recent call last)' in log.read_text()


@pytest.mark.parametrize('load_from', ['mmseg.pth', 'classes.pth'])
def test_weights_to_start_from(load_from, files, runners, capsys):
    """A detector with mmseg's backbone, and one with other classes."""
    command = files(f'{SET} load_from={load_from}').split()
    if load_from == 'classes.pth':
        command += ['model.bbox_head.num_classes=80', 'check_classes=False']
    with pytest.raises(Began):
        TOOLS['train'].main(command)
    (runner,) = runners
    saved = torch.load(files(load_from))['state_dict']
    runner.load_or_resume()
    state = runner.model.state_dict()
    assert torch.equal(saved['neck.fpn_convs.0.conv.weight'], state['neck.fpn_convs.0.conv.weight'])
    bias = {'mmseg.pth': 'position_encodings.2.proj.bias'}.get(load_from, 'pos_block.2.proj.0.bias')
    assert torch.equal(saved[f'backbone.{bias}'], state['backbone.pos_block.2.proj.0.bias'])
    said = capsys.readouterr().out
    assert ('left out 2 tensors' in said) == (load_from == 'classes.pth')


@pytest.fixture
def import_package(tmp_path, monkeypatch):
    """Does the custom import of a package with this code."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'unfit_package', raising=False)

    def import_package(code):
        (tmp_path / 'unfit_package.py').write_text(code)
        cfg = Config(dict(custom_imports=dict(imports=['unfit_package'])))
        import_custom(cfg, 'detector.py')

    return import_package


def test_a_package_that_fails_when_it_is_imported(import_package, tmp_path):
    """As mmpretrain does with transformers 5; its traceback tells where."""
    with pytest.raises(TypeError, match='takes no arguments'):
        import_package('import os\nclass Model(None):\n    pass\n')


def test_a_full_disk_in_an_import_is_no_mistake_of_the_config(import_package):
    with pytest.raises(OSError, match='No space left'):
        import_package('import errno\nraise OSError(errno.ENOSPC, "No space left on device")\n')


def test_a_class_agnostic_mask_head_may_have_any_number_of_classes():
    def detector(class_agnostic: bool) -> torch.nn.Module:
        head = FCNMaskHead(1, 8, 8, 8, num_classes=80, class_agnostic=class_agnostic)
        return torch.nn.ModuleDict({'roi_head': torch.nn.ModuleDict({'mask_head': head})})

    check_head_classes(detector(True), 10, 'train')
    with pytest.raises(UserError, match='model.roi_head.mask_head has 80 classes but the train'):
        check_head_classes(detector(False), 10, 'train')


def test_missing_data_names_the_path_and_the_layout(monkeypatch, capsys):
    config = ROOT / 'configs/retinanet_cpvt_s.py'
    monkeypatch.setenv('COCO_ROOT', '/nowhere/data/coco')
    assert TOOLS['train'].main([str(config)]) == 2
    assert capsys.readouterr().err == (
        'cpvt train: no train data at /nowhere/data/coco/annotations/instances_train2017.json. '
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


@pytest.mark.parametrize('suffix', ['json', 'yaml'])
def test_a_config_without_tuples(configs, suffix):
    """JSON has none: sizes, scales and ranges are tuples again."""
    for path in configs.values():
        cfg = load_config(path)
        cfg.dump(f'dumped.{suffix}')
        again = load_config(f'dumped.{suffix}')
        for split in ('train', 'test'):
            steps = [step for data in data_of(again, split) for step in data['pipeline']]
            assert steps == [s for data in data_of(cfg, split) for s in data['pipeline']]
            for step in steps:
                for name in ('crop_size', 'scale'):
                    assert isinstance(step.get(name, ()), tuple)
        if 'size' in cfg.model.data_preprocessor:
            assert isinstance(again.model.data_preprocessor.size, tuple)
