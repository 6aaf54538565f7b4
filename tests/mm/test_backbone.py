"""The registered class: found by name from every family, and initialized by mmengine."""

import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from mmdet.registry import MODELS as MMDET
from mmengine.registry import MODELS as ROOT
from mmengine.registry import DefaultScope
from mmengine.runner import load_checkpoint, turn_on_activation_checkpointing
from mmpretrain.registry import MODELS as MMPRETRAIN
from mmseg.registry import MODELS as MMSEG
from reference import same_maps
from safetensors.torch import save_file
from support import ROOT as CHECKOUT
from support import assert_loaded, run

import cpvt_pyramid
from cpvt_pyramid import mm
from cpvt_pyramid.mm import CPVTPyramid, backbone
from cpvt_pyramid.mm.amp import bfloat16
from cpvt_pyramid.mm.valid_region import with_validity
from tests.models.ports import randomize

CONFIGS = CHECKOUT / 'configs'


def nano_weights(seed: int = 5) -> dict:
    return randomize(cpvt_pyramid.CPVTPyramid('pcpvt_nano'), seed).state_dict()


def assert_initialized(init_cfg: dict, weights: dict) -> None:
    model = CPVTPyramid('pcpvt_nano', init_cfg=init_cfg)
    model.init_weights()
    assert_loaded(model, weights)


@pytest.mark.parametrize('registry', [ROOT, MMDET, MMSEG, MMPRETRAIN], ids=lambda r: r.scope)
@pytest.mark.parametrize('scope', ['', 'cpvt_pyramid.'])
def test_built_by_name(registry, scope):
    before = DefaultScope.get_current_instance()
    pyramid = dict(type=f'{scope}CPVTPyramid', arch='pcpvt_nano', drop_path_rate=0.1)
    model = registry.build(pyramid)
    assert type(model) is CPVTPyramid and model.blocks[3][1].drop_path.rate == 0.1
    column = dict(type=f'{scope}DenseCPVT', arch='cpvt_tiny', peg=dict(after=[0, 1]))
    model = registry.build(column)
    assert isinstance(model, cpvt_pyramid.DenseCPVT) and list(model.pos_block) == ['0', '1']
    with pytest.raises(TypeError, match='drop_path'):
        registry.build(dict(type=f'{scope}CPVTPyramid', arch='pcpvt_nano', drop_path=0.1))
    assert DefaultScope.get_current_instance() is before


@pytest.mark.parametrize(
    'kind, arch',
    [
        ('CPVTPyramid', 'pcpvt_nano'),
        ('DenseCPVT', dict(dim=16, heads=2, depth=2, patch_size=8)),
    ],
)
def test_maps_are_the_core_models_but_contiguous(kind, arch):
    """mmcv's operators read raw NCHW memory. A channels-last view silently gives wrong results."""
    core = randomize(getattr(cpvt_pyramid, kind)(arch)).eval()
    model = getattr(mm, kind)(arch).eval()
    model.load_state_dict(core.state_dict())
    images = torch.randn(2, 3, 45, 67)
    with torch.no_grad():
        sizes = [(45, 67), (20, 50)]
        for batch, valid in (images, None), (with_validity(images, sizes), torch.tensor(sizes)):
            maps = model(batch)
            same_maps(maps, core(images, valid), rtol=0, atol=0)
            assert all(x.is_contiguous() for x in maps)
            assert all(type(x) is torch.Tensor for x in maps)  # no subclass that knows the padding


def test_windows_that_lie_wholly_in_the_padding():
    """Sliding windows crop the validity channel with the image."""
    model = randomize(CPVTPyramid('pcpvt_nano')).eval()
    batch = with_validity(torch.randn(2, 3, 64, 96), [(64, 96), (30, 40)])
    with torch.no_grad():
        for top, left in ((0, 0), (0, 48), (32, 0), (32, 48)):
            window = batch[:, :, top : top + 32, left : left + 48]
            for x in model(window):
                assert x.isfinite().all()
                inside = (30 > top) and (40 > left)
                assert x[1].any() == inside


def test_exported_graphs():
    model = CPVTPyramid('pcpvt_nano').eval()
    batch = with_validity(torch.randn(2, 3, 64, 96), [(33, 96), (64, 20)])
    with torch.no_grad():
        expected = model(batch)
        traced = torch.jit.trace(model, batch, check_trace=False)
        exported = torch.export.export(model, (batch,)).module()
        same_maps(traced(batch), expected)
        same_maps(exported(batch), expected)


@pytest.mark.parametrize('suffix', ['pth', 'safetensors'])
@pytest.mark.parametrize('prefix', ['backbone.', 'backbone', None])
def test_pretrained(tmp_path, suffix, prefix):
    """mmdet's PVT and Swin ignore the prefix, or fail on a plain state dict."""
    weights = nano_weights()
    path = str(tmp_path / f'checkpoint.{suffix}')
    inside = {f'backbone.{k}': v for k, v in weights.items()} | {'neck.weight': torch.ones(2)}
    save_file(inside, path) if suffix == 'safetensors' else torch.save(inside, path)
    # Without a prefix the backbone is taken out of a detector.
    options = dict(prefix=prefix) if prefix else {}
    assert_initialized(dict(type='Pretrained', checkpoint=path, **options), weights)
    detector = torch.nn.Module()
    detector.backbone = CPVTPyramid('pcpvt_nano')
    load_checkpoint(detector, path)  # as `load_from` does
    assert_loaded(detector.backbone, weights)


def test_report_of_what_loaded(tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(backbone, 'print_log', lambda message, **_: printed.append(message))
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'))
    weights = nano_weights()
    torch.save({'state_dict': weights, 'meta': {}}, tmp_path / 'a.pth')
    assert_initialized(init_cfg, weights)
    printed.clear()
    torch.save(weights | {'extra.weight': torch.ones(1)}, tmp_path / 'a.pth')
    CPVTPyramid('pcpvt_nano', stage_norm=True, init_cfg=init_cfg).init_weights()
    (out,) = printed
    assert 'norm_list.0.weight' in out and 'extra.weight' in out
    torch.save({'conv1.weight': torch.ones(3), 'fc.bias': torch.ones(2)}, tmp_path / 'a.pth')
    with pytest.raises(ValueError, match='no tensor of this backbone, but conv1.weight, fc.bias'):
        CPVTPyramid('pcpvt_nano', init_cfg=init_cfg).init_weights()


IN_A_NEW_PROCESS = """
import logging, os, signal, sys, warnings

sys.modules['timm'] = None  # slow to import
import mmengine.hooks, mmengine.model, mmengine.optim, mmengine.runner, safetensors.torch
import PIL.Image, PIL.ImageFile, PIL.TiffImagePlugin
import torch
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, Registry, init_default_scope, root
from mmengine.runner import CheckpointLoader
from mmengine.structures import PixelData
from torch.nn.modules import module

CLASSES = (
    torch.Tensor, torch.nn.Module, torch.nn.Conv2d, torch.nn.Linear, mmengine.runner.Runner,
    mmengine.optim.OptimWrapper, mmengine.model.BaseModule)

def state():
    registries = [r for r in vars(root).values() if isinstance(r, Registry)]
    loggers = {'root': logging.root, **logging.root.manager.loggerDict}
    return {
        *(f'{r.name} {name} {id(x)}' for r in registries for name, x in r.module_dict.items()),
        *(f'{r.name} {scope}' for r in registries for scope in r.children),
        *(f'scheme {k} {id(v)}' for k, v in CheckpointLoader._schemes.items()),
        *(f'{k} {v}' for k, v in os.environ.items()),
        *(f'{k} {v}' for k, v in vars(module).items() if k.startswith('_global_')),
        *(f'{k} {v} {getattr(v, "handlers", 0)}' for k, v in loggers.items() if 'cpvt' not in k),
        *map(str, warnings.filters),
        *(f'finder {finder}' for finder in sys.meta_path),
        str((torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
             torch.are_deterministic_algorithms_enabled(), torch.get_rng_state(),
             torch.get_float32_matmul_precision(), torch.is_anomaly_enabled(),
             torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark,
             torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled,
             torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())),
        *(f'{c} {k} {id(v)}' for c in CLASSES for k, v in vars(c).items() if callable(v)),
        str((sys.excepthook, signal.getsignal(signal.SIGTERM), sys.path)),
    }

host = Registry('model', parent=MODELS, scope='host', locations=['json'])
before = state()
with torch.random.fork_rng():
    built = host.build(dict(type='cpvt_pyramid.CPVTPyramid', arch='pcpvt_nano'))
after = state()
assert built.channels == (32, 64, 128, 192)
assert before <= after, before - after
assert not [name for name in sys.modules if name.startswith('cpvt_pyramid.app')]
print(*(entry.rpartition(' ')[0] for entry in after - before), sep='\\n')
print('plugin imported')

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


@pytest.fixture(scope='module')
def new_process():
    paths = [CONFIGS / f'{name}.py' for name in ('semantic_fpn_pvt_t', 'upernet_svt_s')]
    return run(sys.executable, '-c', IN_A_NEW_PROCESS, *paths)


def test_a_scoped_name_imports_the_plugin_alone_which_registers_names_and_changes_nothing_else(
    new_process,
):
    added, end, _ = new_process.stdout.partition('plugin imported')
    assert end, new_process.stderr
    added = added.splitlines()
    assert 'model CPVTPyramid' in added and 'scheme timm://' in added
    kinds = ('model', 'hook', 'optimizer wrapper constructor', 'optim_wrapper', 'scheme', 'finder')
    assert not [entry for entry in added if not entry.startswith(kinds)]
    assert sum(entry.startswith('finder') for entry in added) == 1  # of mmcv's operators


def test_segmentors_train_in_a_program_that_imports_the_plugin(new_process):
    assert new_process.returncode == 0, new_process.stderr


def test_a_fourth_channel_is_checked_until_a_padded_batch_has_passed():
    """Others were taken for the validity, and the features of half of the image became zero. An
    opaque alpha channel proves nothing. Each check waits for the GPU."""
    model, image = CPVTPyramid('pcpvt_nano').eval(), torch.randn(2, 4, 64, 64)
    with mock.patch.object(backbone, 'check_validity', wraps=backbone.check_validity) as check:
        image[:, 3] = 1
        model(image)
        for fourth in (0.7, torch.ones(64, 64).index_fill(0, torch.arange(20, 30), 0)):
            image[:, 3] = fourth  # half-transparent; a hole
            with pytest.raises(ValueError, match='in_channels=3 and the last .* set in_channels=4'):
                model(image)
            CPVTPyramid('pcpvt_nano', in_channels=4)(image)
        image[:, 3] = 1
        image[:, 3, 40:] = 0
        for _ in range(3):
            model(image)
    assert check.call_count == 4


@pytest.mark.parametrize('context', [bfloat16, nullcontext])
def test_activation_checkpointing_of_mmengine_is_an_error(context):
    """It is reentrant, and an image has no gradient: the backbone silently did not train."""
    model = torch.nn.Module()
    model.backbone = CPVTPyramid('pcpvt_nano')
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad(), context(model):  # as a teacher in training mode
        model.backbone(image)
    turn_on_activation_checkpointing(model, ['backbone'])
    with context(model), pytest.raises(ValueError, match='set model.backbone.with_cp=True instead'):
        model.backbone(image)
    model.eval()
    with torch.no_grad(), context(model):
        model.backbone(image)
