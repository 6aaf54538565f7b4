from pathlib import Path

import pytest


@pytest.fixture
def fcn(tmp_path: Path) -> Path:
    """A config without our backbone, fcn.py in the test's folder."""
    path = tmp_path / 'fcn.py'
    path.write_text("""
default_scope = 'mmseg'
model = dict(
    type='EncoderDecoder',
    backbone=dict(type='ResNetV1c', depth=50, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4)),
    decode_head=dict(type='FCNHead', in_channels=2048, in_index=3, channels=8, num_classes=3),
    test_cfg=dict(mode='whole'))
""")
    return path
