"""The formats of checkpoint files: how each names and shapes the tensors of our models.

A format is a row of `FORMATS`, which is read in both directions: `to_ours` and `to_format`.
Our names are those of the Twins authors and of timm.
"""

import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """How a family of checkpoint files names and shapes the tensors of our models."""

    mark: str  # regular expression: some key of such a file, and of no other, matches it
    holds: str  # regular expression: our names of what it has a place for, the classifier aside
    # (ours, theirs): the beginning of a key or, with a dot in front, what stands inside of it.
    # i is the stage, j the block; {i+1} counts from one.
    names: tuple[tuple[str, str], ...]
    in_proj: bool = False  # q and kv of global attention are one tensor, rows [q; kv]
    pointwise: bool = False  # the MLP's weights are those of 1x1 convolutions
    flat_tables: bool = False  # tables are (1, N, C)
    class_entry: bool = False  # the last table has a class token's entry in front of the rest
    prefix: str = ''  # of all but the head


PEG_PYRAMID = r'(patch_embeds|blocks|norm_list)\.|pos_block\.\d+\.proj\.0\.(weight|bias)$'
COLUMN = r'(patch_embed|pos_embed|blocks)\.'
TABLE_PYRAMID = r'(patch_embeds|pos_embeds)\.|blocks\.\d+\.\d+\.(?!attn\.qkv)'
# Rows that models of the mm packages have in common.
MM_MLP = (('.mlp.fc1.', '.ffn.layers.0.0.'), ('.mlp.fc2.', '.ffn.layers.1.'))
MM_PYRAMID = (
    ('patch_embeds.{i}.proj.', 'patch_embeds.{i}.projection.'),
    ('pos_block.{i}.proj.0.', 'position_encodings.{i}.proj.'),
    *MM_MLP,
)
FORMATS = {
    'mmseg': Format(  # mmsegmentation's PCPVT and SVT
        r'layers\.\d+\.\d+\.(norm1|attn)\.',
        PEG_PYRAMID,
        (*MM_PYRAMID, ('blocks.{i}.{j}.', 'layers.{i}.{j}.')),
        in_proj=True,
    ),
    'mmpretrain': Format(  # mmpretrain's PCPVT and SVT
        r'stages\.\d+\.\d+\.',
        PEG_PYRAMID,
        (
            *MM_PYRAMID,
            ('blocks.{i}.{j}.', 'stages.{i}.{j}.'),
            ('norm_list.{i}.', 'norm_after_stage{i}.'),
            ('head.', 'head.fc.'),
        ),
        prefix='backbone.',
    ),
    'mmdet': Format(  # mmdetection's PyramidVisionTransformer; a stage is [patches, blocks]
        r'layers\.\d+\.1\.\d+\.',
        TABLE_PYRAMID,
        (
            ('patch_embeds.{i}.proj.', 'layers.{i}.0.projection.'),
            ('patch_embeds.{i}.norm.', 'layers.{i}.0.norm.'),
            ('pos_embeds.{i}.table', 'layers.{i}.1.0.pos_embed'),
            ('blocks.{i}.{j}.', 'layers.{i}.1.{j+1}.'),
            ('.mlp.fc1.', '.ffn.layers.0.'),
            ('.mlp.fc2.', '.ffn.layers.3.'),
        ),
        in_proj=True,
        pointwise=True,
        flat_tables=True,
    ),
    'pvt': Format(  # PVT's authors
        r'patch_embed1\.',
        TABLE_PYRAMID,
        (
            ('patch_embeds.{i}.', 'patch_embed{i+1}.'),
            ('pos_embeds.{i}.table', 'pos_embed{i+1}'),
            ('blocks.{i}.{j}.', 'block{i+1}.{j}.'),
        ),
        flat_tables=True,
        class_entry=True,
    ),
    'mmpretrain_vit': Format(  # mmpretrain's VisionTransformer
        r'layers\.\d+\.ln1\.',
        COLUMN,
        (
            ('patch_embed.proj.', 'patch_embed.projection.'),
            ('blocks.{j}.norm1.', 'layers.{j}.ln1.'),
            ('blocks.{j}.norm2.', 'layers.{j}.ln2.'),
            ('blocks.{j}.', 'layers.{j}.'),
            *MM_MLP,
            ('norm.', 'ln1.'),
            ('pos_embed.table', 'pos_embed'),
            ('head.', 'head.layers.head.'),
        ),
        flat_tables=True,
        class_entry=True,
        prefix='backbone.',
    ),
    'vit': Format(  # DeiT's authors, and timm's ViT
        r'pos_embed$',
        COLUMN,
        (('pos_embed.table', 'pos_embed'),),
        flat_tables=True,
        class_entry=True,
    ),
}
CLASSIFIER = re.compile(r'(norm|head)\.|cls_token$|cls_pos$')
FIELD = re.compile(r'\{(\w)(\+1)?\}')


def format_of(names: Iterable[str]) -> str:
    """The key in `FORMATS` of a checkpoint with these names, or 'ours'."""
    names = list(names)
    for key, form in FORMATS.items():
        if any(re.match(form.mark, name) for name in names):
            return key
    return 'ours'


def to_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `tensors_of` returns of any format, under our names, in our shapes. Nothing is lost."""
    key = format_of(tensors)
    if key == 'ours':
        return {name.replace('head.fc.', 'head.'): value for name, value in tensors.items()}
    form = FORMATS[key]
    pairs = [(theirs, ours) for ours, theirs in form.names]
    if key == 'mmpretrain' and 'norm_after_stage0.weight' not in tensors:
        pairs.insert(0, ('norm_after_stage3.', 'norm.'))  # the classifier's
    ours = {}
    for name, value in tensors.items():
        name = rename(name, pairs)
        stem, in_proj, kind = name.partition('.attn.attn.in_proj_')
        if in_proj:
            if value.dim() == 0 or len(value) % 3:
                raise ValueError(f'{name} must have rows of q, k and v, got {tuple(value.shape)}')
            dim = len(value) // 3
            ours[f'{stem}.attn.q.{kind}'], ours[f'{stem}.attn.kv.{kind}'] = value.split(
                [dim, 2 * dim]
            )
            continue
        name = name.replace('.attn.attn.out_proj.', '.attn.proj.')
        if form.pointwise and '.mlp.' in name and value.dim() == 4:
            value = value.flatten(1)
        if name.endswith('.table') and form.flat_tables:
            if value.dim() != 3:
                raise ValueError(f'{name} must have the shape (1, N, C), got {tuple(value.shape)}')
            side = math.isqrt(value.shape[1])
            if not side or value.shape[1] - side**2 not in (0, 1):
                raise ValueError(f'{name} must be square, got {value.shape[1]} entries')
            if value.shape[1] > side**2:
                ours['cls_pos'] = value[:, :1]
                value = value[:, 1:]
            value = value.unflatten(1, (side, side))
        ours[name] = value
    return ours


def to_format(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    """The reverse of `to_ours`: our names and shapes in one of `FORMATS`, or 'ours'. Tensors of a
    classifier keep our names where a format of backbones has none.

    Raises:
        ValueError: the format has no place for the architecture.
    """
    if key == 'ours':
        return tensors
    form = FORMATS[key]
    for name in tensors:
        if not re.match(form.holds, name) and not CLASSIFIER.match(name):
            raise ValueError(f'the format {key!r} has no place for {name}')
    pairs = list(form.names)
    if key == 'mmpretrain' and 'norm_list.0.weight' not in tensors:
        pairs.append(('norm.', 'norm_after_stage3.'))
    last_table = max((name for name in tensors if name.endswith('.table')), default=None)
    theirs = {}
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition('.attn.')
        if name == 'cls_pos' and form.class_entry and last_table:
            continue
        if form.in_proj and f'{stem}.attn.q.weight' in tensors:
            if leaf.startswith('kv.'):
                continue
            if leaf.startswith('q.'):
                kind = leaf[2:]
                value = joined(tensors, name, f'{stem}.attn.kv.{kind}', dim=0)
                name = f'{stem}.attn.attn.in_proj_{kind}'
            if leaf.startswith('proj.'):
                name = f'{stem}.attn.attn.out_{leaf}'
        if form.pointwise and '.mlp.' in name and value.dim() == 2:
            value = value[..., None, None]
        if name.endswith('.table') and form.flat_tables:
            value = value.flatten(1, 2)
            if form.class_entry and name == last_table and 'cls_pos' in tensors:
                value = joined({**tensors, name: value}, 'cls_pos', name, dim=1)
        prefix = '' if name.startswith('head.') else form.prefix
        theirs[prefix + rename(name, pairs)] = value
    return theirs


def joined(tensors: dict[str, Tensor], first: str, second: str, dim: int) -> Tensor:
    """Two tensors that are one in another format.

    Raises:
        ValueError: they have different dtypes.
    """
    dtypes = tensors[first].dtype, tensors[second].dtype
    if dtypes[0] != dtypes[1]:
        raise ValueError(
            f'{first} and {second} are one tensor in this format and must have one dtype, got '
            f'{dtypes[0]} and {dtypes[1]}'
        )
    return torch.cat([tensors[first], tensors[second]], dim)


def rename(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """A key after every row of pairs (from, to) of a `Format` that it matches."""
    for source, target in pairs:
        match = key_pattern(source).search(name)
        if match:
            for field, one in FIELD.findall(source):
                index = int(match[field]) - bool(one)
                target = target.replace(f'{{{field}}}', str(index))
                target = target.replace(f'{{{field}+1}}', str(index + 1))
            name = name[: match.start()] + target + name[match.end() :]
    return name


@functools.cache
def key_pattern(template: str) -> re.Pattern:
    """Compile a row of a `Format`: numbers at its fields, the rest literally."""
    start = '' if template.startswith('.') else '^'
    return re.compile(start + FIELD.sub(r'(?P<\1>\\d+)', template.replace('.', r'\.')))
