"""The programs of the mm packages themselves, with configs that name our backbone."""

import runpy
import sys
from pathlib import Path

import mmdet
import mmseg
import pytest
from mmdet.apis import DetInferencer
from mmseg.apis import MMSegInferencer
from support import clear_global_instances
from tiny_mm import variables_of_programs

PACKAGES = {'detector': Path(mmdet.__file__).parent, 'segmentor': Path(mmseg.__file__).parent}
SHORT = {
    'detector': 'train_cfg = dict(max_epochs=1, val_interval=1)',
    'segmentor': """
train_cfg = dict(max_iters=2, val_interval=2)
default_hooks = dict(checkpoint=dict(interval=2))""",
}


@pytest.mark.usefixtures('quick_training')
@pytest.mark.parametrize('name', PACKAGES)
def test_train_test_and_infer(name, configs, sample_dataset, tmp_path, monkeypatch, capfd):
    """A training with evaluation, a test of its checkpoint, and an inference."""
    monkeypatch.chdir(tmp_path)
    for variable, value in variables_of_programs().items():
        monkeypatch.setenv(variable, value)
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
