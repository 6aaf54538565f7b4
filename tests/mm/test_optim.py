"""What a config may ask of the optimizer: layer-wise decay of the learning rate."""

import re
import textwrap
import warnings
from pathlib import Path

import pytest
from mmengine.optim import build_optim_wrapper
from torch import nn

from cpvt_pyramid.mm import CPVTPyramid, DenseCPVT
from cpvt_pyramid.names import count_layers


def detector(arch: str = 'pcpvt_nano', **options: object) -> nn.ModuleDict:
    column = dict(arch=dict(dim=16, heads=2, depth=3), out_channels=8)
    backbone = DenseCPVT(**column) if arch == 'column' else CPVTPyramid(arch, **options)
    return nn.ModuleDict(dict(backbone=backbone, head=nn.Conv2d(192, 3, 1)))


def rates(model: nn.Module, **paramwise: object) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter, of 1 and 0.1."""
    config = dict(
        type='OptimWrapper',
        constructor='LayerDecayConstructor',
        optimizer=dict(type='AdamW', lr=1.0, weight_decay=0.1),
        paramwise_cfg=paramwise,
    )
    groups = build_optim_wrapper(model, config).optimizer.param_groups
    found = {group['params'][0]: (group['lr'], group['weight_decay']) for group in groups}
    assert sum(len(group['params']) for group in groups) == len(found)
    return {name: found[p] for name, p in model.named_parameters() if p in found}


@pytest.mark.parametrize(
    'arch, layers_after',
    [
        (
            'pcpvt_nano',
            {  # eight blocks, two in each stage
                'blocks.3.1.mlp.fc2.weight': 1,
                'blocks.3.0.attn.q.bias': 2,
                'pos_block.3.proj.0.weight': 2,
                'patch_embeds.3.proj.weight': 2,
                'blocks.2.1.norm1.weight': 3,
                'blocks.0.0.mlp.fc1.weight': 8,
                'patch_embeds.0.norm.bias': 9,
            },
        ),
        ('pvt_tiny', {'pos_embeds.0.table': 9}),
        ('svt_small', {'norm_list.3.weight': 1}),
        (
            'column',
            {
                'levels.0.conv.weight': 0,
                'blocks.2.attn.qkv.weight': 1,
                'pos_block.0.proj.0.weight': 3,
                'patch_embed.proj.weight': 4,
                'cls_token': 4,
            },
        ),
    ],
)
def test_learning_rate_falls_layer_by_layer_towards_the_image(arch, layers_after):
    model = detector(arch)
    lr = {name: rate for name, (rate, _) in rates(model, layer_decay=0.5).items()}
    assert lr['head.weight'] == lr['head.bias'] == 1
    for name, after in layers_after.items():
        assert lr[f'backbone.{name}'] == 0.5**after, name
    assert set(lr.values()) == {0.5**i for i in range(count_layers(model.backbone))}


def test_what_a_derived_class_adds_has_the_full_rate():
    model = detector()
    model.backbone.adapter = nn.Linear(4, 4)
    assert rates(model, layer_decay=0.5)['backbone.adapter.weight'][0] == 1


def test_custom_keys_reach_the_peg():
    custom_keys = dict(pos_block=dict(lr_mult=10.0, decay_mult=0.0), head=dict(lr_mult=2.0))
    found = rates(detector(), layer_decay=0.5, norm_decay_mult=0.0, custom_keys=custom_keys)
    assert found['backbone.pos_block.3.proj.0.weight'] == (10 * 0.5**2, 0)
    assert found['backbone.blocks.3.1.norm1.weight'] == (0.5, 0)
    assert found['backbone.blocks.3.1.mlp.fc1.weight'] == (0.5, 0.1)
    assert found['head.weight'] == (2, 0.1)


def test_frozen_stages_are_left_out_and_mistakes_are_errors():
    model = detector(frozen_stages=1)
    assert not any('blocks.0' in name for name in rates(model, layer_decay=0.5))
    for decay in (None, 0, 1.5, '0.8'):
        with pytest.raises(ValueError, match='layer_decay must be'):
            rates(detector(), layer_decay=decay)
    with pytest.raises(ValueError, match='CPVTPyramid'):
        rates(nn.Sequential(nn.Linear(2, 2)), layer_decay=0.5)


def test_settings_that_a_longer_key_hides():
    model = detector(stage_norm=True)
    keys = dict(backbone=dict(lr_mult=0.1), norm=dict(decay_mult=0.0), pos_block=dict(decay_mult=0))
    with pytest.warns(UserWarning) as caught:
        found = rates(model, layer_decay=1.0, custom_keys=keys)
    assert found['backbone.pos_block.0.proj.0.weight'] == (1, 0)  # not a tenth
    assert found['backbone.norm_list.0.weight'] == (0.1, 0.1)  # it decays
    lines = [str(each.message) for each in caught]
    assert len(lines) == 2
    assert lines[0].startswith("custom_keys: 'norm' has decay_mult=0.0, which does not apply to ")
    assert "'backbone' has lr_mult=0.1, which does not apply to backbone.pos_block.0." in lines[1]


def test_the_keys_of_the_docs():
    page = Path(__file__).parents[2].joinpath('docs/mm.md').read_text()
    (code,) = (b for b in re.findall(r'```python\n(.*?)```', page, re.S) if 'without_decay' in b)
    names: dict = {}
    exec(textwrap.dedent(code), names)
    model = detector(stage_norm=True)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        found = rates(model, layer_decay=1.0, custom_keys=names['custom_keys'])
    for name, (rate, decay) in found.items():
        in_backbone = name.startswith('backbone.')
        assert rate == (0.1 if in_backbone else 1)
        spared = re.search(r'pos_block|norm', name)
        assert decay == (0 if spared else 0.1), name
