"""Mistakes in a config end in one line that names a part of it; errors of users' code and devices
keep their traceback."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import DefaultSampler
from mmengine.model import BaseModule
from mmengine.registry import DATA_SAMPLERS
from mmengine.runner import Runner
from support import load_tool
from torch._utils import ExceptionWrapper

from cpvt_pyramid.runner.config.explain import explained
from cpvt_pyramid.tooling.command import UserError

TOOLS = {name: load_tool(name) for name in ('train', 'test', 'infer')}
SHORT = (
    'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=2', 'val_cfg=None',
    'val_dataloader=None', 'val_evaluator=None',
)  # fmt: skip
UNEQUAL = 'test_dataloader.dataset.pipeline.1'

TRAINING = [
    # Checked before
    ('train_dataloader=None', 'the config must set train_dataloader'),
    ('train_cfg.max_epochs=0', 'train_cfg.max_epochs must be a whole number, at least 1, got 0'),
    ('param_scheduler.0.milestones=a', 'param_scheduler.0.milestones must be a list of numbers'),
    ('optim_wrapper.accumulative_counts=1.5', 'optim_wrapper.accumulative_counts must be a whole'),
    ('model.backbone.init_cfg.type=Pretrained', 'init_cfg.checkpoint must be a path or an address'),
    ('train_dataloader.sampler=None', 'train_dataloader.sampler must be a dict, got None'),
    ('train_dataloader.sampler.type=InfiniteSampler', 'train_dataloader.sampler must be one that'),
    ('model.bbox_head.loss_cls.loss_name=ce', 'model.bbox_head.loss_cls.loss_name must be a name '),
    ('custom_imports.imports=nothing.here', 'custom_imports of CONFIG: Failed to import nothing'),
    # While building
    ('train_dataloader.dataset.pipeline.2.scal=3',
     'train_dataloader.dataset.pipeline.2 (Resize): TypeError: '),
    ('train_dataloader.dataset.filter_cfg.min_size=10000', 'train_dataloader: there are no images'),
    ('train_dataloader.batch_size=0', 'train_dataloader: batch_size should be a positive integer'),
    ('optim_wrapper.optimizer.lrr=0.1', 'optim_wrapper.optimizer (AdamW): TypeError: '),
    ('model.type=RetinNet', "model (RetinNet): KeyError: 'RetinNet is not in the mmdet::model"),
    ('model.train_cfg.assigner=None', 'model.bbox_head (RetinaHead): TypeError: cfg should be a'),
    ('randomness.sede=1', 'the config: TypeError: '),
    ('randomness.seed=a', 'the config: TypeError: '),  # of compiled code
    # While running
    ('default_hooks.checkpoint.out_dir=/proc/x',
     'default_hooks.checkpoint (WholeCheckpointHook): FileNotFoundError: '),
    ('model.neck.in_channels=[1,2,3,4]',
     'model.neck.lateral_convs.0.conv (Conv2d): RuntimeError: Given groups=1, weight of size'),
    ('model.neck.in_channels=[32,64,128]',
     'model.neck (FPN): AssertionError: assert len(inputs) == len(self.in_channels)'),
    ('model.bbox_head.bbox_coder.target_means=[0.0,0.0]',
     'model.bbox_head.bbox_coder (DeltaXYWHBBoxCoder): RuntimeError: '),
    ('train_dataloader.dataset.pipeline.2.scale=(96,-96) train_dataloader.num_workers=1',
     'train_dataloader: while loading data: cv2.error: OpenCV'),
    ('model.data_preprocessor.std=[0,0,0]', 'the first loss must be finite, got nan: check what'),
]  # fmt: skip


@pytest.mark.parametrize('options, complaint', TRAINING)
def test_mistakes_in_a_training(options, complaint, configs, capsys):
    config, options = str(configs['detector']), options.split()
    keys = tuple(option.partition('=')[0] for option in options)
    others = [other for other in SHORT if not other.startswith(keys)]
    assert TOOLS['train'].main([config, '--cfg-options', *others, *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('train: ' + complaint.replace('CONFIG', config))
    assert ('traceback.txt' in line) == Path('work_dirs/detector/traceback.txt').is_file()


@pytest.mark.parametrize(
    'tool, model, options, complaint',
    [
        ('test', 'segmentor',
         f'test_dataloader.batch_size=4 {UNEQUAL}.scale=None {UNEQUAL}.scale_factor=1.0',
         'model.data_preprocessor (ValidRegionSegDataPreProcessor): AssertionError: The image '),
        ('test --tta', 'detector', f'{UNEQUAL}.type=Pad {UNEQUAL}.size=(96,96)',
         '--tta needs tta_pipeline, or a Resize with a scale in the test pipeline'),
        ('test --tta', 'detector', f'{UNEQUAL}.scale=a', 'the scale of Resize in the test '),
        ('test', 'detector', 'test_dataloader=None', 'the config must set test_dataloader'),
        ('test', 'detector', 'test_dataloader.sampler.type=InfiniteSampler',
         'test_dataloader.sampler must be one that ends, got InfiniteSampler'),
        ('infer', 'detector', 'model.test_cfg.score_thr=a', 'model.bbox_head (RetinaHead): Type'),
        ('infer', 'detector', f'{UNEQUAL}.scale=a', f'{UNEQUAL} (Resize): error: OpenCV'),
        ('infer', 'detector', f'{UNEQUAL}.type=Foo', f"{UNEQUAL} (Foo): KeyError: 'Foo is not in"),
        ('infer', 'detector', 'test_dataloader.dataset.pipeline=[]',
         "model.data_preprocessor (ValidRegionDetDataPreprocessor): KeyError: 'inputs'"),
        ('infer', 'detector', 'test_dataloader=None', 'the config must set test_dataloader'),
    ],
)  # fmt: skip
def test_mistakes_after_a_training(
    tool, model, options, complaint, untrained, sample_dataset, capsys
):
    tool, *flags = tool.split()
    if tool == 'infer':
        flags = [str(next(sample_dataset.glob('coco/val2017/*'))), '--device', 'cpu']
    command = [*untrained[model], *flags, '--cfg-options', *options.split()]
    assert TOOLS[tool].main(command) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f'{tool}: {complaint}')
    if tool == 'infer':
        assert ('traceback.txt' in line) == Path('predictions/traceback.txt').is_file()


@pytest.mark.parametrize('model', [{'roi_head': {'mask_head': {'a': 1}}}, {'mask_head': {'a': 1}}])
def test_masks_cannot_be_merged(model):
    with pytest.raises(UserError, match='mmdet cannot merge masks: test without --tta'):
        TOOLS['test'].use_augmentation(Config({'default_scope': 'mmdet', 'model': model}))


# The part


@pytest.mark.parametrize('splits, part', [(('train', 'val'), 'train'), (('test',), 'test')])
def test_the_part_is_the_most_similar_one_of_the_splits_that_are_read(splits, part):
    loader = {'sampler': {'type': DefaultSampler, 'shuffle': True, 'round': 2}}
    other = {'sampler': {'type': DefaultSampler, 'shuffle': False}}
    cfg = Config({
        'pipeline': loader, 'val_dataloader': other, 'train_dataloader': loader,
        'test_dataloader': loader,
    })  # fmt: skip
    message = rf'^{part}_dataloader.sampler \(DefaultSampler\): '
    with pytest.raises(UserError, match=message) as raised, explained(cfg, splits):
        Runner.build_dataloader({'dataset': [], **loader})
    path = str(raised.value).partition('(traceback: ')[2].rstrip(')')  # there is no work dir
    assert Path(path).read_text().startswith('Traceback')


# What keeps its traceback


class Buggy(BaseModule):
    def __init__(self, raises: Callable[[], object]) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 1)
        self.raises = raises

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.raises()
        return self.conv(image)


def of_a_library(kind: type, message: str) -> Callable[[], object]:
    """Raises an error in the building of a sampler, as if it came from torch."""

    def build(**_: object) -> None:
        raise kind(message)

    code = build.__code__.replace(co_filename=os.path.join(os.path.dirname(torch.__file__), 'x.py'))
    build.__code__ = code
    return lambda: DATA_SAMPLERS.build({'type': build})


def in_a_worker() -> None:
    try:
        int('a')
    except ValueError:
        wrapper = ExceptionWrapper(where='in DataLoader worker process 0')
    wrapper.reraise()


def interrupted() -> None:
    """mmengine and data loaders may raise another error while they handle it."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise RuntimeError('worker exited unexpectedly') from None


@pytest.mark.parametrize(
    'raises, kind',
    [
        (lambda: int('a'), ValueError),
        (lambda: Buggy(lambda: {}['work_dir'])(torch.ones(1, 3, 2, 2)), KeyError),
        (lambda: Buggy(lambda: None)(torch.ones(1, 3, 2, 2, dtype=torch.float64)), RuntimeError),
        (lambda: DATA_SAMPLERS.build({'type': lambda: int('a')}), ValueError),
        (in_a_worker, ValueError),
        (interrupted, RuntimeError),
        (of_a_library(torch.cuda.OutOfMemoryError, 'no memory'), torch.cuda.OutOfMemoryError),
        (of_a_library(RuntimeError, 'CUDA error: device-side assert triggered'), RuntimeError),
        (of_a_library(torch.distributed.DistBackendError, 'NCCL error'), RuntimeError),
    ],
)  # fmt: skip
def test_errors_of_users_code_and_of_devices_keep_their_traceback(raises, kind, tmp_path):
    cfg = Config({'work_dir': str(tmp_path), 'model': {'type': 'Buggy', 'depth': 3}})
    with pytest.raises(kind) as raised, explained(cfg):
        raises()
    assert raised.type is not UserError and not list(tmp_path.iterdir())


def test_other_errors_of_those_libraries_are_explained():
    message = '^the config: RuntimeError: expected scalar type'
    with pytest.raises(UserError, match=message), explained(Config()):
        of_a_library(RuntimeError, 'expected scalar type Float')()
