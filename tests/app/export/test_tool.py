"""cpvt export: what it is asked, what it refuses, in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmcv.transforms import LoadImageFromFile
from mmdet.datasets import CocoDataset
from mmdet.datasets.transforms import PackDetInputs, Resize
from mmdet.models import RetinaNet
from mmengine.config import Config
from PIL import Image
from support import ROOT, load_tool
from torch import nn

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.export.exporting import about_config, own_photographs, resize_of
from cpvt_pyramid.app.export.files import CPU, Written
from cpvt_pyramid.app.export.photographs import PHOTOGRAPHS
from cpvt_pyramid.app.export.self_test import draw
from cpvt_pyramid.app.predict.openmmlab.loading import build_model
from cpvt_pyramid.app.predict.sessions import OnnxRuntime
from tests.models.patches import Patches
from tests.models.ports import randomize

tool = load_tool('export')


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    torch.save(CPVTPyramid('pcpvt_nano').state_dict(), 'weights.pth')
    return ['pcpvt_nano', 'weights.pth', '--out']


def test_a_backbone_needs_no_mm():
    """What the command imports for the name of an architecture."""
    code = 'sys.modules.update(mmengine=None, mmcv=None, mmdet=None, mmseg=None)'
    code = f'import sys; {code}; from cpvt_pyramid.app.export import exporting'
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)


TINY = dict(dims=[8, 16, 32, 32], heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2), depths=(1, 1, 1, 1))
NAMES = ('a', 'b', 'c', 'd', 'e')
CONFIGS = {
    'segmentor': f"""
_base_ = '{ROOT}/configs/semantic_fpn_cpvt_s.py'
model = dict(
    backbone=dict(arch=dict(_delete_=True, **{TINY}), out_indices=(3,), init_cfg=None),
    neck=dict(in_channels={TINY['dims'][3:]}, out_channels=16, num_outs=1),
    decode_head=dict(
        in_channels=[16], in_index=(0,), feature_strides=[32], channels=16, num_classes=5))
test_dataloader = dict(dataset=dict(metainfo=dict(classes={NAMES})))
""",
    'detector': f"""
_base_ = '{ROOT}/configs/retinanet_cpvt_s.py'
model = dict(
    backbone=dict(arch=dict(_delete_=True, **{TINY}), out_indices=(2, 3), init_cfg=None),
    neck=dict(in_channels={TINY['dims'][2:]}, start_level=0, out_channels=16, num_outs=2),
    bbox_head=dict(
        in_channels=16, feat_channels=16, stacked_convs=1, num_classes=5,
        anchor_generator=dict(strides=[16, 32])),
    test_cfg=dict(score_thr=0.95, nms_pre=500, max_per_img=60))
test_dataloader = dict(dataset=dict(metainfo=dict(classes={NAMES})))
""",
}


def build_fast(cfg: Config, device: str) -> nn.Module:
    """A model with a backbone that is captured in no time; `test_files.py` captures our own."""
    model = build_model(cfg, device)
    model.backbone = Patches(model.backbone)
    return model


def write_config(name: str) -> list[str]:
    """Write a config and weights for it; returns both paths."""
    Path(f'{name}.py').write_text(CONFIGS[name])
    model = build_fast(load_config(f'{name}.py', []), 'cpu')
    torch.save(randomize(model, seed=1).state_dict(), 'random.pth')
    return [f'{name}.py', 'random.pth']


SIZE = ['--size', '64x96']
OPTIONS = {
    # By what is exported and the options; the inputs and outputs that the file must have.
    ('segmentor',): ('images original', 'labels'),
    ('segmentor', '--half', '--probabilities', '--images', 'photo.png', *SIZE): (
        'images valid',
        'probabilities',
    ),
    ('segmentor', '--backbone', '--no-valid', *SIZE): ('images', 'map_0'),
    ('detector', '--cfg-options', 'model.test_cfg.max_per_img=7'): (
        'images valid',
        'boxes scores labels',
    ),
}


@pytest.mark.parametrize('given', OPTIONS, ids=' '.join)
def test_every_option_from_the_command_to_the_file(given, command, capsys, monkeypatch):
    """Each file is compared with PyTorch by the command."""
    monkeypatch.setattr('cpvt_pyramid.app.predict.openmmlab.model.build_model', build_fast)
    name, *options = given
    model = write_config(name)
    Image.fromarray(draw(0, 80, 120)).save('photo.png')
    assert tool.main([*model, '--out', 'model.onnx', *options]) == 0, capsys.readouterr().err
    assert 'wrote model.onnx' in capsys.readouterr().out
    session = OnnxRuntime(Path('model.onnx'), CPU)
    about = json.loads(session.metadata)
    inputs, outputs = (text.split() for text in OPTIONS[given])
    assert list(session.shapes) == about['inputs'] == inputs
    assert session.names == about['outputs'] == outputs
    assert about['size'] == ([64, 96] if '--size' in options else None)
    assert about['dtype'] == ('float16' if '--half' in options else 'float32')
    if '--cfg-options' in options:
        assert about['nms']['max_per_img'] == 7
    assert about['classes'] == list(NAMES)


def test_types_of_a_config_may_be_classes():
    """As in configs in pure Python."""
    resize = dict(type=Resize, scale=(1333, 800), keep_ratio=True)
    pipeline = [dict(type=LoadImageFromFile), resize, dict(type=PackDetInputs)]
    data = dict(type=CocoDataset, metainfo=dict(classes=('a', 'b')), pipeline=pipeline)
    model = dict(type=RetinaNet, backbone=dict(type=CPVTPyramid, arch='pcpvt_nano'))
    cfg = Config(dict(model=model, test_dataloader=dict(dataset=data), default_scope='mmdet'))
    about = about_config(cfg, {})
    assert about['arch'] == 'RetinaNet, CPVTPyramid pcpvt_nano'
    assert about['resize'] == {'short': 800, 'long': 1333} and about['classes'] == ['a', 'b']
    cfg.test_dataloader.dataset.pipeline[1].scale = 512  # mmcv takes it for both sides
    assert about_config(cfg, {})['resize'] == {'short': 512, 'long': 512}


CONFIG_FILES = [
    *('retinanet_cpvt_s', 'semantic_fpn_cpvt_s', 'segformer_b3_cityscapes', 'dino_cpvt_s'),
    *(f'demo/{path.stem}' for path in sorted((ROOT / 'configs/demo').glob('*.py'))),
]


@pytest.mark.parametrize('name', CONFIG_FILES)
def test_shipped_configs_only_resize(name, recwarn):
    """`Resize(scale_factor=1.0)` of the trees resizes nothing, and needs no warning."""
    cfg = Config.fromfile(ROOT / f'configs/{name}.py')
    resize = about_config(cfg, {})['resize']
    assert not [warning for warning in recwarn if 'test pipeline' in str(warning.message)]
    assert (resize is None) == ('trees' in name)


@pytest.mark.parametrize(
    'step',
    [
        dict(type='Resize', scale_factor=0.5),
        dict(type='Resize', scale_factor=(1.0, 0.5)),
        dict(type='Resize', scale=(100, 200)),
        dict(type='CenterCrop', crop_size=9),
    ],
    ids=str,
)
def test_other_steps_are_named(step):
    with pytest.warns(UserWarning, match=f'has a step .*{step["type"]}'):
        assert resize_of([dict(type='LoadImageFromFile'), step]) is None


def test_a_config_without_test_data_is_refused(command, capsys):
    Path('segmentor.py').write_text(CONFIGS['segmentor'])
    options = ['--out', 'model.onnx', '--cfg-options', 'test_dataloader=None']
    assert tool.main(['segmentor.py', 'weights.pth', *options]) == 2
    line = 'cpvt export: the config must set test_dataloader\n'
    assert capsys.readouterr().err == line


def test_damaged_files_of_the_test_set_are_left_out(tmp_path):
    for number in range(PHOTOGRAPHS + 2):
        Image.fromarray(draw(number, 8, 12)).save(tmp_path / f'{number}.png')
    (tmp_path / '0.png').write_bytes(b'no image')
    with pytest.warns(UserWarning, match='left out of the comparison: .*0.png'):
        images = own_photographs(tmp_path)
    assert len(images) == PHOTOGRAPHS and (images[0] == draw(1, 8, 12)).all()


def test_a_file_that_fails_in_openvino_has_another_status(command, capsys, monkeypatch):
    line = 'do not use the file in OpenVINO: runtime: no kernel'

    def write(path: Path, *given: object) -> Written:
        return Written([path], line)

    monkeypatch.setattr('cpvt_pyramid.app.export.exporting.write_verified', write)
    assert tool.main([*command, 'nano.onnx']) == 3
    assert capsys.readouterr().out.splitlines() == ['wrote nano.onnx', line]


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['model.pt'], 'must end in .onnx'),
        (['model.onnx', '--probabilities'], '--probabilities needs a segmentor'),
        (['model.onnx', '--images', 'nothing.jpg'], 'no image or folder at nothing.jpg'),
        (['model.onnx', '--images', 'clip.mp4'], '--images takes images, got the video clip.mp4'),
        (['model.onnx', '--images', 'weights.pth'], '--images weights.pth: not an image'),
        (['model.onnx', '--cfg-options', 'a=1'], 'pcpvt_nano is an architecture'),
    ],
    ids=str,
)
def test_refusals(options, message, command, capsys):
    assert tool.main([*command, *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert [path.name for path in Path().iterdir()] == ['weights.pth']


def test_without_its_packages_the_command_says_what_to_install(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'onnx', None)
    for name in ('exporting', 'files', 'onnx_file', 'onnx_mlp', 'onnx_attention'):
        monkeypatch.delitem(sys.modules, f'cpvt_pyramid.app.export.{name}', raising=False)
    with pytest.raises(SystemExit) as stopped:
        tool.main([*command, 'model.onnx'])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert line.startswith('cpvt export: ') and line.endswith("; pip install '.[export]'")
