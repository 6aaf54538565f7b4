"""Without a package of OpenMMLab, commands say which one is missing and how to install it."""

import subprocess
import sys

import pytest
from support import ROOT

from cpvt_pyramid.app.config.parts import OPENMMLAB_NEEDED

# A process in which mmcv cannot be imported.
WITHOUT_MMCV = """
import sys
sys.modules['mmcv'] = None
from importlib import import_module
sys.exit(import_module(f'cpvt_pyramid.app.commands.{sys.argv[1]}').main(sys.argv[2:]))
"""
# As one of MMDetection: without custom imports.
PLAIN = """
default_scope = 'mmdet'
model = dict(type='RetinaNet')
dataset = dict(type='CocoDataset', data_root='.', ann_file='a.json', data_prefix=dict(img=''))
train_dataloader = dict(batch_size=1, dataset=dataset)
"""


@pytest.mark.parametrize('config', ['plain', 'ours'])
def test_without_mmcv(config, tmp_path):
    path = ROOT / 'configs/retinanet_cpvt_s.py'
    if config == 'plain':
        path = tmp_path / 'plain.py'
        path.write_text(PLAIN)
        (tmp_path / 'a.json').write_text('{}')
    done = subprocess.run(
        [sys.executable, '-c', WITHOUT_MMCV, 'check_data', str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done
    line = done.stderr.splitlines()[-1]
    assert line.startswith('cpvt check-data: ') and 'mmcv' in line
    assert line.endswith(f'; {OPENMMLAB_NEEDED}')
