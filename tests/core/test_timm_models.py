"""The models in timm's registry: against timm's own and the slow version, and one contract."""

import copy
import math
import runpy
import sys

import pytest
import timm
import torch
from foreign import TINY, classifier_of_mmpretrain, with_eps
from mmengine.registry import MODELS
from PIL import Image
from reference import (
    layer,
    layer_norm,
    pointwise,
    reference_maps,
    same_maps,
)
from safetensors.torch import load_file, save_file
from support import assert_loaded
from timm.models import resume_checkpoint
from timm.models._manipulate import group_parameters
from timm.models._registry import _module_to_models
from timm.optim import create_optimizer_v2
from timm.task import TokenDistillationTask
from torch import Tensor, nn

import cpvt_pyramid.mm  # noqa: F401 registers the backbone
from cpvt_pyramid import ARCHS, CPVT, Arch, CPVTPyramid, load_weights
from cpvt_pyramid import timm_models as ours
from cpvt_pyramid.checkpoints.downloads import IN_PACKAGE
from cpvt_pyramid.checkpoints.formats import to_format
from cpvt_pyramid.model import Block
from cpvt_pyramid.versions import VERSION
from tests.models.ours import SHALLOW, outputs, shallow
from tests.models.ports import randomize

NAMES = [*map(ours.registered_name, ARCHS), *ours.COLUMNS]
FAMILIES = [
    *map(ours.registered_name, ('pcpvt_nano', 'svt_small', 'pvt_tiny', 'pvt_v2_b0', 'mit_b0')),
    'cpvt_tiny',
]
TWINS = [name for name in NAMES if name.startswith(('svt', 'pcpvt')) and name != 'pcpvt_nano']
# Small enough to try everything on, and with every mechanism in them.
PVT = Arch((8, 16, 24, 32), (1, 2, 3, 4), (2, 2, 2, 2), (2, 1, 2, 2), position='learned')
SVT = PVT._replace(
    depths=(2, 2, 2, 3), position='peg', attention=('WindowAttention', 'GlobalAttention'), window=7
)
COLUMN = dict(dim=16, heads=2, depth=4)
SMALL = {
    'pcpvt_nano': {},
    'svt_small': dict(arch=SVT),
    'pvt_tiny': dict(arch=PVT),
    'cpvt_tiny': dict(arch=COLUMN, peg=dict(after=[-1, 1])),
    'cpvt_tiny_0to5_gap': dict(arch=dict(COLUMN, depth=6)),
}
small = pytest.mark.parametrize('name', SMALL)


def create(name: str, **options) -> nn.Module:
    return timm.create_model(name, **dict(num_classes=7) | SMALL[name] | options)


def random_model(name: str, **options) -> nn.Module:
    return randomize(create(name, **options)).eval()


@pytest.mark.parametrize('name', TWINS)
def test_equals_timm_twins(name):
    """The first blocks in values, the others in their names."""
    whole, twins = (timm.create_model(n, device='meta') for n in (name, f'twins_{name}'))
    whole.load_state_dict(twins.state_dict())
    twins.load_state_dict(whole.state_dict())
    different = {'architecture', 'pool_size', 'fixed_input_size', 'url'}
    for key in twins.pretrained_cfg.keys() - different:
        assert whole.pretrained_cfg[key] == twins.pretrained_cfg[key], key
    if name in SHALLOW.values():  # the others differ from one of these in depth
        theirs = randomize(timm.create_model(f'twins_{name}', depths=shallow(name).depths)).eval()
        model = timm.create_model(name, arch=shallow(name)).eval()
        model.load_state_dict(theirs.state_dict())
        image = torch.randn(1, 3, 224, 224)
        with torch.no_grad():
            torch.testing.assert_close(model(image), theirs(image))


def pvt_logits(model: nn.Module, image: Tensor) -> Tensor:
    """PVT's classifier of one image (3, H, W), computed from the state dict alone."""
    weights = model.state_dict()
    x = reference_maps(model, model.arch, image)[-1]
    x = layer_norm(x, *layer(weights, 'norm'), 1e-6).mean((1, 2))
    return pointwise(x[:, None, None], *layer(weights, 'head')).flatten()


@pytest.mark.parametrize('position', ['learned', 'peg'])
def test_pvt_equals_the_slow_version(position):
    model = random_model('pvt_tiny', position=position)
    for size in ((224, 224), (70, 97)):
        image = torch.randn(3, *size)
        with torch.no_grad():
            torch.testing.assert_close(model(image[None])[0], pvt_logits(model, image))


@pytest.mark.parametrize('name', ['pvt_v2_b0', 'pvt_v2_b2_li'])
def test_equals_timm_pvt_v2(name):
    """Without another norm before the classifier; timm's files load as they are."""
    depths = (1, 1, 1, 1)
    theirs = randomize(timm.create_model(name, num_classes=7, depths=depths)).eval()
    arch = ARCHS[name]._replace(depths=depths)
    model = timm.create_model(f'cpvt_{name}', num_classes=7, arch=arch).eval()
    model.load_state_dict(theirs.state_dict())
    image = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(image), theirs(image))
    maps = timm.create_model(f'cpvt_{name}', arch=arch, features_only=True).eval()
    maps.model.load_state_dict(theirs.state_dict(), strict=False)
    expected = theirs.forward_intermediates(image, intermediates_only=True)
    same_maps(maps(image), expected)


@pytest.mark.parametrize('name', ['cpvt_tiny', 'cpvt_tiny_0to5_gap'])
def test_columnar_classifier_is_that_of_the_core(name):
    model = random_model(name)
    pegs, token = [int(i) for i in model.pos_block], 'gap' not in name
    core = CPVT(model.arch, num_classes=7, peg=dict(after=pegs), class_token=token).eval()
    core.load_state_dict(model.state_dict())
    image = torch.randn(2, 3, 65, 97)
    with torch.no_grad():
        torch.testing.assert_close(model(image), core(image))


@pytest.mark.parametrize('name', NAMES)
def test_every_variant_is_a_timm_model(name):
    """Names alone, without memory for the weights; no name is one of timm's."""
    homes = [home for home, names in _module_to_models.items() if name in names]
    assert homes == ['timm_models'] and name in ours.__all__
    options = dict(device='meta', dtype=torch.bfloat16, drop_path_rate=0.1)
    model = timm.create_model(name, num_classes=1000, **options)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    cfg, state = model.pretrained_cfg, model.state_dict()
    # PVT's published classifiers read a class token, which a pyramid does not have.
    classes = 0 if name.startswith('pvt_') else 1000
    assert (cfg['architecture'], cfg['num_classes'], cfg['crop_pct']) == (name, classes, 0.9)
    assert cfg['input_size'] == (3, 224, 224) and not cfg['fixed_input_size']
    assert f'{cfg["first_conv"]}.weight' in state and f'{cfg["classifier"]}.weight' in state
    assert model.get_classifier() is model.head and model.in_chans == 3


def test_every_variant_has_an_entry_point():
    """A function of the file, with its name."""
    assert ours.VARIANTS.keys() == set(NAMES) == set(timm.list_models(module='timm_models'))
    for name in NAMES:
        entry_point = getattr(ours, name)
        assert entry_point.__name__ == name and timm.models.model_entrypoint(name) is entry_point


@pytest.mark.parametrize('options', [{}, dict(num_classes=3), dict(features_only=True)])
def test_pretrained_weights_in_the_package(options, caplog):
    """They are of the backbone: the classifier keeps its values, and a warning says so."""
    assert 'pcpvt_nano' in timm.list_pretrained()
    model = timm.create_model('pcpvt_nano', pretrained=True, **options)
    weights = getattr(model, 'model', model).state_dict()
    for name, value in load_file(IN_PACKAGE / 'pcpvt_nano.safetensors').items():
        assert torch.equal(weights[name], value), name
    assert 'head.bias keep their initial values' in caplog.text


@pytest.mark.parametrize('name', FAMILIES)
def test_shapes_of_features_and_heads(name):
    options = dict(device='meta', dtype=torch.bfloat16)
    model = timm.create_model(name, num_classes=1000, **options)
    cfg = model.pretrained_cfg
    image = torch.empty(2, 3, 224, 224, device='meta', dtype=torch.bfloat16)
    features = model.forward_features(image)
    if cfg['pool_size'] and model.cls_token is None:
        assert features.shape == (2, model.num_features, *cfg['pool_size'])
    assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size)
    for classes in (0, 4):
        model.reset_classifier(classes)
        assert model.forward_head(features).shape == (2, classes or model.num_features)
    assert model.head.weight.dtype == torch.bfloat16
    model.reset_classifier(0, '')
    assert model.forward_head(features).shape == features.shape

    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert layers.keys() == dict(model.named_parameters()).keys()
    maps = timm.create_model(name, device='meta', features_only=True)
    info, shapes = maps.feature_info, [x.shape for x in maps(image.float())]
    assert len(shapes) == 4
    for shape, channels, reduction in zip(shapes, info.channels(), info.reduction()):
        assert shape == (2, channels, 224 // reduction, 224 // reduction)
    with pytest.raises(TypeError, match='drop_block_rate'):
        timm.create_model(name, device='meta', drop_block_rate=0.1)


def test_mistakes_are_named():
    with pytest.raises(AssertionError, match="global_pool must be .* got 'token'"):
        create('pcpvt_nano').reset_classifier(3, 'token')
    with pytest.raises(ValueError, match='a pyramid has no class token'):
        create('pvt_tiny', global_pool='token')
    with pytest.raises(ValueError, match="output_fmt must be .* got 'NLC'"):
        create('pcpvt_nano').forward_intermediates(torch.randn(1, 3, 32, 32), output_fmt='NLC')


# The larger part of the contract is timm's own, `make test-timm`.


@pytest.mark.parametrize('name', [name for name in SMALL if not name.startswith('cpvt')])
@pytest.mark.parametrize('options', [{}, dict(stage_norm=True), dict(position='sincos+peg')])
def test_features_only_gives_the_maps_of_the_pyramid(name, options):
    maps = random_model(name, features_only=True, out_indices=(0, 2, 3), **options)
    arch = SMALL[name].get('arch', name)
    core = CPVTPyramid(arch, out_indices=(0, 2, 3), **dict(stage_norm=False) | options).eval()
    core.load_state_dict(maps.model.state_dict())
    image = torch.randn(2, 3, 65, 97)
    with torch.no_grad():
        same_maps(maps(image), core(image), rtol=0, atol=0)
    assert tuple(maps.feature_info.channels()) == core.channels
    assert tuple(maps.feature_info.reduction()) == core.strides


@small
def test_maps_on_the_way(name):
    model, blocks = random_model(name), []
    image, last = torch.randn(2, 3, 65, 97), len(model.blocks) - 1
    with torch.no_grad():
        final, maps = model.forward_intermediates(image)
        assert torch.equal(final, model.forward_features(image)) and len(maps) == last + 1
        tokens = model.forward_intermediates(image, [0], output_fmt='NHWC')[1][0]
        assert torch.equal(tokens.permute(0, 3, 1, 2), maps[0])
        if model.cls_token is None:
            normed = model.forward_intermediates(image, 2, norm=True, intermediates_only=True)
            torch.testing.assert_close(normed[1], final)
            logits, model.global_pool = model(image), ''  # then each cell is classified
            torch.testing.assert_close(model(image).mean((2, 3)), logits)
        for part in model.modules():
            if isinstance(part, Block):
                part.register_forward_hook(lambda block, *_: blocks.append(block))
        _, (same,) = model.forward_intermediates(image, [1], stop_early=True)
        assert torch.equal(same, maps[1])
    assert len(blocks) == (2 if name.startswith('cpvt') else sum(model.arch.depths[:2]))


@small
def test_pruned_models_need_all_that_is_left(name):
    whole = random_model(name)
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        maps = whole.forward_intermediates(image, intermediates_only=True)
        kept = copy.deepcopy(whole)
        kept.prune_intermediate_layers(1, prune_head=False)
        assert torch.equal(kept(image), whole(image))
    for i, tap in enumerate(maps):
        model = copy.deepcopy(whole).train()
        assert model.prune_intermediate_layers([i], prune_norm=True) == [i]
        same = model.forward_intermediates(image, [i], intermediates_only=True)[0]
        torch.testing.assert_close(same, tap)
        model.forward_features(image).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert model.num_features == tap.shape[1] and len(model.blocks) == i + 1


@pytest.mark.parametrize('features_only', [False, True])
@small
def test_gradients_and_checkpointing(name, features_only):
    image, results = torch.randn(2, 3, 70, 50), []
    first = randomize(create(name, features_only=features_only, drop_path_rate=0.3)).train()
    for enable in (False, True):
        model = copy.deepcopy(first)
        model.set_grad_checkpointing(enable)
        assert {part.with_cp for part in model.modules() if isinstance(part, Block)} == {enable}
        torch.manual_seed(1)
        maps = outputs(model, image)
        sum(x.square().mean() for x in maps).backward()
        assert all(p.grad is not None for p in model.parameters())
        results.append([*maps, *(p.grad for p in model.parameters())])
    same_maps(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    'name, options',
    [
        ('pcpvt_nano', dict(position='learned+peg', peg=dict(zero_init=True), stage_norm=True)),
        ('pvt_tiny', {}),
        ('cpvt_tiny', dict(position='relative', peg=None, features_only=True)),
    ],
)
def test_weights_are_drawn_again(name, options):
    torch.manual_seed(0)
    first = create(name, **options)
    model = copy.deepcopy(first)
    for p in model.parameters():
        nn.init.constant_(p, math.nan)
    torch.manual_seed(2)
    model.init_weights()
    for (key, p), other in zip(model.named_parameters(), first.parameters()):
        if p.unique().numel() == 1:  # biases, norms, and PEGs that start at zero
            assert torch.equal(p, other), key
        else:
            assert not torch.equal(p, other) and 0.5 < p.std() / other.std() < 2, key


def test_the_size_that_a_table_is_for():
    model = create('pvt_tiny', img_size=(64, 97))
    sizes = [tuple(part.table.shape[1:3]) for part in model.pos_embeds]
    assert sizes == [(16, 25), (8, 13), (4, 7), (2, 4)]
    with pytest.raises(RuntimeError, match='size mismatch for pos_embeds.0.table'):
        model.load_state_dict(create('pvt_tiny', img_size=64).state_dict())
    column = create('cpvt_tiny', img_size=(64, 97), position='learned', peg=None)
    assert column.pos_embed.table.shape[1:3] == (4, 7)
    for name, size in (('pcpvt_nano', (64, 96, 3)), ('pvt_tiny', 0), ('cpvt_tiny', '224')):
        with pytest.raises(ValueError, match='img_size in timm. must be a side .* got '):
            create(name, img_size=size)


@small
def test_learning_rates_grow_with_depth_and_positions_do_not_decay(name):
    model = create(name)
    optimizer = create_optimizer_v2(model, 'adamw', lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    names = {p: n for n, p in model.named_parameters()}
    groups = {names[p]: group for group in optimizer.param_groups for p in group['params']}
    scale = {name: group['lr_scale'] for name, group in groups.items()}
    assert scale.keys() == set(names.values())
    stem = model.pretrained_cfg['first_conv'] + '.weight'
    depth = model.arch.depth if name.startswith('cpvt') else sum(model.arch.depths)
    assert scale['head.weight'] == 1 and math.isclose(scale[stem], 0.7 ** (depth + 1))
    blocks = [scale[n] for n in names.values() if n.endswith('mlp.fc1.weight')]
    torch.testing.assert_close(blocks, [0.7**i for i in range(depth, 0, -1)])
    undecayed = model.no_weight_decay()
    assert undecayed == {n for n in names.values() if n.startswith(('pos_', 'cls_'))} != set()
    for n, p in model.named_parameters():
        assert groups[n]['weight_decay'] == (0 if n in undecayed or p.dim() < 2 else 0.05), n
    inside = create('cpvt_tiny', peg=dict(after=[0], qk_only=True)).no_weight_decay()
    assert {n.split('proj')[0] for n in inside} == {'blocks.1.attn.peg.', 'cls_token'}


@pytest.mark.parametrize('key', ['ours', 'mmseg', 'mmpretrain', 'timm', 'ddp', 'safetensors'])
def test_any_format_loads_through_timm(key, tmp_path):
    theirs = random_model('pcpvt_nano')
    weights = theirs.state_dict()
    path = tmp_path / f'model.{"safetensors" if key == "safetensors" else "pth"}'
    if key == 'timm':  # as timm's training script writes
        zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
        torch.save({'epoch': 3, 'state_dict': zeros, 'state_dict_ema': weights}, path)
    elif key == 'ddp':
        torch.save({'model': {f'module.{n}': v for n, v in weights.items()}}, path)
    elif key == 'safetensors':
        save_file(weights, path)
    else:
        torch.save(to_format(weights, key), path)
    model = create('pcpvt_nano', checkpoint_path=str(path))
    assert_loaded(model, weights)
    overlay = dict(file=str(path), num_classes=7)
    gray = create('pcpvt_nano', in_chans=1, pretrained=True, pretrained_cfg_overlay=overlay)
    stem = weights['patch_embeds.0.proj.weight']
    torch.testing.assert_close(gray.patch_embeds[0].proj.weight, stem.sum(1, keepdim=True))
    assert torch.equal(gray.head.weight, theirs.head.weight)
    other = create('pcpvt_nano', num_classes=3, pretrained=True, pretrained_cfg_overlay=overlay)
    assert other.head.weight.shape == (3, 192) and torch.equal(other.norm.bias, theirs.norm.bias)
    maps = create('pcpvt_nano', features_only=True, pretrained=True, pretrained_cfg_overlay=overlay)
    assert torch.equal(maps.model.blocks[3][1].attn.kv.weight, theirs.blocks[3][1].attn.kv.weight)


def test_classifiers_of_others_load_through_timm(tmp_path):
    """mmpretrain's, and the files of PVT's authors."""
    path, image = str(tmp_path / 'file.pth'), torch.randn(1, 3, 64, 64)
    theirs = classifier_of_mmpretrain('pcpvt', num_classes=7).eval()
    torch.save({'state_dict': theirs.state_dict()}, path)
    model = with_eps(create('pcpvt_nano', arch=TINY['pcpvt'], checkpoint_path=path)).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(image), theirs(image))

    theirs = random_model('pvt_tiny')
    torch.save(to_format(theirs.state_dict(), 'pvt'), path)
    options = dict(pretrained=True, pretrained_cfg_overlay=dict(file=path, num_classes=7))
    with torch.no_grad():
        assert torch.equal(create('pvt_tiny', **options).eval()(image), theirs(image))
    maps = create('pvt_tiny', features_only=True, **options).model
    assert torch.equal(maps.pos_embeds[3].table, theirs.pos_embeds[3].table)


def test_hard_distillation_is_deits():
    """Half of it by the labels, half by what the teacher says (arXiv 2012.12877, section 4)."""
    teacher = timm.create_model('resnet10t', num_classes=7).eval()
    student = create('pcpvt_nano')
    options = dict(distill_type='hard', task_loss_weight=0.5, verbose=False)
    task = TokenDistillationTask(student, teacher, nn.CrossEntropyLoss(), **options).train()
    image, labels = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 2, 3])
    logits, cross_entropy = student(image)[0], nn.functional.cross_entropy
    expected = (cross_entropy(logits, labels) + cross_entropy(logits, teacher(image).argmax(1))) / 2
    torch.testing.assert_close(task(image, labels)['loss'], expected)
    assert isinstance(student.eval()(image), Tensor)


# Stands for the train.py of timm's repository, which is in no package: its parts, in its order,
# with the import that docs/ecosystems.md adds.
TRAIN = """
import cpvt_pyramid.timm_models
import argparse
import torch
from timm import create_model
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from timm.utils import CheckpointSaver

parser = argparse.ArgumentParser()
for name in ('data-dir', 'model', 'output'):
    parser.add_argument('--' + name)
args = parser.parse_args()
model = create_model(args.model, num_classes=2, drop_rate=0.0, drop_path_rate=0.1, global_pool=None)
config = resolve_data_config(dict(img_size=64), model=model)
data = create_dataset('', args.data_dir, split='train', is_training=True)
loader = create_loader(
    data, config['input_size'], batch_size=4, is_training=True, use_prefetcher=False, num_workers=0)
optimizer = create_optimizer_v2(model, opt='adamw', lr=1e-3, weight_decay=0.05, layer_decay=0.9)
task = ClassificationTask(model, torch.nn.CrossEntropyLoss(), verbose=False).train()
task.setup_ema(decay=0.5)
saver = CheckpointSaver(
    model, optimizer, args, task=task, checkpoint_dir=args.output, recovery_dir=args.output)
for image, label in loader:
    task(image, label)['loss'].backward()
    optimizer.step()
    task.update_ema()
saver.save_checkpoint(0, metric=0.5)
"""


def test_pretraining_from_images_to_the_backbone_of_a_detector(tmp_path, monkeypatch):
    for colour in ('red', 'blue'):
        folder = tmp_path / 'data/train' / colour
        folder.mkdir(parents=True)
        for i in range(2):
            Image.new('RGB', (80, 72), colour).save(folder / f'{i}.png')
    script, out = tmp_path / 'train.py', tmp_path / 'out'
    script.write_text(TRAIN)
    out.mkdir()
    options = ('--data-dir', str(tmp_path / 'data'), '--output', str(out), '--model', 'pcpvt_nano')
    monkeypatch.setattr(sys, 'argv', [str(script), *options])
    runpy.run_path(str(script), run_name='__main__')
    resumed = create('pcpvt_nano', num_classes=2)
    last = str(out / 'last.pth.tar')
    # It contains an argparse.Namespace, which torch 2.1 cannot read safely.
    safely = {'weights_only': VERSION >= (2, 7)}
    assert resume_checkpoint(resumed, last, **safely) == 1

    weights = dict(type='Pretrained', checkpoint=last)
    backbone = MODELS.build(dict(type='CPVTPyramid', arch='pcpvt_nano', init_cfg=weights))
    backbone.init_weights()
    core = CPVTPyramid('pcpvt_nano')
    assert not load_weights(core, out / 'last.pth.tar').kept
    for model, average in ((backbone, False), (core, True)):  # mmengine takes the plain weights
        weights = timm.models.load_state_dict(last, use_ema=average, **safely)
        assert_loaded(model, weights)


@small
def test_features_of_a_padded_batch_are_those_of_each_image(name):
    """Also with the maps in another order."""
    features = randomize(create(name, features_only=True, out_indices=(3, 1))).eval()
    images, sizes = torch.randn(2, 3, 66, 97), torch.tensor([[66, 97], [35, 70]])
    with torch.no_grad():
        together = features(images, valid=sizes)
        alone = features(images[1:, :, :35, :70])
    for x, expected in zip(together, alone):
        height, width = expected.shape[2:]
        inside = x[1:, :, :height, :width]
        torch.testing.assert_close(inside, expected, atol=1e-4, rtol=1e-4)
        assert not x[1:, :, height:].any() and not x[1:, :, :, width:].any()
