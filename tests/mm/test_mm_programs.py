"""The programs of the mm packages themselves, with configs that name our backbone."""

import runpy
import sys
from pathlib import Path

import mmdet
import mmseg
import pytest
from mmdet.apis import DetInferencer
from mmseg.apis import MMSegInferencer
from support import ORIGINAL_MM, ROOT, clear_global_instances, run

PACKAGES = {'detector': Path(mmdet.__file__).parent, 'segmentor': Path(mmseg.__file__).parent}
SHORT = {
    'detector': 'train_cfg = dict(max_epochs=1, val_interval=1)',
    'segmentor': """
train_cfg = dict(max_iters=2, val_interval=2)
default_hooks = dict(checkpoint=dict(interval=2))""",
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


@pytest.mark.parametrize('name', PACKAGES)
def test_train_test_and_infer(name, configs, sample_dataset, tmp_path, monkeypatch, capfd):
    """A training with evaluation, a test of its checkpoint, and an inference."""
    monkeypatch.chdir(tmp_path)
    # mmengine formats the config, which takes longer than this training.
    monkeypatch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (text, True))
    Path('config.py').write_text(f"_base_ = '{configs[name]}'\n{SHORT[name]}\n")

    def run_program(program: str, *arguments: str) -> str:
        path = str(PACKAGES[name] / '.mim/tools' / program)
        monkeypatch.setattr(sys, 'argv', [path, 'config.py', *arguments])
        runpy.run_path(path, run_name='__main__')
        clear_global_instances()
        return capfd.readouterr().out

    measure = {'detector': 'coco/bbox_mAP', 'segmentor': 'mIoU'}[name]
    assert measure in run_program('train.py', '--work-dir', 'out')
    weights = Path('out/last_checkpoint').read_text()
    assert measure in run_program('test.py', weights, '--work-dir', 'tested')
    inferencer = {'detector': DetInferencer, 'segmentor': MMSegInferencer}[name]
    model = inferencer('config.py', weights, device='cpu')
    image = str(next(sample_dataset.rglob('*.jpg')))
    assert len(model([image, image], batch_size=2)['predictions']) == 2
