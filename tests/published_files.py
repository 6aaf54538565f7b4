"""Checkpoints as they are published, in every format: made by the libraries, or written out."""

import re
from functools import partial

import torch
from foreign import TINY, classifier_of_mmpretrain, of_mmdet, of_mmpretrain, of_mmseg, of_timm

from cpvt_pyramid.checkpoints.formats import to_format, to_ours

DENSE = [True] * 4


def pvt_of_its_authors(arch: str = 'pvt') -> dict:
    """Names and shapes of PVT's own code, by the reverse of mmdet's conversion from them."""
    official = to_format(to_ours(of_mmdet(arch).state_dict()), 'pvt')
    last = official['pos_embed4']
    classifier = {
        'pos_embed4': torch.cat([torch.randn_like(last[:, :1]), last], dim=1),
        'cls_token': torch.randn(1, 1, 64),
        'norm.weight': torch.randn(64),
        'norm.bias': torch.randn(64),
        'head.weight': torch.randn(5, 64),
        'head.bias': torch.randn(5),
    }
    return official | classifier


def segformer_of_transformers(arch: str) -> dict:
    """Names and shapes of transformers' `SegformerForImageClassification`, written out here."""
    shapes = {}
    row = TINY[arch]
    inputs = 3
    for i, dim in enumerate(row.dims):
        side = 3 if i else 7
        hidden = dim * row.mlp_ratios[i]
        embedding = f'segformer.encoder.patch_embeddings.{i}'
        shapes[f'{embedding}.proj'] = (dim, inputs, side, side)
        shapes[f'{embedding}.layer_norm'] = (dim,)
        for j in range(row.depths[i]):
            block = f'segformer.encoder.block.{i}.{j}'
            for part in ('query', 'key', 'value'):
                shapes[f'{block}.attention.self.{part}'] = (dim, dim)
            if row.sr_ratios[i] > 1:
                shapes[f'{block}.attention.self.sr'] = (dim, dim, *[row.sr_ratios[i]] * 2)
                shapes[f'{block}.attention.self.layer_norm'] = (dim,)
            shapes[f'{block}.attention.output.dense'] = (dim, dim)
            shapes[f'{block}.layer_norm_1'] = (dim,)
            shapes[f'{block}.layer_norm_2'] = (dim,)
            shapes[f'{block}.mlp.dense1'] = (hidden, dim)
            shapes[f'{block}.mlp.dwconv.dwconv'] = (hidden, 1, 3, 3)
            shapes[f'{block}.mlp.dense2'] = (dim, hidden)
        shapes[f'segformer.encoder.layer_norm.{i}'] = (dim,)
        inputs = dim
    shapes['classifier'] = (5, dim)
    return random_tensors(shapes)


def segformer_of_transformers_5(arch: str) -> dict:
    """The names that the same tensors have in the modules of transformers 5."""
    names = {
        r'encoder\.patch_embeddings\.(\d)': r'stages.\1.patch_embeddings',
        r'encoder\.block\.(\d)': r'stages.\1.blocks',
        r'encoder\.layer_norm\.(\d)': r'stages.\1.layer_norm',
        r'attention\.self\.(query|key|value)': lambda match: f'attention.{match[1][0]}_proj',
        r'attention\.self\.sr': 'attention.sequence_reduction.sequence_reduction',
        r'attention\.self\.layer_norm': 'attention.sequence_reduction.layer_norm',
        r'attention\.output\.dense': 'attention.o_proj',
        'layer_norm_1': 'layernorm_before',
        'layer_norm_2': 'layernorm_after',
        'mlp.dense': 'mlp.fc',
    }
    tensors = {}
    for name, value in segformer_of_transformers(arch).items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        tensors[name] = value
    return tensors


def pvt_of_transformers(arch: str) -> dict:
    """Names and shapes of transformers' `PvtForImageClassification`, written out here."""
    shapes = {}
    tensors = {}
    row = TINY[arch]
    inputs = 3
    last = len(row.dims) - 1
    for i, dim in enumerate(row.dims):
        embedding = f'pvt.encoder.patch_embeddings.{i}'
        entries = (224 // row.strides[i]) ** 2 + (i == last)
        tensors[f'{embedding}.position_embeddings'] = torch.randn(1, entries, dim)
        shapes[f'{embedding}.projection'] = (dim, inputs, *[row.patch_sizes[i]] * 2)
        shapes[f'{embedding}.layer_norm'] = (dim,)
        for j in range(row.depths[i]):
            block = f'pvt.encoder.block.{i}.{j}'
            for part in ('query', 'key', 'value'):
                shapes[f'{block}.attention.self.{part}'] = (dim, dim)
            if row.sr_ratios[i] > 1:
                reduction = f'{block}.attention.self.sequence_reduction'
                shapes[reduction] = (dim, dim, *[row.sr_ratios[i]] * 2)
                shapes[f'{block}.attention.self.layer_norm'] = (dim,)
            shapes[f'{block}.attention.output.dense'] = (dim, dim)
            shapes[f'{block}.layer_norm_1'] = (dim,)
            shapes[f'{block}.layer_norm_2'] = (dim,)
            shapes[f'{block}.mlp.dense1'] = (dim * row.mlp_ratios[i], dim)
            shapes[f'{block}.mlp.dense2'] = (dim, dim * row.mlp_ratios[i])
        inputs = dim
    tensors[f'pvt.encoder.patch_embeddings.{last}.cls_token'] = torch.randn(1, 1, dim)
    shapes['pvt.encoder.layer_norm'] = (dim,)
    shapes['classifier'] = (5, dim)
    return tensors | random_tensors(shapes)


def pvt_v2_of_transformers(arch: str) -> dict:
    """Names and shapes of transformers' `PvtV2ForImageClassification`, written out here."""
    names = {
        r'patch_embed(\d)': 'patch_embedding',
        r'block(\d)': 'blocks',
        r'norm(\d)\.(?=weight|bias)': 'layer_norm.',
    }
    layers = {
        'patch_embedding.norm': 'patch_embedding.layer_norm',
        '.norm1.': '.layer_norm_1.',
        '.norm2.': '.layer_norm_2.',
        '.attn.q.': '.attention.query.',
        '.attn.sr.': '.attention.spatial_reduction.',
        '.attn.norm.': '.attention.layer_norm.',
        '.attn.proj.': '.attention.proj.',
        '.mlp.fc': '.mlp.dense',
    }
    tensors = {}
    for name, value in official_pvt_v2(arch).items():
        for pattern, layer in names.items():
            match = re.match(pattern, name)
            if match:
                name = f'pvt_v2.encoder.layers.{int(match[1]) - 1}.{layer}{name[match.end() :]}'
        for theirs, layer in layers.items():
            name = name.replace(theirs, layer)
        if '.attn.kv.' in name:
            for part, half in zip(('key', 'value'), value.chunk(2)):
                tensors[name.replace('.attn.kv.', f'.attention.{part}.')] = half
        else:
            tensors[name.replace('head.', 'classifier.')] = value
    return tensors


def official_pvt_v2(arch: str) -> dict:
    """Names and shapes of the code of PVTv2's and of SegFormer's authors, written out here."""
    shapes = {}
    row = TINY[arch]
    inputs = 3
    for i, dim in enumerate(row.dims):
        side = 3 if i else 7
        hidden = dim * row.mlp_ratios[i]
        shapes[f'patch_embed{i + 1}.proj'] = (dim, inputs, side, side)
        shapes[f'patch_embed{i + 1}.norm'] = (dim,)
        for j in range(row.depths[i]):
            block = f'block{i + 1}.{j}'
            shapes[f'{block}.norm1'] = (dim,)
            shapes[f'{block}.attn.q'] = (dim, dim)
            shapes[f'{block}.attn.kv'] = (2 * dim, dim)
            shapes[f'{block}.attn.proj'] = (dim, dim)
            linear = row.attention == 'LinearAttention'
            if linear or row.sr_ratios[i] > 1:
                step = 1 if linear else row.sr_ratios[i]
                shapes[f'{block}.attn.sr'] = (dim, dim, step, step)
                shapes[f'{block}.attn.norm'] = (dim,)
            shapes[f'{block}.norm2'] = (dim,)
            shapes[f'{block}.mlp.fc1'] = (hidden, dim)
            shapes[f'{block}.mlp.dwconv.dwconv'] = (hidden, 1, 3, 3)
            shapes[f'{block}.mlp.fc2'] = (dim, hidden)
        shapes[f'norm{i + 1}'] = (dim,)
        inputs = dim
    shapes['head'] = (5, dim)
    return random_tensors(shapes)


def random_tensors(shapes: dict[str, tuple]) -> dict:
    """A weight and a bias of each layer, from the weight's shape."""
    tensors = {}
    for name, shape in shapes.items():
        tensors[f'{name}.weight'] = torch.randn(shape)
        tensors[f'{name}.bias'] = torch.randn(shape[:1])
    return tensors


# What a file is called: the arch, the format, and a function of the arch that returns a model or
# its tensors.
SOURCES = {
    'timm-pcpvt': ('pcpvt', 'ours', of_timm),
    'timm-svt': ('svt', 'ours', of_timm),
    'mmseg-pcpvt': ('pcpvt', 'mmseg', of_mmseg),
    'mmseg-svt': ('svt', 'mmseg', of_mmseg),
    'mmpretrain-pcpvt': ('pcpvt', 'mmpretrain', classifier_of_mmpretrain),
    'mmpretrain-svt': ('svt', 'mmpretrain', classifier_of_mmpretrain),
    'mmpretrain-svt-dense': ('svt', 'mmpretrain', partial(of_mmpretrain, stage_norms=DENSE)),
    'mmdet-pvt': ('pvt', 'mmdet', of_mmdet),
    'pvt': ('pvt', 'pvt', pvt_of_its_authors),
    'timm-pvt_v2': ('pvt_v2', 'timm_pvt_v2', of_timm),
    'timm-pvt_v2_li': ('pvt_v2_li', 'timm_pvt_v2', of_timm),
    'mmdet-pvt_v2': ('pvt_v2', 'mm_pvt_v2', of_mmdet),
    'mmseg-mit': ('mit', 'mm_pvt_v2', of_mmseg),
    'official-pvt_v2_li': ('pvt_v2_li', 'pvt_v2', official_pvt_v2),
    'official-mit': ('mit', 'pvt_v2', official_pvt_v2),
    'transformers-mit': ('mit', 'transformers', segformer_of_transformers),
    'transformers-pvt': ('pvt', 'transformers_pvt', pvt_of_transformers),
    'transformers-pvt_v2': ('pvt_v2', 'transformers_pvt_v2', pvt_v2_of_transformers),
    'transformers-pvt_v2_li': ('pvt_v2_li', 'transformers_pvt_v2', pvt_v2_of_transformers),
    'transformers-5-mit': ('mit', 'transformers_5', segformer_of_transformers_5),
}


def tensors_from(source: str) -> dict:
    arch, _, make = SOURCES[source]
    made = make(arch)
    return made if isinstance(made, dict) else made.state_dict()
