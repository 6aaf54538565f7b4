"""The registered class: found by name from every family, and initialized by mmengine."""

import subprocess
import sys
from urllib.error import URLError

import pytest
import torch
from mmdet.registry import MODELS as MMDET
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS as ROOT
from mmengine.registry import DefaultScope
from mmengine.runner import CheckpointLoader, load_checkpoint
from mmpretrain.registry import MODELS as MMPRETRAIN
from mmseg.registry import MODELS as MMSEG
from reference import randomize, same_maps
from safetensors.torch import save_file

import cpvt_pyramid
from cpvt_pyramid.mm import CPVTPyramid, backbone, checkpoints
from cpvt_pyramid.mm.valid_region import with_validity


def nano_weights(seed: int = 5) -> dict:
    return randomize(cpvt_pyramid.CPVTPyramid('pcpvt_nano'), seed).state_dict()


def assert_initialized(model: CPVTPyramid, weights: dict) -> None:
    model.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize('registry', [ROOT, MMDET, MMSEG, MMPRETRAIN], ids=lambda r: r.scope)
@pytest.mark.parametrize('name', ['CPVTPyramid', 'cpvt_pyramid.CPVTPyramid'])
def test_built_by_name(registry, name):
    model = registry.build(dict(type=name, arch='pcpvt_nano', drop_path_rate=0.1))
    assert type(model) is CPVTPyramid
    assert model.blocks[3][1].drop_path.rate == 0.1


@pytest.mark.parametrize('registry', [ROOT, MMDET, MMSEG, MMPRETRAIN], ids=lambda r: r.scope)
@pytest.mark.parametrize('name', ['CPVT', 'cpvt_pyramid.CPVT'])
def test_columnar_model_is_built_by_name(registry, name):
    model = registry.build(dict(type=name, arch='cpvt_tiny', peg=dict(after=[0, 1])))
    assert isinstance(model, cpvt_pyramid.DenseCPVT) and list(model.pos_block) == ['0', '1']


def test_columnar_model_from_a_classifier_in_a_padded_batch(tmp_path):
    arch = dict(dim=16, heads=2, depth=2, patch_size=8)
    classifier = randomize(cpvt_pyramid.CPVT(arch, num_classes=5))
    torch.save({'model': classifier.state_dict()}, tmp_path / 'classifier.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'classifier.pth'))
    model = backbone.CPVT(arch, init_cfg=init_cfg).eval()
    model.init_weights()
    assert torch.equal(model.blocks[1].attn.qkv.weight, classifier.blocks[1].attn.qkv.weight)
    images = torch.randn(2, 3, 40, 50)
    sizes = [(40, 33), (21, 50)]
    with torch.no_grad():
        maps = model(with_validity(images, sizes))
        same_maps(maps, model(images, torch.tensor(sizes)), rtol=0, atol=0)
        same_maps([x[:1, :, :, :9] for x in maps[1:2]], model(images[:1, :, :40, :33])[1:2])


@pytest.mark.parametrize('scope', ['mmdet', 'mmseg'])
def test_scoped_name_needs_no_custom_imports(scope):
    code = (
        f'from {scope}.registry import MODELS\n'
        'model = MODELS.build(dict(type="cpvt_pyramid.CPVTPyramid", arch="pcpvt_nano"))\n'
        'print(model.channels)'
    )
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert out.stdout.strip().endswith('(32, 64, 128, 192)'), out.stderr


def test_is_the_core_model():
    core = randomize(cpvt_pyramid.CPVTPyramid('pcpvt_nano')).eval()
    model = CPVTPyramid('pcpvt_nano').eval()
    model.load_state_dict(core.state_dict())
    image = torch.randn(1, 3, 45, 67)
    with torch.no_grad():
        same_maps(model(image), core(image), rtol=0, atol=0)


def test_unknown_arguments_fail():
    with pytest.raises(TypeError, match='drop_path'):
        MMDET.build(dict(type='CPVTPyramid', arch='pcpvt_nano', drop_path=0.1))


@pytest.mark.parametrize('suffix', ['pth', 'safetensors'])
@pytest.mark.parametrize('prefix', [None, 'backbone.', 'backbone'])
def test_pretrained(tmp_path, suffix, prefix):
    """mmdet's PVT and Swin ignore the prefix, or fail on a plain state dict."""
    weights = nano_weights()
    inside = {f'backbone.{k}' if prefix else k: v for k, v in weights.items()}
    path = tmp_path / f'checkpoint.{suffix}'
    save_file(inside, path) if suffix == 'safetensors' else torch.save(inside, path)
    init_cfg = dict(type='Pretrained', checkpoint=str(path))
    if prefix:
        init_cfg['prefix'] = prefix
    assert_initialized(CPVTPyramid('pcpvt_nano', init_cfg=init_cfg), weights)


def test_pretrained_takes_the_backbone_out_of_a_detector(tmp_path):
    weights = nano_weights()
    detector = {f'backbone.{k}': v for k, v in weights.items()} | {'neck.weight': torch.ones(2)}
    torch.save({'state_dict': detector, 'meta': {}}, tmp_path / 'detector.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'detector.pth'))
    assert_initialized(CPVTPyramid('pcpvt_nano', init_cfg=init_cfg), weights)


def test_load_from_fills_the_backbone_of_a_detector(tmp_path):
    weights = nano_weights()
    torch.save({'state_dict': {f'backbone.{k}': v for k, v in weights.items()}}, tmp_path / 'a.pth')
    detector = torch.nn.Module()
    detector.backbone = CPVTPyramid('pcpvt_nano')
    load_checkpoint(detector, str(tmp_path / 'a.pth'))
    for name, value in detector.backbone.state_dict().items():
        assert torch.equal(value, weights[name])


def test_report_of_what_loaded(tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(backbone, 'print_log', lambda message, **_: printed.append(message))
    weights = nano_weights()
    weights.pop('pos_block.3.proj.0.bias')
    torch.save(weights | {'extra.weight': torch.ones(1)}, tmp_path / 'a.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'))
    CPVTPyramid('pcpvt_nano', init_cfg=init_cfg).init_weights()
    (out,) = printed
    total = len(weights) + 1
    assert f'loaded {total - 1} of {total} tensors of the backbone' in out
    assert 'not in the checkpoint and left as they were: pos_block.3.proj.0.bias' in out
    assert 'not in the model: extra.weight' in out


def test_almost_nothing_matches(tmp_path):
    torch.save({'conv1.weight': torch.ones(3), 'fc.bias': torch.ones(2)}, tmp_path / 'a.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'))
    with pytest.raises(ValueError, match='no tensor of this backbone, but conv1.weight, fc.bias'):
        CPVTPyramid('pcpvt_nano', init_cfg=init_cfg).init_weights()


def test_timm_names_are_fetched_from_the_hub(tmp_path, monkeypatch):
    weights = nano_weights()
    save_file(weights, tmp_path / 'model.safetensors')
    asked = []

    def download(*args: str) -> str:
        asked.append(args)
        return str(tmp_path / 'model.safetensors')

    monkeypatch.setattr('huggingface_hub.hf_hub_download', download)
    init_cfg = dict(type='Pretrained', checkpoint='timm://twins_pcpvt_nano.in1k')
    assert_initialized(CPVTPyramid('pcpvt_nano', init_cfg=init_cfg), weights)
    assert asked == [('timm/twins_pcpvt_nano.in1k', 'model.safetensors')]


def test_offline(monkeypatch):
    def download(*_args: str) -> str:
        raise OSError('no network')

    monkeypatch.setattr('huggingface_hub.hf_hub_download', download)
    with pytest.raises(ConnectionError, match='Offline.*model.safetensors of timm/some_model'):
        checkpoints.load_from_timm('timm://some_model')

    def load_url(*_args: str, **_options: object) -> dict:
        raise URLError('no network')

    monkeypatch.setattr('mmengine.runner.checkpoint.load_url', load_url)
    address = 'https://example.org/weights.pth'
    with pytest.raises(ConnectionError, match=f'no weights from {address} .no network.. Offline'):
        CheckpointLoader.load_checkpoint(address)


def test_published_custom_keys_reach_the_peg():
    """In mmseg the PEG has another name: `pos_block` matches nothing there, and the PEG decays."""
    model = CPVTPyramid('pcpvt_nano')
    wrapper = build_optim_wrapper(
        model,
        dict(
            optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
            paramwise_cfg=dict(
                custom_keys={'pos_block': dict(decay_mult=0.0), 'norm': dict(decay_mult=0.0)}
            ),
        ),
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = wrapper.optimizer.param_groups
    spared = {names[id(p)] for g in groups for p in g['params'] if g['weight_decay'] == 0}
    assert spared == {name for name in names.values() if 'pos_block' in name or 'norm' in name}
    assert any('pos_block' in name for name in spared)


def test_default_scope_is_untouched():
    before = DefaultScope.get_current_instance()
    MMSEG.build(dict(type='CPVTPyramid', arch='pcpvt_nano'))
    assert DefaultScope.get_current_instance() is before
