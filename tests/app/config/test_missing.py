"""Without a package of OpenMMLab, commands say which one is missing and how to install it."""

import subprocess
import sys

from support import ROOT

from cpvt_pyramid.app.config.parts import OPENMMLAB_NEEDED

# A process in which mmcv cannot be imported.
WITHOUT_MMCV = """
import sys
sys.modules['mmcv'] = None
from cpvt_pyramid.app.commands.check_data import main
assert [main([path]) for path in sys.argv[1:]] == [2, 2]
"""
# As one of MMDetection: without custom imports.
PLAIN = """
default_scope = 'mmdet'
model = dict(type='RetinaNet')
dataset = dict(type='CocoDataset', data_root='.', ann_file='a.json', data_prefix=dict(img=''))
train_dataloader = dict(batch_size=1, dataset=dataset)
"""


def test_without_mmcv(tmp_path):
    """With a config of MMDetection, and with one of ours."""
    (tmp_path / 'plain.py').write_text(PLAIN)
    (tmp_path / 'a.json').write_text('{}')
    configs = [tmp_path / 'plain.py', ROOT / 'configs/retinanet_cpvt_s.py']
    done = subprocess.run(
        [sys.executable, '-c', WITHOUT_MMCV, *map(str, configs)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done
    assert 'Traceback' not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith('cpvt check-data: ')]
    assert len(lines) == 2
    for line in lines:
        assert 'mmcv' in line and line.endswith(f'; {OPENMMLAB_NEEDED}')
