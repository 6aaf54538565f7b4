"""Mistakes in a config end in one line that names the setting; bugs keep their traceback."""

import os
from collections.abc import Callable
from pathlib import Path

import mmcv
import mmengine
import numpy as np
import pytest
import torch
from mmcv.ops import batched_nms
from mmdet.models.utils import filter_scores_and_topk
from mmdet.registry import METRICS, MODELS, TASK_UTILS, TRANSFORMS
from mmengine.config import Config
from mmengine.dataset import DefaultSampler
from mmengine.model import BaseModule
from mmengine.registry import DATA_SAMPLERS
from mmengine.runner import Runner
from mmengine.structures import InstanceData
from support import load_tool
from torch._utils import ExceptionWrapper

from cpvt_pyramid.runner.mistakes import config_mistakes
from cpvt_pyramid.tooling.command import UserError

TOOLS = {name: load_tool(name) for name in ('train', 'test', 'infer')}
SHORT = (
    'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=2', 'val_cfg=None',
    'val_dataloader=None', 'val_evaluator=None',
)  # fmt: skip
UNEQUAL = 'test_dataloader.dataset.pipeline.1'

TRAINING = [
    (
        'train_dataloader.dataset.pipelin=[]',
        'train_dataloader.dataset (CocoDataset): BaseDataset.__init__() got an unexpected keyword '
        "argument 'pipelin'",
    ),
    (
        'train_dataloader.dataset.pipeline.2.scal=3',
        'train_dataloader.dataset.pipeline.2 (Resize): Resize.__init__() got an unexpected keyword',
    ),
    (
        'train_dataloader.dataset.filter_cfg.min_size=10000',
        'train_dataloader: there are no images in the data set, or all are filtered out',
    ),
    ('train_dataloader.batch_size=0', 'train_dataloader: batch_size should be a positive integer'),
    (
        'train_dataloader.persistent_workers=True',
        'train_dataloader: persistent_workers option needs num_workers > 0; set '
        'persistent_workers=False with it',
    ),
    ('train_dataloader=None', 'the config must set train_dataloader'),
    ('train_cfg.max_epochs=0', 'train_cfg.max_epochs must be at least 1, got 0'),
    ('train_cfg.max_epoch=1', 'train_cfg (MidEpochTrainLoop): EpochBasedTrainLoop.__init__()'),
    (
        'optim_wrapper.type=AmpOptimWrapper',
        'optim_wrapper (AmpOptimWrapper): ``AmpOptimizerWrapper`` is only available',
    ),
    (
        'optim_wrapper.optimizer.type=AdamV',
        'optim_wrapper (OptimWrapper): None is not a callable object; there is no class of '
        'the name in optimizer.type',
    ),
    (
        'optim_wrapper.optimizer.lrr=0.1',
        'optim_wrapper.optimizer (AdamW): AdamW.__init__() got an unexpected keyword '
        "argument 'lrr'",
    ),
    (
        'default_hooks.checkpoint.interva=1',
        'default_hooks.checkpoint: Runner.save_checkpoint() got an unexpected keyword argument',
    ),
    ('default_hooks.logger.interval=0', 'default_hooks.logger (LoggerHook): interval must be'),
    ('model.type=RetinNet', 'model (RetinNet): RetinNet is not in the mmdet::model registry'),
    (
        'model.backbone.drop_path=0.1',
        'model.backbone (CPVTPyramid): CPVTPyramid.__init__() got an unexpected keyword',
    ),
    (
        'model.neck.in_channels=[1,2,3,4]',
        'model.neck.in_channels=[1, 2, 3, 4]: model.neck.lateral_convs.0.conv (Conv2d) does not '
        'fit its input: Given groups=1',
    ),
    (
        'model.neck.in_channels=[32,64,128]',
        'model.neck (FPN): assert len(inputs) == len(self.in_channels)',
    ),
    ('randomness.sede=1', 'the config: Runner.set_randomness() got an unexpected keyword argument'),
    ('custom_imports.imports=nothing.here', 'custom_imports of CONFIG: Failed to import nothing'),
]

# Values of the right kind, or of a kind that nothing checks, which fail only at run time.
AT_RUN_TIME = [
    ('optim_wrapper.clip_grad.max_norm=a', "optim_wrapper.clip_grad.max_norm='a': could not"),
    (
        'model.bbox_head.bbox_coder.target_means=[0.0,0.0]',
        'model.bbox_head.bbox_coder.target_means=[0.0, 0.0] or ',
    ),
    (
        'train_dataloader.dataset.pipeline.2.scale=(96,-96)',
        'train_dataloader.dataset.pipeline.2 (Resize): OpenCV',
    ),
    (
        'train_dataloader.dataset.pipeline.4.meta_keys=img_path',
        "model.bbox_head (RetinaHead): no step of the pipeline adds 'img_shape' to the data",
    ),
    ('default_hooks.checkpoint.out_dir=/proc/x', "default_hooks.checkpoint.out_dir='/proc/x': No"),
    ('activation_checkpointing=5', 'activation_checkpointing must be a name or a list of names'),
    ('model.backbone.init_cfg.type=Pretrained', 'init_cfg.checkpoint must be a path or an address'),
    ('train_dataloader.sampler=None', 'train_dataloader.sampler must be a dict, got None'),
    (
        'train_dataloader.sampler.type=InfiniteSampler',
        'train_dataloader.sampler must be one that ends, such as DefaultSampler, got InfiniteS',
    ),
    (
        'model.bbox_head.loss_cls.loss_name=ce',
        "model.bbox_head.loss_cls.loss_name must contain 'loss', or mmengine only logs it, got",
    ),
    ('log_level=a', "log_level='a': KeyError: a"),
    ('model.backbone.drop_path_rate=a', "model.backbone.drop_path_rate='a': '<=' not supported"),
    ('model.train_cfg.assigner=None', 'model.train_cfg.assigner=None: cfg should be a dict'),
    (
        'model.data_preprocessor=None',
        'model.backbone (CPVTPyramid): the images must be a tensor (B, C, H, W), got a list; set '
        'model.data_preprocessor',
    ),
    (
        'model.data_preprocessor.std=[0,0,0]',
        'the first loss must be finite, got loss=nan, loss_cls=nan, loss_bbox=nan: check what',
    ),
]


@pytest.mark.parametrize('option, complaint', TRAINING + AT_RUN_TIME)
def test_mistakes_in_a_training(option, complaint, configs, capsys):
    config = str(configs['detector'])
    key = option.partition('=')[0]
    others = [other for other in SHORT if not other.startswith(key)]
    assert TOOLS['train'].main([config, '--cfg-options', *others, option]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('train: ' + complaint.replace('CONFIG', config))
    assert ('traceback.txt' in line) == Path('work_dirs/detector/traceback.txt').is_file()


@pytest.mark.parametrize(
    'model, options, complaint',
    [
        (
            'segmentor',
            f'test_dataloader.batch_size=4 {UNEQUAL}.scale=None {UNEQUAL}.scale_factor=1.0',
            'model.data_preprocessor (ValidRegionSegDataPreProcessor): The image size in a batch '
            'should be the same; set test_dataloader.batch_size=1',
        ),
        (
            'detector',
            f'{UNEQUAL}.type=Pad {UNEQUAL}.size=(96,96) --tta',
            '--tta needs tta_pipeline, or a Resize with a scale in the test pipeline',
        ),
        ('detector', 'test_dataloader=None', 'the config must set test_dataloader'),
        (
            'detector',
            'test_dataloader.sampler.type=InfiniteSampler',
            'test_dataloader.sampler must be one that ends, such as DefaultSampler, got InfiniteS',
        ),
        (
            'detector',
            f'{UNEQUAL}.scale=a --tta',
            "the scale of Resize in the test pipeline must be numbers, got 'a'",
        ),
    ],
)
def test_mistakes_in_an_evaluation(model, options, complaint, untrained, capsys):
    options, tta, _ = options.partition(' --tta')
    command = [*untrained[model], *tta.split(), '--cfg-options', *options.split()]
    assert TOOLS['test'].main(command) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f'test: {complaint}')


@pytest.mark.parametrize(
    'option, complaint',
    [
        ('model.test_cfg.score_thr=a', "model.test_cfg.score_thr='a': '>' not supported"),
        (f'{UNEQUAL}.scale=a', f"{UNEQUAL}.scale='a': OpenCV"),
        (f'{UNEQUAL}.type=Foo', f'{UNEQUAL} (Foo): Foo is not in the mmdet::transform registry'),
        (
            'test_dataloader.dataset.pipeline=[]',
            'model.data_preprocessor (ValidRegionDetDataPreprocessor): no step of the pipeline '
            "adds 'inputs' to the data",
        ),
        ('test_dataloader=None', 'the config must set test_dataloader'),
    ],
)
def test_mistakes_in_predictions(option, complaint, untrained, sample_dataset, capsys):
    image = next(sample_dataset.glob('coco/val2017/*'))
    command = [*untrained['detector'], str(image), '--device', 'cpu', '--cfg-options', option]
    assert TOOLS['infer'].main(command) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f'infer: {complaint}')
    assert ('traceback.txt' in line) == Path('predictions/traceback.txt').is_file()


@pytest.mark.parametrize('model', [{'roi_head': {'mask_head': {'a': 1}}}, {'mask_head': {'a': 1}}])
def test_masks_cannot_be_merged(model):
    with pytest.raises(UserError, match='mmdet cannot merge masks: test without --tta'):
        TOOLS['test'].use_augmentation(Config({'default_scope': 'mmdet', 'model': model}))


def from_worker(function: Callable[[], object]) -> None:
    """Raise the error of a function as a data loader does it for its workers."""
    try:
        function()
    except Exception:
        wrapper = ExceptionWrapper(where='in DataLoader worker process 0')
    wrapper.reraise()


def test_a_transform_that_refuses_its_data_in_a_worker(tmp_path):
    cfg = Config({'work_dir': str(tmp_path)})
    message = '^while loading data: TypeError: Unsupported format: unknown '
    with pytest.raises(UserError, match=message), config_mistakes(cfg):
        from_worker(lambda: mmengine.load('x.unknown'))
    message = "^while loading data: AttributeError: 'NoneType' object has no attribute 'copy'"
    with pytest.raises(UserError, match=message), config_mistakes(cfg):
        from_worker(lambda: mmcv.imnormalize(None, 0, 1))
    with pytest.raises(TypeError), config_mistakes(cfg):
        from_worker(lambda: None + 1)


# Settings that fail in a call


BOXES = torch.tensor([[0.0, 0, 9, 9], [1, 1, 9, 9]])
SCORES = torch.tensor([0.9, 0.8])
TRUTH = InstanceData(bboxes=BOXES, labels=torch.tensor([0, 1]))
IMAGE = {'img': np.zeros((4, 6, 3), np.uint8), 'img_shape': (4, 6)}


def focal_loss(cfg: dict) -> None:
    MODELS.build(cfg)(torch.zeros(2, 3), torch.tensor([0, 1]))


def assign(cfg: dict) -> None:
    truth, predictions = InstanceData(bboxes=BOXES, labels=SCORES), InstanceData(priors=BOXES)
    TASK_UTILS.build(cfg).assign(predictions, truth)


def transform(cfg: dict) -> None:
    TRANSFORMS.build(cfg)(IMAGE)


@pytest.mark.parametrize(
    'run, cfg, complaint',
    [
        (focal_loss, {'type': 'FocalLoss', 'gamma': 'a', 'alpha': 0.25}, "gamma='a': pow"),
        (focal_loss, {'type': 'FocalLoss', 'loss_weight': 'a', 'gamma': 2.0}, "loss_weight='a': "),
        (focal_loss, {'type': 'FocalLoss', 'alpha': [0.2, 0.8]}, 'alpha=[0.2, 0.8]: only'),
        (focal_loss, {'type': 'SmoothL1Loss', 'beta': 'a'}, "beta='a': '>' not supported"),
        (
            lambda cfg: batched_nms(BOXES, SCORES, SCORES, cfg.nms),
            {'nms': {'type': 'nms', 'iou_threshold': 'a'}, 'score_thr': 0.1},
            "nms.iou_threshold='a': could not",
        ),
        (
            lambda cfg: batched_nms(BOXES, SCORES, SCORES, cfg.nms),
            {'nms': {'type': 'nmss', 'iou_threshold': 0.5}},
            "nms.type='nmss': name 'nmss'",
        ),
        (
            lambda cfg: filter_scores_and_topk(SCORES[:, None], cfg.score_thr, cfg.nms_pre),
            {'score_thr': None, 'nms_pre': 5},
            "score_thr=None: '>' not supported",
        ),
        (
            lambda cfg: filter_scores_and_topk(SCORES[:, None], cfg.score_thr, cfg.nms_pre),
            {'score_thr': 0.1, 'nms_pre': 1.5},
            'score_thr=0.1 or model.nms_pre=1.5: slice indices must be integers',
        ),
        (assign, {'type': 'MaxIoUAssigner', 'pos_iou_thr': 'a', 'neg_iou_thr': 0.4}, 'pos_iou_thr'),
        (transform, {'type': 'mmdet.Resize', 'scale': (9, 9, 3)}, 'scale=(9, 9, 3): OpenCV'),
        (
            transform,
            {'type': 'Resize', 'scale': (9, 9), 'interpolation': 'cubic'},
            "interpolation='cubic': KeyError: cubic",
        ),
        (  # the part's entry in the settings of the model
            lambda cfg: (lambda cfg: cfg.get('nms_pre'))(cfg.test_cfg.rpn),
            {'test_cfg': {'rpn': None}, 'init_cfg': None},
            "test_cfg.rpn=None: 'NoneType' object has no attribute 'get'",
        ),
        (
            lambda cfg: os.path.join(cfg.output_dir, cfg.iou_metrics[0]),
            {'iou_metrics': ['mIoU'], 'output_dir': None},
            'output_dir=None: expected str, bytes or os.PathLike object, not NoneType',
        ),
        (
            lambda cfg: open(f'{cfg.outfile_prefix}.bbox.json', 'w'),
            {'outfile_prefix': '/nowhere/a'},
            "outfile_prefix='/nowhere/a': No such file or directory: /nowhere/a.bbox.json",
        ),
        (
            lambda cfg: TASK_UTILS.build(cfg.sampler, default_args={'context': None}),
            {'sampler': None},
            'sampler=None: cfg should be a dict',
        ),
        (  # a class that is named by another setting than type
            lambda cfg: MODELS.build({'type': cfg.ema_type}),
            {'type': 'EMAHook', 'ema_type': 'Foo'},
            "ema_type='Foo': Foo is not in the",
        ),
        (
            lambda cfg: MODELS.build(cfg)(None, None),
            {'type': 'FocalLoss'},
            ' (FocalLoss): ',
        ),
        (
            lambda cfg: MODELS.build(cfg)._get_targets_single(SCORES, BOXES, TRUTH, IMAGE),
            {'type': 'DETRHead', 'num_classes': 2, 'train_cfg': None},
            " (DETRHead), which has no train_cfg: 'DETRHead' object has no attribute 'assigner'",
        ),
    ],
)
def test_settings_that_fail_in_a_call(run, cfg, complaint, tmp_path):
    cfg = Config({'work_dir': str(tmp_path), 'model': cfg})
    with pytest.raises(UserError) as raised, config_mistakes(cfg):
        run(cfg.model)
    # A complaint that begins with a space is about the part itself.
    prefix = 'model' if complaint.startswith(' ') else 'model.'
    assert str(raised.value).startswith(prefix + complaint)


def test_a_message_about_dtypes_is_about_no_setting():
    cfg = Config({'model': {'nms': {'type': 'nms', 'iou_threshold': 0.5}}})
    message = '^the config: expected scalar type Float but found BFloat16'
    with pytest.raises(UserError, match=message), config_mistakes(cfg):
        batched_nms(BOXES.bfloat16(), SCORES.bfloat16(), SCORES, cfg.model.nms)


def test_a_setting_that_fails_in_a_worker(tmp_path):
    def bright(results: dict, brightness_delta: str = 'a') -> float:
        return -brightness_delta

    dataset = {'pipeline': [{'type': bright, 'brightness_delta': 'a'}]}
    cfg = Config({'work_dir': str(tmp_path), 'train_dataloader': {'dataset': dataset}})
    message = (
        "^while loading data: train_dataloader.dataset.pipeline.0.brightness_delta='a': TypeError: "
    )
    with pytest.raises(UserError, match=message), config_mistakes(cfg):
        from_worker(lambda: bright({}))


# What is not a mistake


class Buggy(BaseModule):
    def __init__(self, raises: Callable[[], object]) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 1)
        self.raises = raises

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.raises()
        return self.conv(image)


@pytest.mark.parametrize(
    'raises, image',
    [
        (lambda: None + 1, torch.ones(1, 3, 2, 2)),
        (lambda: {}['work_dir'], torch.ones(1, 3, 2, 2)),
        (lambda: (lambda a: a)(b=1), torch.ones(1, 3, 2, 2)),
        (lambda: int('a'), torch.ones(1, 3, 2, 2)),
        (lambda: None, torch.ones(1, 3, 2, 2, dtype=torch.float64)),  # a dtype of ours, not a size
    ],
)
def test_bugs_keep_their_traceback(raises, image, tmp_path):
    settings = {'depth': 3, 'mode': 'fast', 'sizes': [4, 4], 'init': None, 'ratio': 0.5}
    cfg = Config({'work_dir': str(tmp_path), 'model': {'type': 'Buggy', **settings}})
    with pytest.raises(Exception) as raised, config_mistakes(cfg):
        Buggy(raises)(image)
    assert raised.type is not UserError and not list(tmp_path.iterdir())


def test_an_interrupt_is_none_either():
    """mmengine and data loaders may raise another error while they handle it."""

    def interrupted(**_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError('worker exited unexpectedly') from None

    cfg = Config({'sampler': {'type': interrupted}})
    with pytest.raises(RuntimeError), config_mistakes(cfg):
        DATA_SAMPLERS.build(cfg.sampler)


def test_a_bug_in_a_constructor_is_found_in_the_file(tmp_path):
    """It looks like a mistake in the config."""

    def broken(**_: object) -> None:
        raise AttributeError('no such attribute')

    sampler = {'type': broken, 'shuffle': True}
    cfg = Config({'work_dir': str(tmp_path), 'train_dataloader': {'sampler': sampler}})
    message = r'^train_dataloader.sampler \(broken\): no such attribute \(traceback: /'
    with pytest.raises(UserError, match=message), config_mistakes(cfg):
        DATA_SAMPLERS.build(cfg.train_dataloader.sampler)
    text = (tmp_path / 'traceback.txt').read_text()
    assert text.startswith('Traceback') and 'in broken' in text


def test_the_setting_is_the_most_similar_one():
    loader = {'sampler': {'type': DefaultSampler, 'shuffle': True, 'round': 2}}
    other = {'sampler': {'type': DefaultSampler, 'shuffle': False}}
    cfg = Config({'pipeline': loader, 'val_dataloader': other, 'train_dataloader': loader})
    message = r'^train_dataloader.sampler \(DefaultSampler\): '
    with pytest.raises(UserError, match=message), config_mistakes(cfg):
        Runner.build_dataloader({'dataset': [], **loader})


def test_settings_of_other_splits_are_not_read():
    metric = {'type': 'CocoMetric', 'metric': 'a'}
    cfg = Config({'val_evaluator': metric, 'test_evaluator': metric})
    message = r'^test_evaluator \(CocoMetric\): metric should be one of'
    with pytest.raises(UserError, match=message), config_mistakes(cfg, ('test',)):
        METRICS.build(cfg.test_evaluator)
