"""Every shipped config: tied to the model it names, and run on the sample data in its layout."""

import copy
import json
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
import yaml
from mmdet.datasets import CocoDataset
from mmengine.config import Config
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.runner import Runner
from PIL import Image
from safetensors.torch import save_file
from support import CONFIGS, ROOT, run

from cpvt_pyramid import ARCHS, CPVTPyramid, mm
from cpvt_pyramid.checkpoints.formats import to_format
from cpvt_pyramid.meta import without_values
from cpvt_pyramid.versions import VERSION

MIT = 'https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/segformer/'


def smallest(name: str) -> str:
    if name.startswith(('mask_rcnn', 'retinanet')):
        return re.sub(r'_([csp]+vt_[tsmbl]|pvt_v2_b\d)(?=_|.py)', '_cpvt_s', name)
    name = re.sub(r'segformer_b\d(?=.py|_cityscapes)', 'segformer_b0', name)
    name = re.sub(r'(?<!c)pvt_([sml]|v2_b\d)', 'pvt_t', name)
    return re.sub('(cpvt|svt)_[bl]', r'\1_s', name)


# Each config, and the one from which it differs in the architecture alone, which is trained.
SMALLEST = {name: smallest(name) for name in CONFIGS}


@cache
def loaded(name: str) -> Config:
    return Config.fromfile(ROOT / 'configs' / name)


def load(name: str) -> Config:
    return copy.deepcopy(loaded(name))


def parts(config: object) -> list:
    """A config and all dicts inside it."""
    if isinstance(config, (list, tuple)):
        return [part for value in config for part in parts(value)]
    if not isinstance(config, dict):
        return []
    return [config, *parts(list(config.values()))]


@pytest.fixture(scope='session')
def data(sample_dataset, tmp_path_factory):
    """The sample data under the class names of COCO, and in the layout of Cityscapes. Classes of
    label maps are known by number alone."""
    root = tmp_path_factory.mktemp('named') / 'sample'
    shutil.copytree(sample_dataset, root)
    ade = root / 'ade/ADEChallengeData2016'
    for split, short in (('training', 'train'), ('validation', 'val')):
        for kind, folder, suffix in (
            ('images', 'leftImg8bit', 'leftImg8bit'),
            ('annotations', 'gtFine', 'gtFine_labelTrainIds'),
        ):
            target = root / 'cityscapes' / folder / short
            target.mkdir(parents=True)
            for path in (ade / kind / split).iterdir():
                Image.open(path).save(target / f'{path.stem}_{suffix}.png')
    for path in root.glob('coco/annotations/*.json'):
        annotations = json.loads(path.read_text())
        annotations['categories'] = [
            dict(id=i, name=name) for i, name in enumerate(CocoDataset.METAINFO['classes'], 1)
        ]
        path.write_text(json.dumps(annotations))
    return root


def small(cfg: Config, work_dir: Path) -> Config:
    """Reduced in size only: small images, and one training step with two of them."""
    long, short = 160, 96
    cfg.work_dir = str(work_dir)
    cfg.log_level = 'WARNING'
    for split in ('train', 'val', 'test'):
        loader = cfg[f'{split}_dataloader']
        loader.update(num_workers=0, persistent_workers=False)
        loader.dataset.update(indices=2, serialize_data=False)
        for step in parts(loader.dataset.pipeline):
            if 'scale' in step:
                step.scale = (long, short)
            if 'scales' in step:
                sides = isinstance(step.scales[0], int)
                step.scales = [short] if sides else [(short, long), (short + 32, long)]
            if 'crop_size' in step:
                step.crop_size = (64, 64)
    cfg.train_dataloader.batch_size = 2
    cfg.default_hooks.checkpoint.update(interval=1000, save_last=False, save_best=None)
    cfg.optim_wrapper.optimizer.fused = VERSION >= (2, 7)  # the same, faster
    for part in parts(cfg.model):
        if 'num_layers' in part:  # of a transformer
            part.num_layers = min(part.num_layers, 2)
    if cfg.default_scope == 'mmdet':
        for part in parts(cfg.model.test_cfg):
            if 'score_thr' in part:
                # An untrained model, too, is to have boxes to judge.
                part.update(score_thr=0.0, max_per_img=10)
        for part in parts([cfg.model.test_cfg, cfg.model.get('train_cfg')]):
            if 'nms_pre' in part:
                part.update(nms_pre=100, max_per_img=min(part.get('max_per_img', 20), 20))
        if 'num_queries' in cfg.model:  # DINO chooses them among the places of the maps
            cfg.model.num_queries = 100
        cfg.train_cfg.update(max_epochs=1, val_interval=1)
    else:
        cfg.model.data_preprocessor.size = (64, 64)
        if cfg.model.decode_head.type == 'UPerHead':
            cfg.model.decode_head.channels = 64
        cfg.train_cfg.update(max_iters=1, val_interval=1)
    return cfg


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """What the hub and other addresses were asked for. They give random weights.

    Each stage has one block of each kind of attention, also in the weights; that all blocks of the
    whole models are loaded is tested in core/test_pyramid.py and checkpoints/test_loading.py.
    """
    for name, arch in ARCHS.items():
        if name == 'pcpvt_nano':  # its weights are in the package
            continue
        kinds = len(arch.attentions)
        monkeypatch.setitem(ARCHS, name, arch._replace(depths=(kinds,) * len(arch.dims)))
    asked = []

    def from_hub(repo: str, file: str) -> Path:
        asked.append(repo.replace('timm/', 'timm://'))
        name = repo.removeprefix('timm/').removesuffix('.in1k')
        arch = ARCHS.get(name.removeprefix('twins_'))
        model = timm.create_model(name, **{'depths': arch.depths} if arch else {})
        save_file(model.half().state_dict(), tmp_path / file)
        return tmp_path / file

    def from_address(url: str, **options: object) -> dict:
        asked.append(url)
        if url.startswith(MIT):
            arch = Path(url).name[: len('mit_b0')]
            return to_format(CPVTPyramid(arch).half().state_dict(), 'mm_pvt_v2')
        tensors = to_format(CPVTPyramid(Path(url).stem).half().state_dict(), 'pvt')
        token = torch.zeros(1, 1, 512).half()  # of the classifier, with a place in the last table
        tensors['pos_embed4'] = torch.cat([token, tensors['pos_embed4']], dim=1)
        return tensors | {'cls_token': token, 'head.weight': torch.zeros(1000, 512).half()}

    monkeypatch.setattr('cpvt_pyramid.checkpoints.downloads.from_hub', from_hub)
    monkeypatch.setattr('mmengine.runner.checkpoint.load_url', from_address)
    return asked


@pytest.mark.parametrize('name', CONFIGS)
def test_numbers_are_the_models_and_weights_of_its_architecture(name):
    cfg = load(name)
    for split in ('train', 'val', 'test'):
        data_root = os.path.normpath(cfg[f'{split}_dataloader'].dataset.data_root)
        assert Path(data_root).is_relative_to(ROOT / 'data')
    backbone = cfg.model.backbone
    if not name.startswith('demo/'):
        published = {
            'pvt_v2': f'timm://{backbone.arch}.in1k',
            'pvt': f'https://github.com/whai362/PVT/releases/download/v2/{backbone.arch}.pth',
            'mit': rf'{MIT}{backbone.arch}_20220624-[0-9a-f]{{8}}\.pth',
            'cpvt': 'timm://deit_tiny_patch16_224.fb_in1k',
            '': f'timm://twins_{backbone.arch}.in1k',
        }
        family = next(family for family in published if backbone.arch.startswith(family))
        assert backbone.init_cfg.type == 'Pretrained' and len(backbone.init_cfg) == 2
        assert re.fullmatch(published[family], backbone.init_cfg.checkpoint)
    with without_values():
        pyramid = ROOT_MODELS.build(backbone)
    neck, head = cfg.model.get('neck'), cfg.model.get('decode_head')
    assert tuple((neck or head).in_channels) == pyramid.channels
    if neck and head:
        assert tuple(head.in_channels) == (neck.out_channels,) * neck.num_outs
    if auxiliary := cfg.model.get('auxiliary_head'):
        assert auxiliary.in_channels == pyramid.channels[auxiliary.in_index]

    finest = pyramid.strides[neck.get('start_level', 0) if neck else 0]
    found = [
        part[key]
        for part in parts(cfg.model)
        for key in ('strides', 'feature_strides', 'featmap_strides')
        if key in part
    ]
    assert all(tuple(s) == tuple(finest * 2**i for i in range(len(s))) for s in found)
    levels = [part.num_levels for part in parts(cfg.model) if 'num_levels' in part]
    outs = neck.num_outs if neck else len(pyramid.channels)
    if neck:
        assert outs == max([*levels, *map(len, found)])
    else:
        assert outs >= max([0, *levels])


@pytest.mark.parametrize('name', sorted(set(CONFIGS) - set(SMALLEST.values())))
def test_other_models_differ_in_the_architecture_alone(name):
    """Whatever else they are set to is trained in another config."""
    configs = [load(name), load(SMALLEST[name])]
    for cfg in configs:
        for part in parts(cfg.model):
            if 'in_channels' in part:
                part.in_channels = None  # see the tests above, also for the next ones
        cfg.model.backbone.arch = cfg.model.backbone.drop_path_rate = None
        cfg.model.backbone.init_cfg = None
        # The largest PVT is trained with smaller batches.
        cfg.train_dataloader.batch_size = cfg.auto_scale_lr = None
        assert 1e-5 < cfg.optim_wrapper.optimizer.lr < 1e-3
        cfg.optim_wrapper.optimizer.lr = None
    assert configs[0]._cfg_dict == configs[1]._cfg_dict


@pytest.mark.usefixtures('quick_training')
@pytest.mark.parametrize('name', sorted(set(SMALLEST.values())))
def test_trains_evaluates_and_predicts(
    name, data, pages_dataset, trees_dataset, tmp_path, downloads, monkeypatch
):
    monkeypatch.setenv('COCO_ROOT', f'{data}/coco')
    monkeypatch.setenv('ADE_ROOT', f'{data}/ade/ADEChallengeData2016')
    monkeypatch.setenv('CITYSCAPES_ROOT', f'{data}/cityscapes')
    cfg = small(Config.fromfile(ROOT / 'configs' / name), tmp_path)  # in this environment
    test_data = cfg.test_dataloader.dataset.data_root  # of the other splits, see below
    assert test_data.startswith(str(data)) or name.startswith('demo/')
    init_cfg = cfg.model.backbone.get('init_cfg')
    if name.startswith('demo/'):  # they have data of their own
        folder = f'{ROOT}/configs/demo/../../data'
        sets = dict(pages=pages_dataset, trees=trees_dataset)
        for part in parts(cfg._cfg_dict):
            for key in ('data_root', 'ann_file'):
                if key in part:
                    for data_name, root in sets.items():
                        part[key] = part[key].replace(f'{folder}/{data_name}', str(root))

    reports = []
    for backbone in (mm.CPVTPyramid, mm.DenseCPVT):
        monkeypatch.setattr(backbone, 'log_load_report', lambda _, report: reports.append(report))
    runner = Runner.from_cfg(cfg)
    model = runner.train()
    assert downloads == ([] if name.startswith('demo/') else [init_cfg.checkpoint])
    if init_cfg:
        columnar = cfg.model.backbone.type == 'DenseCPVT'
        new = ('pos_block.', 'levels.') if columnar else 'norm_list.'
        assert all(kept.startswith(new) for kept in reports[0].kept)
    parameters = dict(model.named_parameters())
    idle = [k for k, v in parameters.items() if v not in runner.optim_wrapper.optimizer.state]
    assert idle == []
    assert all(value.sum().isfinite() for value in parameters.values())
    for key in cfg.optim_wrapper.get('paramwise_cfg', {}).get('custom_keys', {}):
        assert any(key in parameter for parameter in parameters), key

    metrics = {k.removeprefix('val/') for k in runner.message_hub.log_scalars}
    assert {'coco/bbox_mAP', 'mIoU'} & metrics
    assert ('coco/segm_mAP' in metrics) == name.startswith('mask_rcnn')
    with torch.no_grad():
        result, *_ = model.eval().test_step(next(iter(runner.val_loop.dataloader)))
    if cfg.default_scope == 'mmseg':
        assert result.pred_sem_seg.data.shape[-2:] == result.ori_shape
    else:
        assert result.pred_instances.bboxes.isfinite().all()
    if 'mask_head' in cfg.model.get('roi_head', {}):
        assert result.pred_instances.masks.shape[-2:] == result.ori_shape


def test_metafile_lists_every_config_once_and_headers_tell_what_is_published():
    models = yaml.safe_load((ROOT / 'configs/metafile.yml').read_text())['Models']
    configs = [model['Config'] for model in models]
    assert sorted(configs) == [f'configs/{name}' for name in CONFIGS if '/' not in name]
    for model in models:
        header = ' '.join(re.findall('^#.*', (ROOT / model['Config']).read_text(), re.M))
        published = [v for result in model.get('Results', []) for v in result['Metrics'].values()]
        for value in published:
            assert re.search(rf'\b{value}\b', header), (model['Name'], value)
        if not published:
            assert re.search('no(thing)?.* is published', header, re.I), model['Name']
        if 'dist_train' in header:
            assert f'tools/dist_train.sh {model["Config"]} 8' in header


def test_installed_package_holds_what_mim_reads(tmp_path, monkeypatch):
    removed = tmp_path / 'cpvt_pyramid/removed.py'  # by a build of an earlier version
    removed.parent.mkdir()
    removed.touch()
    monkeypatch.chdir(ROOT)
    built = run(sys.executable, 'setup.py', '-q', 'build_py', '--build-lib', tmp_path)
    assert built.returncode == 0, built.stderr
    assert not removed.exists() and removed.with_name('py.typed').is_file()
    mim = tmp_path / 'cpvt_pyramid/.mim'
    [path] = yaml.safe_load((mim / 'model-index.yml').read_text())['Import']
    for model in yaml.safe_load((mim / path).read_text())['Models']:
        assert 'model' in Config.fromfile(mim / model['Config'])
    # The configs of trained models are found in the installed package, too.
    code = (
        'from cpvt_pyramid.tasks.trained import TRAINED\n'
        'for model in TRAINED.values():\n'
        '    assert ".mim" in str(model.config_path) and model.config_path.is_file(), model'
    )
    monkeypatch.chdir(tmp_path)
    found = run(sys.executable, '-c', code, PYTHONPATH=str(tmp_path))
    assert found.returncode == 0, found.stderr
