"""Every shipped config: tied to the model it names, and run on the sample data in its layout."""

import os
from pathlib import Path

import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from safetensors.torch import save_file

from cpvt_pyramid import ARCHS, CPVTPyramid

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(
    path.relative_to(ROOT / 'configs').as_posix()
    for path in (ROOT / 'configs').rglob('*.py')
    if '_base_' not in path.parts
)
DIGITS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')


def load(name: str) -> Config:
    return Config.fromfile(ROOT / 'configs' / name)


def small(cfg: Config, data: Path, work_dir: Path) -> Config:
    """Reduced in size only: the sample data, small images, two training steps."""
    detection = cfg.default_scope == 'mmdet'
    classes = DIGITS if detection else ('background', *DIGITS)
    cfg.work_dir = str(work_dir)
    cfg.train_dataloader.batch_size = 2
    for split in ('train', 'val', 'test'):
        loader = cfg[f'{split}_dataloader']
        loader.num_workers, loader.persistent_workers = 0, False
        loader.dataset.data_root = str(data / ('coco' if detection else 'ade/ADEChallengeData2016'))
        loader.dataset.metainfo = dict(classes=classes)
        if not detection:  # ADE20KDataset insists on its own classes
            loader.dataset.update(type='BaseSegDataset', img_suffix='.jpg', seg_map_suffix='.png')
            loader.dataset.reduce_zero_label = True
        for step in loader.dataset.pipeline:
            if 'scale' in step:
                step.scale = (160, 96)
            if 'crop_size' in step:
                step.crop_size = (96, 96)
    if detection:
        annotations = str(data / 'coco/annotations/instances_val2017.json')
        cfg.val_evaluator.ann_file = cfg.test_evaluator.ann_file = annotations
        cfg.model.bbox_head.num_classes = len(classes)
        cfg.model.test_cfg.score_thr = 0.0  # so that an untrained model, too, has boxes to judge
        cfg.train_cfg.update(max_epochs=1, val_interval=1)
    else:
        cfg.model.data_preprocessor.size = (96, 96)
        cfg.model.decode_head.num_classes = len(classes)
        cfg.train_cfg.update(max_iters=2, val_interval=2)
        cfg.default_hooks.checkpoint.interval = 2
    cfg.log_level = 'WARNING'
    return cfg


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """timm's part of the Hugging Face hub, as far as it is asked for; weights are random."""
    asked = []

    def download(repo: str, file: str) -> str:
        asked.append(repo)
        folder = tmp_path / repo
        folder.mkdir(parents=True)
        name = repo.removeprefix('timm/')
        save_file(timm.create_model(name.split('.')[0]).state_dict(), folder / file)
        return str(folder / file)

    monkeypatch.setattr('huggingface_hub.hf_hub_download', download)
    return asked


@pytest.mark.parametrize('name', CONFIGS)
def test_numbers_are_the_models(name):
    cfg = load(name)
    backbone = dict(cfg.model.backbone)
    backbone.pop('type'), backbone.pop('init_cfg', None)
    with torch.device('meta'):
        model = CPVTPyramid(**backbone)
    assert tuple(cfg.model.neck.in_channels) == model.channels
    head = cfg.model.get('decode_head') or cfg.model.bbox_head
    strides = head.get('feature_strides') or head.anchor_generator.strides
    start = cfg.model.neck.get('start_level', 0)
    own = model.strides[start:]
    assert tuple(strides[: len(own)]) == own and len(strides) == cfg.model.neck.num_outs
    names = [f'backbone.{parameter}' for parameter, _ in model.named_parameters()]
    for key in cfg.optim_wrapper.get('paramwise_cfg', {}).get('custom_keys', {}):
        assert any(key in name for name in names), key


@pytest.mark.parametrize('name', CONFIGS)
def test_trains_evaluates_and_predicts(name, sample_dataset, tmp_path, hub):
    cfg = small(load(name), sample_dataset, tmp_path)
    init_cfg = cfg.model.backbone.get('init_cfg')
    from_hub = init_cfg is not None and init_cfg.checkpoint.startswith('timm://')
    if init_cfg and not from_hub:  # the other demo's detector
        other = {f'backbone.{k}': v for k, v in CPVTPyramid('pcpvt_nano').state_dict().items()}
        torch.save({'state_dict': other}, tmp_path / 'start')
        init_cfg.checkpoint = str(tmp_path / 'start')
    runner = Runner.from_cfg(cfg)
    model = runner.model
    before = {k: v.clone() for k, v in model.named_parameters()}
    runner.train()
    moved = [k for k, v in model.named_parameters() if not torch.equal(v, before[k])]
    assert len(moved) == len(before)
    assert hub == ([init_cfg.checkpoint.replace('://', '/')] if from_hub else [])
    if init_cfg:
        assert len(model.backbone.load_report.kept) == 0

    metrics = runner.test()
    assert {'coco/bbox_mAP', 'mIoU'} & metrics.keys()
    batch = next(iter(runner.test_dataloader))
    with torch.no_grad():
        for result in model.test_step(batch):
            if cfg.default_scope == 'mmdet':
                assert result.pred_instances.bboxes.isfinite().all()
            else:
                assert result.pred_sem_seg.data.shape[-2:] == result.ori_shape
    assert list(tmp_path.glob('*.pth'))


@pytest.mark.parametrize(
    'variable, name',
    [
        ('COCO_ROOT', 'retinanet_cpvt_b.py'),
        ('ADE_ROOT', 'semantic_fpn_cpvt_l.py'),
    ],
)
def test_data_elsewhere(variable, name, monkeypatch):
    repository = os.path.normpath(load(name).train_dataloader.dataset.data_root)
    assert Path(repository).is_relative_to(ROOT / 'data')
    monkeypatch.setenv(variable, '/datasets/here')
    cfg = load(name)
    for split in ('train', 'val', 'test'):
        assert cfg[f'{split}_dataloader'].dataset.data_root == '/datasets/here'


def test_every_variant_of_the_archs_is_in_a_config():
    used = {load(name).model.backbone.arch for name in CONFIGS}
    assert used == {name for name in ARCHS if name.startswith('pcpvt')}
