"""Checkpoints in every format, made here by instantiating the foreign models."""

import random
import re
from functools import partial
from pathlib import Path

import huggingface_hub as hub
import pytest
import timm
import torch
from foreign import (
    TINY,
    maps_of,
    of_mmdet,
    of_mmpretrain,
    of_mmseg,
    with_eps,
)
from mmdet.models.backbones.pvt import pvt_convert
from mmengine.runner import load_checkpoint
from mutations import BAD, NAMES, nan_in
from published_files import DENSE, SOURCES, pvt_of_its_authors, tensors_from
from reference import same_maps
from support import assert_loaded, load
from torch import nn

from cpvt_pyramid import ARCHS, ColumnarArch, CPVTPyramid, load_weights
from cpvt_pyramid.checkpoints.fit import arch_of
from cpvt_pyramid.checkpoints.formats import backbones_in, to_format, to_ours
from cpvt_pyramid.checkpoints.loading import fit_checkpoint
from cpvt_pyramid.checkpoints.reading import tensors_of
from cpvt_pyramid.mm import CPVTPyramid as Backbone
from cpvt_pyramid.timm_models import checkpoint_filter_fn
from tests.models.ports import randomize

TINY_COLUMN = ColumnarArch(dim=16, heads=2, depth=2, patch_size=4)


# Every format, from the model that gives it its names


@pytest.mark.parametrize('source', SOURCES)
def test_formats_are_recognised_and_load_completely(source):
    arch, key, _ = SOURCES[source]
    theirs = tensors_from(source)
    names = list(tensors_of(theirs))
    assert backbones_in(names)[0].key == key
    model = CPVTPyramid(TINY[arch])
    report = load(model, theirs, strict=False)
    assert not report.unused
    # Only dense checkpoints hold the stage norms of SVT.
    assert all(name.startswith('norm_list.') for name in report.kept)
    assert report.kept == [] or 'svt' in source


@pytest.mark.parametrize(
    'arch, make, stage_norm',
    [
        ('pcpvt', of_mmseg, None),
        ('svt', of_mmseg, None),
        ('svt', partial(of_mmpretrain, stage_norms=DENSE), True),
        ('pcpvt', partial(of_mmpretrain, stage_norms=[False, False, False, True]), False),
        ('pvt', of_mmdet, None),
        ('pvt_v2', of_mmdet, None),
        ('mit', of_mmseg, None),
    ],
)
def test_equals_the_models_of_mm(arch, make, stage_norm):
    theirs, ours = make(arch), CPVTPyramid(TINY[arch], stage_norm=stage_norm)
    ours.load_state_dict(theirs.state_dict())
    # At the second size, PVT's tables are interpolated; the others' windows would be padded.
    for size in ((224, 224), (160, 288)) if make is of_mmdet else ((224, 224),):
        image = torch.randn(1, 3, *size)
        maps, expected = maps_of(with_eps(ours), image), maps_of(theirs, image)
        if stage_norm is False:  # its norm after the last stage alone is the classifier's
            norm = theirs.norm_after_stage3
            with torch.inference_mode():
                maps[3] = norm(maps[3].permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        same_maps(maps, expected)


def test_the_names_of_pvts_authors_are_those_that_mmdetection_converts():
    official = pvt_of_its_authors()
    theirs = of_mmdet('pvt').state_dict()
    converted = pvt_convert(official)
    torch.testing.assert_close(dict(converted), dict(theirs), rtol=0, atol=0)
    by_mmdet, ours = to_ours(converted), to_ours(official)
    assert all(torch.equal(value, ours[name]) for name, value in by_mmdet.items())
    assert ours.keys() - by_mmdet.keys() == {
        'cls_pos',
        'cls_token',
        'norm.weight',
        'norm.bias',
        'head.weight',
        'head.bias',
    }


# Round trips


@pytest.mark.parametrize('source', SOURCES)
def test_round_trips_are_exact(source):
    """From each format that can hold a source to each other one and back."""
    ours = to_ours(tensors_of(tensors_from(source)))
    ours = {name: value.bfloat16() for name, value in ours.items()}
    keys = {
        'pvt': ['ours', 'mmdet', 'pvt'],
        'pvt_v2': ['ours', 'mm_pvt_v2', 'timm_pvt_v2', 'transformers_5'],
        'mit': ['ours', 'mm_pvt_v2', 'pvt_v2', 'transformers'],
        'pvt_v2_li': ['ours', 'pvt_v2', 'timm_pvt_v2'],
    }.get(SOURCES[source][0], ['ours', 'mmseg', 'mmpretrain'])
    for key in keys:
        first = to_format(ours, key)
        assert {value.dtype for value in first.values()} == {torch.bfloat16}
        for other in keys:
            second = to_format(to_ours(tensors_of(first)), other)
            again = to_format(to_ours(tensors_of(second)), key)
            torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.parametrize('source', SOURCES)
def test_a_format_is_written_as_it_was_read(source):
    """The names and shapes of the foreign model itself."""
    _, key, _ = SOURCES[source]
    theirs = {k: v for k, v in tensors_from(source).items() if isinstance(v, torch.Tensor)}
    written = to_format(to_ours(tensors_of(theirs)), key)
    if source == 'mmpretrain-svt-dense':  # a backbone alone, whose names have no prefix
        theirs = {f'backbone.{name}': value for name, value in theirs.items()}
    assert written.keys() == theirs.keys()
    for name, value in written.items():
        assert torch.equal(value, theirs[name]), name


def test_a_format_without_a_place_for_the_architecture_refuses_it():
    for source, key in (
        ('timm-svt', 'pvt'),
        ('pvt', 'mmseg'),
        ('pvt', 'vit'),
        ('timm-pvt_v2', 'pvt'),
        ('timm-pvt_v2', 'mmseg'),
        ('timm-pvt_v2_li', 'mm_pvt_v2'),
        ('timm-pcpvt', 'pvt_v2'),
    ):
        ours = to_ours(tensors_of(tensors_from(source)))
        with pytest.raises(
            ValueError, match=f'format {key!r} (has no place for|is of models with)'
        ):
            to_format(ours, key)


# Whole models


class Detector(nn.Module):
    """Whose neck and head are as in any detector or segmentor."""

    def __init__(self, arch: str, **options: object) -> None:
        super().__init__()
        self.backbone = Backbone(TINY[arch], **options)
        self.neck = nn.Conv2d(64, 4, 1)
        self.decode_head = nn.Conv2d(4, 2, 1)


@pytest.fixture(params=SOURCES)
def whole(request, tmp_path) -> tuple:
    """The arch, the backbone's tensors under our names, and a detector's file."""
    arch, backbone = SOURCES[request.param][0], tensors_from(request.param)
    rest = {k: torch.randn_like(v) for k, v in Detector(arch).state_dict().items()}
    tensors = {k: v for k, v in rest.items() if not k.startswith('backbone.')}
    backbone_only = {k: v for k, v in backbone.items() if 'head.fc' not in k}
    tensors |= {f'backbone.{k.removeprefix("backbone.")}': v for k, v in backbone_only.items()}
    torch.save({'state_dict': tensors, 'meta': {'epoch': 12}}, tmp_path / 'whole.pth')
    return arch, to_ours(tensors_of(backbone)), tensors, str(tmp_path / 'whole.pth')


@pytest.mark.parametrize('way', ['load_from', 'load_state_dict', 'timm'])
def test_whole_models(whole, way):
    """A detector or segmentor with any of these backbones inside."""
    arch, backbone, tensors, path = whole
    model = Detector(arch)
    if way == 'load_from':
        load_checkpoint(model, path)
    elif way == 'timm':
        strict = arch != 'svt'
        filtered = dict(filter_fn=checkpoint_filter_fn)
        timm.models.load_checkpoint(model.backbone, path, strict=strict, **filtered)
    else:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected
        assert all('norm_list' in name for name in missing) and (not missing or arch == 'svt')
    for name, value in model.backbone.state_dict().items():
        if name in backbone or not name.startswith('norm_list.'):
            assert torch.equal(value, backbone[name]), name
    if way.startswith('load_'):
        for name in ('neck.weight', 'neck.bias', 'decode_head.weight', 'decode_head.bias'):
            assert torch.equal(model.state_dict()[name], tensors[name])


# What is not a checkpoint of the model


@pytest.mark.parametrize('arch', ARCHS)
def test_archs_are_told_from_their_tensors(arch):
    with torch.device('meta'):
        # MiT-B5 is PVTv2-B5, in other code.
        expected = 'pvt_v2_b5' if arch == 'mit_b5' else arch
        assert arch_of(CPVTPyramid(arch).state_dict()) == expected
        assert arch_of(CPVTPyramid(arch, out_indices=(1, 2)).state_dict())


OTHER = 'the checkpoint is of another architecture'
TINY_PCPVT = dict(arch=TINY['pcpvt'])


@pytest.mark.parametrize(
    'model, checkpoint, complaint',
    [
        (
            dict(arch='pcpvt_small'),
            dict(arch='pcpvt_base'),
            f'{OTHER}, pcpvt_base; the model is pcpvt_small. Set its arch, or load another file',
        ),
        (
            dict(arch='pcpvt_small'),
            dict(arch='pvt_v2_b2'),
            f'{OTHER}, pvt_v2_b2; the model is pcpvt_small. Set its arch, or load another file',
        ),
        (
            dict(arch='mit_b2'),
            dict(arch='pvt_v2_b2_li'),
            f'{OTHER}, pvt_v2_b2_li; the model is mit_b2. Set its arch, or load another file',
        ),
        (
            dict(arch='mit_b0'),
            dict(arch='mit_b0', stage_norm=False),
            f'{OTHER} or damaged: it lacks norm_list.0.weight',
        ),
        (
            dict(arch='svt_small', out_indices=(1,)),
            TINY_PCPVT,
            f'{OTHER}, of dims (8, 16) and depths (2, 1); the model is svt_small',
        ),
        (
            TINY_PCPVT | dict(in_channels=4),
            TINY_PCPVT,
            'patch_embeds.0.proj.weight is (8, 3, 4, 4) in the checkpoint and (8, 4, 4, 4) in the '
            'model. in_channels=3 fits the checkpoint',
        ),
        (
            dict(arch=TINY['pvt']),
            dict(arch=TINY['pvt'], pretrain_img_size=384),
            'pos_embeds.0.table is (1, 96, 96, 8) in the checkpoint and (1, 56, 56, 8) in the '
            'model. Build the model with the pretrain_img_size of the checkpoint',
        ),
        (
            TINY_PCPVT | dict(peg=dict(kernel_size=5)),
            TINY_PCPVT,
            'pos_block.0.proj.0.weight is (8, 1, 3, 3) in the checkpoint and (8, 1, 5, 5)',
        ),
        (
            TINY_PCPVT,
            dict(arch=TINY['svt']),
            f'{OTHER} or damaged: it lacks blocks.0.0.attn.q.weight',
        ),
        (
            TINY_PCPVT,
            TINY_PCPVT | dict(out_indices=(0, 1)),
            f'{OTHER} or damaged: it lacks patch_embeds.2.proj.weight',
        ),
    ],
)
def test_what_is_wrong_is_said_first(model, checkpoint, complaint):
    with torch.device('meta'):
        model, checkpoint = CPVTPyramid(**model), CPVTPyramid(**checkpoint).state_dict()
    with pytest.raises(ValueError, match=f'^{re.escape(complaint)}'):
        fit_checkpoint(model, checkpoint)


def test_a_model_on_the_meta_device_has_no_values(tmp_path):
    tensors = CPVTPyramid(TINY['pcpvt']).state_dict()
    torch.save(tensors, tmp_path / 'a.pth')
    with torch.device('meta'):
        model = CPVTPyramid(TINY['pcpvt'])
    with pytest.raises(ValueError, match='^the model is on the meta device .* model.to_empty'):
        load_weights(model, tmp_path / 'a.pth')
    model.load_state_dict(tensors, assign=True)
    assert_loaded(model, tensors)


def test_a_checkpoint_or_a_model_of_something_else_is_an_error():
    model, resnet = CPVTPyramid(TINY['pcpvt']), timm.create_model('resnet18').state_dict()
    with pytest.raises(ValueError, match='no tensor of this backbone, but conv1.weight.*the file'):
        fit_checkpoint(model, resnet)
    with pytest.raises(TypeError, match='a backbone .* got a Sequential; pass the part'):
        load_weights(nn.Sequential(model), 'any.pth')


# What `load_state_dict` leaves to PyTorch


def in_plain_module(model: nn.Module) -> nn.Module:
    """A module of PyTorch with the same parameters, whose names have underscores for dots."""
    plain = nn.Module()
    for name, value in model.state_dict().items():
        plain.register_parameter(name.replace('.', '_'), nn.Parameter(value.clone()))
    return plain


def outcome(model: nn.Module, tensors: dict, strict: bool) -> tuple:
    """What a load returns or raises, with the names as in `in_plain_module`."""
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=strict)
    except RuntimeError as error:
        lines = str(error).replace('.', '_').splitlines()[1:]
        return tuple(sorted(re.findall(r'"(\w+)"|param (\w+)', line)) for line in lines)
    return tuple(
        sorted(name.replace('.', '_') for name in names) for names in (missing, unexpected)
    )


PARTS = {
    'a part': lambda w: dict(list(w.items())[::3]),
    'the second half': lambda w: dict(list(w.items())[len(w) // 2 :]),
    'one tensor': lambda w: {'blocks.2.0.mlp.fc1.bias': w['blocks.2.0.mlp.fc1.bias']},
    'without stage norms': lambda w: {k: v for k, v in w.items() if 'norm_list' not in k},
    'nothing': lambda _: {},
    'more': lambda w: w | {'blocks.0.0.more': torch.ones(3), 'more': torch.ones(())},
    'another shape': lambda w: w | {'blocks.1.0.norm1.bias': torch.ones(3)},
    'no number': lambda w: {k: nan_in(v) for k, v in w.items()},
    'another model': lambda _: {'conv1.weight': torch.ones(2), 'fc.bias': torch.ones(2)},
}


@pytest.mark.parametrize('strict', [True, False])
@pytest.mark.parametrize('part', PARTS)
def test_loads_as_any_module(part, strict):
    """The same answer, error and values as a module without our code."""
    model = CPVTPyramid(TINY['svt'])
    plain = in_plain_module(model)
    tensors = PARTS[part](CPVTPyramid(TINY['svt']).state_dict())
    renamed = {name.replace('.', '_'): value for name, value in tensors.items()}
    assert outcome(model, tensors, strict) == outcome(plain, renamed, strict)
    for name, value in model.state_dict().items():
        expected = plain.state_dict()[name.replace('.', '_')]
        torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


def test_a_tensor_that_its_format_does_not_have_is_an_error_of_pytorch():
    theirs = of_mmdet('pvt').state_dict()
    name = 'layers.0.1.1.attn.attn.in_proj_weight'
    model = CPVTPyramid(TINY['pvt'])
    with pytest.raises(RuntimeError, match='loading state_dict for CPVTPyramid.*\n.*rows of q, k'):
        model.load_state_dict(theirs | {name: theirs[name][:-1]}, strict=False)


def test_a_sharded_checkpoint_of_the_hub(tmp_path):
    """Which loads each shard by itself, with `strict=False`."""
    model = CPVTPyramid(TINY['svt'])
    hub.save_torch_model(model, tmp_path, max_shard_size=100_000)
    assert len(list(tmp_path.glob('*.safetensors'))) > 2
    again = CPVTPyramid(TINY['svt'])
    missing, unexpected = hub.load_torch_model(again, tmp_path, strict=True)
    assert not missing and not unexpected
    assert_loaded(again, model.state_dict())


class Compiled(nn.Module):
    """A module with the names that `torch.compile` gives one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_a_model_whose_blocks_are_compiled(tmp_path):
    """Names with `_orig_mod` are the model's own then; `load_weights` reads one into the other."""
    model, again = CPVTPyramid(TINY['pcpvt']), CPVTPyramid(TINY['pcpvt'])
    for each in (model, again):
        each.blocks[2][0] = Compiled(each.blocks[2][0])
    weights = model.state_dict()
    assert any('_orig_mod' in name for name in weights)
    again.load_state_dict(weights)
    assert_loaded(again, weights)
    plain = CPVTPyramid(TINY['pcpvt'])
    torch.save(weights, tmp_path / 'compiled.pth')
    assert not load_weights(plain, tmp_path / 'compiled.pth').kept
    assert_loaded(plain, {k.replace('_orig_mod.', ''): v for k, v in weights.items()})
    torch.save(randomize(plain).state_dict(), tmp_path / 'plain.pth')
    assert not load_weights(again, tmp_path / 'plain.pth').kept
    assert_loaded(plain, {k.replace('_orig_mod.', ''): v for k, v in again.state_dict().items()})


class Adapted(nn.Module):
    """A linear layer with an adapter, whose names are those of peft."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({'default': nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({'default': nn.Linear(2, base_layer.out_features, bias=False)})


def adapted(seed: int) -> nn.Module:
    """A model as peft wraps it: `base_model.model.` and adapters inside."""
    torch.manual_seed(seed)
    model = CPVTPyramid(TINY['pcpvt'])
    for stage in model.blocks:
        for block in stage:
            block.attn.q = Adapted(block.attn.q)
    wrapped = nn.Module()
    wrapped.base_model = nn.Module()
    wrapped.base_model.model = model
    return wrapped


def test_adapters_are_loaded_as_peft_does():
    """`PeftModel.from_pretrained` loads the adapters alone, with `strict=False`."""
    trained, model = adapted(0), adapted(1)
    adapters = {name: x for name, x in trained.state_dict().items() if '.lora_' in name}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    missing, unexpected = model.load_state_dict(adapters, strict=False)
    assert len(adapters) == 12 and not unexpected
    assert set(missing) == before.keys() - adapters.keys()
    assert_loaded(model, before | adapters)
    model.load_state_dict(trained.state_dict())  # whole, strict
    assert_loaded(model, trained.state_dict())


# `load_weights` leaves a model as it was after any error


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        'gloo', store=torch.distributed.FileStore(str(tmp_path / 'store'), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason='needs torch.distributed')
def test_a_sharded_tensor_in_a_file(process_group, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    tensors = CPVTPyramid(TINY['pcpvt']).state_dict()
    name = list(tensors)[-1]
    tensors[name] = distribute_tensor(tensors[name], init_device_mesh('cpu', (1,)))
    torch.save(tensors, tmp_path / 'a.pth')
    refuses_file(CPVTPyramid(TINY['pcpvt']), tmp_path / 'a.pth', f'{name} is a DTensor; save')


@pytest.mark.parametrize('error', [RuntimeError, KeyError, KeyboardInterrupt])
def test_an_error_in_the_middle_of_loading(error, tmp_path):
    model = CPVTPyramid(TINY['pcpvt'])
    torch.save(CPVTPyramid(TINY['pcpvt']).state_dict(), tmp_path / 'a.pth')

    def fail(*_: object) -> None:
        raise error('in the middle')

    model.blocks[2][0].mlp.register_load_state_dict_post_hook(fail)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError if error is RuntimeError else error, match='in the middle'):
        load_weights(model, tmp_path / 'a.pth')
    assert unchanged(model, before)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_a_quantized_models_own_state(tmp_path):
    quantize = partial(torch.ao.quantization.quantize_dynamic, qconfig_spec={nn.Linear})
    image = torch.randn(1, 3, 64, 64)
    trained, model = (quantize(CPVTPyramid(TINY['pcpvt']).eval()) for _ in range(2))
    torch.save({'model': trained.state_dict()}, tmp_path / 'a.pth')
    report = load_weights(model, tmp_path / 'a.pth')
    assert set(report.loaded) == model.state_dict().keys()
    same_maps(maps_of(model, image), maps_of(trained, image), rtol=0, atol=0)
    torch.save(CPVTPyramid(TINY['pcpvt']).state_dict(), tmp_path / 'b.pth')
    with pytest.raises(ValueError, match='lacks blocks'):
        load_weights(model, tmp_path / 'b.pth')
    same_maps(maps_of(model, image), maps_of(trained, image), rtol=0, atol=0)


# Damaged and hostile tensors: one ValueError, and the model is as it was

some_sources = pytest.mark.parametrize('source', ['timm-svt', 'mmdet-pvt', 'transformers-mit'])


def refuses_file(model: nn.Module, path: Path, match: str = '.') -> None:
    """One line from `load_weights`, and the model is as it was."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=match) as caught:
        load_weights(model, path)
    assert len(str(caught.value)) < 1000 and '\n' not in str(caught.value)
    assert unchanged(model, before)


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def refuses(model: nn.Module, tensors: dict, match: str = '.') -> None:
    with pytest.raises(ValueError, match=match) as caught:
        fit_checkpoint(model, tensors)
    assert len(str(caught.value)) < 1000


@some_sources
def test_a_bad_value_and_a_missing_tensor_are_refused(source):
    model, tensors = CPVTPyramid(TINY[SOURCES[source][0]]), tensors_from(source)
    names = [name for name in tensors if not re.match(r'norm\.|head|classifier', name)]
    for defect in BAD.values():
        for name in random.Random(0).sample(names, 12):
            refuses(model, tensors | {name: defect(tensors[name])})
    for name in names:
        if not name.startswith('norm'):  # a stage norm starts as the identity
            refuses(model, {k: v for k, v in tensors.items() if k != name}, 'lacks')


@some_sources
@pytest.mark.parametrize('name', NAMES, ids=lambda n: repr(n)[:40])
def test_a_strange_name_is_no_crash(source, name):
    """It is refused, or reported as unused if it cannot be taken for a part of the model."""
    model, tensors = CPVTPyramid(TINY[SOURCES[source][0]]), tensors_from(source)
    clean, _ = fit_checkpoint(model, tensors)
    for value in (torch.ones(3), torch.ones(()), None):
        try:
            fitting, report = fit_checkpoint(model, {**tensors, name: value})
        except ValueError:
            continue
        assert all(torch.equal(fitting[name], value) for name, value in clean.items())
        assert value is None or report.unused or report.ignored


@pytest.mark.parametrize(
    ('dtype', 'stored', 'value'),
    [
        (torch.float32, torch.float64, 1e300),
        (torch.half, torch.float32, -1e5),
        (torch.half, torch.bfloat16, 1e5),
    ],
)
def test_a_value_that_overflows_is_refused(dtype, stored, value):
    model = CPVTPyramid(TINY['pcpvt']).to(dtype)
    tensors = {name: tensor.to(stored) for name, tensor in model.state_dict().items()}
    fit_checkpoint(model, tensors)
    name = 'blocks.1.0.mlp.fc1.bias'
    tensors[name][3] = value
    said = f'^{name} has values up to .*e.* infinite in the model.s dtype, {dtype}$'
    refuses(model, tensors, said)
    tensors[name][3] = torch.finfo(dtype).max / 2
    fit_checkpoint(model, tensors)
