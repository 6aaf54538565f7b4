"""The programs of the mm packages themselves, with a config of theirs that names our backbone."""

import runpy
import sys
from pathlib import Path

import mmdet
import mmseg
import pytest
from mmdet.apis import DetInferencer
from mmseg.apis import MMSegInferencer
from support import ORIGINAL_MM, ROOT, clear_global_instances, run
from tiny_mm import DIGITS

PACKAGES = {'detection': Path(mmdet.__file__).parent, 'segmentation': Path(mmseg.__file__).parent}
BASES = {
    'detection': 'retinanet/retinanet_r50_fpn_1x_coco.py',
    'segmentation': 'sem_fpn/fpn_r50_4xb4-160k_ade20k-512x512.py',
}
CONFIG = """
_base_ = '{base}'
custom_imports = dict(imports=['cpvt_pyramid.mm.{task}'])
model = dict(
    backbone=dict(_delete_=True, type='CPVTPyramid', arch='pcpvt_nano'),
    neck=dict(in_channels=[32, 64, 128, 192]))
optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=1e-3))
default_hooks = dict(logger=dict(interval=1))
here = dict(data_root='{data}', indices={indices})
loader = dict(num_workers=0, persistent_workers=False)
train_dataloader = dict(batch_size=2, **loader, dataset=here)
val_dataloader = dict(**loader, dataset=here)
test_dataloader = val_dataloader
"""
OF_TASK = {
    'detection': """
size = [dict(type='Resize', scale=(160, 96), keep_ratio=True)]
load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)]
pack = [dict(type='PackDetInputs')]
names = dict(metainfo=dict(classes={classes}))
model.update(
    data_preprocessor=dict(type='ValidRegionDetDataPreprocessor'), bbox_head=dict(num_classes=10),
    test_cfg=dict(score_thr=0.0))
train_dataloader['dataset'] = dict(**here, **names, pipeline=load + size + pack)
val_dataloader['dataset'] = dict(**here, **names, pipeline=load[:1] + size + load[1:] + pack)
val_evaluator = dict(ann_file='{data}/annotations/instances_val2017.json')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1)
""",
    'segmentation': """
load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True)]
size = [dict(type='Resize', scale=(160, 96), keep_ratio=False)]
pack = [dict(type='PackSegInputs')]
norm = dict(type='BN', requires_grad=True)
model.update(
    pretrained=None, data_preprocessor=dict(type='ValidRegionSegDataPreProcessor', size=(96, 160)),
    decode_head=dict(norm_cfg=norm))
train_dataloader['dataset'] = dict(**here, pipeline=load + size + pack)
val_dataloader['dataset'] = dict(**here, pipeline=load[:1] + size + load[1:] + pack)
train_cfg = dict(max_iters=2, val_interval=2)
default_hooks['checkpoint'] = dict(interval=2)
""",
}


WITHOUT_OPERATORS = """
import sys

sys.modules['mmcv._ext'] = None  # as where they are not compiled
sys.modules['timm'] = None  # slow to import
import torch
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, Registry, init_default_scope
from mmengine.structures import PixelData

host = Registry('model', parent=MODELS, scope='host', locations=['json'])
print(host.build(dict(type='cpvt_pyramid.CPVTPyramid', arch='pcpvt_nano')).channels)

import cpvt_pyramid.mm.segmentation
import mmseg.models
from mmseg.structures import SegDataSample

init_default_scope('mmseg')
for path in sys.argv[1:]:
    cfg = Config.fromfile(path).model
    cfg.backbone.update(arch='pcpvt_nano', init_cfg=None)
    cfg.data_preprocessor.size = (64, 64)
    (cfg.get('neck') or cfg.decode_head).in_channels = [32, 64, 128, 192]
    cfg.update(auxiliary_head=None)
    cfg.decode_head.channels = 64
    model = MODELS.build(cfg)
    image = torch.randint(256, (3, 64, 64), dtype=torch.uint8)
    sample = SegDataSample(metainfo=dict(img_shape=(64, 64), ori_shape=(64, 64)))
    sample.gt_sem_seg = PixelData(data=(image[:1] % 11).long())
    data = {'inputs': [image] * 2, 'data_samples': [sample] * 2}
    model.train().train_step(data, OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert len(model.eval().test_step(data)) == 2
"""


def test_scoped_names_need_no_imports_and_segmentors_no_compiled_operators():
    paths = [ROOT / f'configs/{name}.py' for name in ('semantic_fpn_pvt_t', 'upernet_svt_s')]
    done = run(sys.executable, '-c', WITHOUT_OPERATORS, *paths)
    assert '(32, 64, 128, 192)' in done.stdout, done.stderr
    if ORIGINAL_MM:  # imports them for some heads
        assert 'mmcv._ext' in done.stderr
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('task', list(PACKAGES))
def test_train_test_and_infer(task, sample_dataset, tmp_path, monkeypatch, capfd):
    """A training with evaluation, a test of its checkpoint, and an inference."""
    monkeypatch.chdir(tmp_path)
    # mmengine formats the config, which takes longer than this training.
    monkeypatch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (text, True))
    package, data = PACKAGES[task] / '.mim', sample_dataset / 'coco'
    if task == 'segmentation':
        data = sample_dataset / 'ade/ADEChallengeData2016'
    values = dict(base=package / 'configs' / BASES[task], task=task, data=data, indices=4)
    Path('config.py').write_text((CONFIG + OF_TASK[task]).format(**values, classes=DIGITS))

    def run_program(name: str, *arguments: str) -> str:
        path = str(package / 'tools' / name)
        monkeypatch.setattr(sys, 'argv', [path, 'config.py', *arguments])
        runpy.run_path(path, run_name='__main__')
        clear_global_instances()
        return capfd.readouterr().out

    measure = {'detection': 'coco/bbox_mAP', 'segmentation': 'mIoU'}[task]
    assert measure in run_program('train.py', '--work-dir', 'out')
    weights = Path('out/last_checkpoint').read_text()
    assert measure in run_program('test.py', weights, '--work-dir', 'tested')
    image = str(next(data.rglob('*.jpg')))
    inferencer = {'detection': DetInferencer, 'segmentation': MMSegInferencer}[task]
    model = inferencer('config.py', weights, device='cpu')
    assert len(model([image, image], batch_size=2)['predictions']) == 2
