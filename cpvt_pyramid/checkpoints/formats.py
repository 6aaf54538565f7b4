"""The formats of checkpoint files: how each names and shapes the tensors of our models.

A format is a row of `FORMATS`, which is read in both directions: `to_ours` and `to_format`.
Our names are those of the Twins authors and of timm.
"""

import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor


class Format(NamedTuple):
    """How a family of checkpoint files names and shapes the tensors of our models.

    Attributes:
        mark: regular expression that matches some key of such a file, and no key of a format that
            comes later in `FORMATS`.
        holds: regular expression that matches our names of all tensors that it has a place for,
            except those of the classifier.
        names: pairs (ours, theirs). Each is the beginning of a key or, if it starts with a dot, a
            part inside of it. `{i}` is the index of a stage and `{j}` that of a block, from 0;
            `{i+1}` is from 1.
        conv_in_mlp: whether the MLP of its models has a depthwise convolution (PVTv2, MiT).
        linear: whether its models may have linear attention (PVTv2's `li`).
        in_proj: whether q and kv of global attention are one tensor, with rows [q; kv].
        split_kv: whether k and v of global attention are two tensors, `key` and `value`.
        pointwise: whether the MLP's linear layers are 1x1 convolutions.
        flat_tables: whether tables are (1, N, C) instead of (1, H, W, C).
        class_entry: whether the last table has an entry for the class token before the others.
        prefix: of all names but those of the head.
    """

    mark: str
    holds: str
    names: tuple[tuple[str, str], ...]
    conv_in_mlp: bool = False
    linear: bool = False
    in_proj: bool = False
    split_kv: bool = False
    pointwise: bool = False
    flat_tables: bool = False
    class_entry: bool = False
    prefix: str = ''


PEG_PYRAMID = r'(patch_embeds|blocks|norm_list)\.|pos_block\.\d+\.proj\.0\.(weight|bias)$'
COLUMN = r'(patch_embed|pos_embed|blocks)\.'
STAGES = r'(patch_embeds|blocks|norm_list)\.'
TABLE_PYRAMID = r'(patch_embeds|pos_embeds)\.|blocks\.\d+\.\d+\.(?!attn\.qkv)'
# Pairs of names that models of the mm packages have in common.
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
    'mm_pvt_v2': Format(  # mmdetection's PyramidVisionTransformerV2, mmsegmentation's MiT
        r'layers\.\d+\.1\.\d+\.ffn\.layers\.4\.',
        STAGES,
        (
            ('patch_embeds.{i}.proj.', 'layers.{i}.0.projection.'),
            ('patch_embeds.{i}.norm.', 'layers.{i}.0.norm.'),
            ('blocks.{i}.{j}.', 'layers.{i}.1.{j}.'),
            ('norm_list.{i}.', 'layers.{i}.2.'),
            ('.mlp.fc1.', '.ffn.layers.0.'),
            ('.mlp.dwconv.', '.ffn.layers.1.'),
            ('.mlp.fc2.', '.ffn.layers.4.'),
        ),
        conv_in_mlp=True,
        in_proj=True,
        pointwise=True,
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
    'pvt_v2': Format(  # the authors of PVTv2 and of SegFormer
        r'block\d\.\d+\.mlp\.dwconv\.',
        STAGES,
        (
            ('patch_embeds.{i}.', 'patch_embed{i+1}.'),
            ('blocks.{i}.{j}.', 'block{i+1}.{j}.'),
            ('norm_list.{i}.', 'norm{i+1}.'),
            ('.mlp.dwconv.', '.mlp.dwconv.dwconv.'),
        ),
        conv_in_mlp=True,
        linear=True,
    ),
    'timm_pvt_v2': Format(  # timm's PVTv2
        r'stages\.\d+\.blocks\.\d+\.mlp\.dwconv\.(weight|bias)$',
        STAGES,
        (
            ('patch_embeds.0.', 'patch_embed.'),
            ('patch_embeds.{i}.', 'stages.{i}.downsample.'),
            ('blocks.{i}.{j}.', 'stages.{i}.blocks.{j}.'),
            ('norm_list.{i}.', 'stages.{i}.norm.'),
        ),
        conv_in_mlp=True,
        linear=True,
    ),
    'transformers': Format(  # files of transformers' SegFormer
        r'encoder\.block\.\d+\.\d+\.attention\.self\.',
        STAGES,
        (
            ('patch_embeds.{i}.proj.', 'encoder.patch_embeddings.{i}.proj.'),
            ('patch_embeds.{i}.norm.', 'encoder.patch_embeddings.{i}.layer_norm.'),
            ('blocks.{i}.{j}.', 'encoder.block.{i}.{j}.'),
            ('norm_list.{i}.', 'encoder.layer_norm.{i}.'),
            ('.norm1.', '.layer_norm_1.'),
            ('.norm2.', '.layer_norm_2.'),
            ('.attn.q.', '.attention.self.query.'),
            ('.attn.key.', '.attention.self.key.'),
            ('.attn.value.', '.attention.self.value.'),
            ('.attn.sr.', '.attention.self.sr.'),
            ('.attn.norm.', '.attention.self.layer_norm.'),
            ('.attn.proj.', '.attention.output.dense.'),
            ('.mlp.fc1.', '.mlp.dense1.'),
            ('.mlp.dwconv.', '.mlp.dwconv.dwconv.'),
            ('.mlp.fc2.', '.mlp.dense2.'),
            ('head.', 'classifier.'),
        ),
        conv_in_mlp=True,
        split_kv=True,
        prefix='segformer.',
    ),
    'transformers_5': Format(  # the modules of SegFormer since transformers 5
        r'stages\.\d+\.blocks\.\d+\.attention\.q_proj\.',
        STAGES,
        (
            ('patch_embeds.{i}.proj.', 'stages.{i}.patch_embeddings.proj.'),
            ('patch_embeds.{i}.norm.', 'stages.{i}.patch_embeddings.layer_norm.'),
            ('blocks.{i}.{j}.', 'stages.{i}.blocks.{j}.'),
            ('norm_list.{i}.', 'stages.{i}.layer_norm.'),
            ('.norm1.', '.layernorm_before.'),
            ('.norm2.', '.layernorm_after.'),
            ('.attn.q.', '.attention.q_proj.'),
            ('.attn.key.', '.attention.k_proj.'),
            ('.attn.value.', '.attention.v_proj.'),
            ('.attn.sr.', '.attention.sequence_reduction.sequence_reduction.'),
            ('.attn.norm.', '.attention.sequence_reduction.layer_norm.'),
            ('.attn.proj.', '.attention.o_proj.'),
            ('.mlp.dwconv.', '.mlp.dwconv.dwconv.'),
            ('head.', 'classifier.'),
        ),
        conv_in_mlp=True,
        split_kv=True,
        prefix='segformer.',
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
LINEAR_IN_MLP = re.compile(r'\.mlp\.fc[12]\.')
CLASSIFIER = re.compile(r'(norm|head)\.|cls_token$|cls_pos$')
# Names of backbones in all formats, by their beginnings.
BACKBONE = re.compile(r'(patch_embed|pos_embed|pos_block|blocks?\d*\.|layers\.|stages\.|encoder\.)')
FIELD = re.compile(r'\{(\w)(\+1)?\}')


def format_of(names: Iterable[str]) -> str:
    """The key in `FORMATS` of a checkpoint with these names, or 'ours'."""
    names = list(names)
    for key, form in FORMATS.items():
        if any(re.match(form.mark, name) for name in names):
            return key
    return 'ours'


def to_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert what `tensors_of` returns, of any format, to our names and shapes. Keeps every value.

    Raises:
        ValueError: a tensor has a shape that its format does not have.
    """
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
        name = name.replace('.attn.attn.out_proj.', '.attn.proj.')
        if form.pointwise and LINEAR_IN_MLP.search(name) and value.dim() == 4:
            value = value.flatten(1)
        if '.attn.attn.in_proj_' in name:
            ours.update(split_in_proj(name, value))
        elif form.flat_tables and name.endswith('.table'):
            table, class_entry = square_table(name, value)
            ours[name] = table
            if class_entry is not None:
                ours['cls_pos'] = class_entry
        else:
            ours[name] = value
    return with_joined_kv(ours) if form.split_kv else ours


def with_joined_kv(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace each pair `attn.key`, `attn.value` by one tensor `attn.kv`, with rows [k; v]."""
    joint = {}
    for name, value in tensors.items():
        partner = name.replace('.attn.key.', '.attn.value.')
        if partner in tensors and '.attn.key.' in name:
            if value.dim() == 0 or not are_alike(value, tensors[partner]):
                raise ValueError(f'{name} and {partner} must have one shape, dtype and device')
            name = name.replace('.attn.key.', '.attn.kv.')
            value = torch.cat([value, tensors[partner]])
        elif name.replace('.attn.value.', '.attn.key.') in tensors and '.attn.value.' in name:
            continue
        joint[name] = value
    return joint


def are_alike(a: Tensor, b: Tensor) -> bool:
    """True for tensors of one shape, dtype and device."""
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def split_in_proj(name: str, value: Tensor) -> dict[str, Tensor]:
    """The tensors of q and of kv, by our names, from one with the rows of all three."""
    if value.dim() == 0 or len(value) % 3:
        raise ValueError(f'{name} must have rows of q, k and v, got {tuple(value.shape)}')
    dim = len(value) // 3
    q, kv = value.split([dim, 2 * dim])
    stem, _, kind = name.partition('.attn.attn.in_proj_')
    return {f'{stem}.attn.q.{kind}': q, f'{stem}.attn.kv.{kind}': kv}


def square_table(name: str, value: Tensor) -> tuple[Tensor, Optional[Tensor]]:
    """The table (1, H, W, C) from (1, N, C), and the entry of a class token before it, if any."""
    if value.dim() != 3:
        raise ValueError(f'{name} must have the shape (1, N, C), got {tuple(value.shape)}')
    entries = value.shape[1]
    side = math.isqrt(entries)
    if side == 0 or entries > side**2 + 1:
        raise ValueError(f'{name} must be square, got {entries} entries')
    class_entry = None
    if entries == side**2 + 1:
        class_entry = value[:, :1]
        value = value[:, 1:]
    return value.unflatten(1, (side, side)), class_entry


def to_format(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    """The reverse of `to_ours`: convert our names and shapes to those of another format.

    Args:
        tensors: under our names.
        key: of `FORMATS`, or 'ours'. Tensors of a classifier keep our names where a format of
            backbones has none.

    Raises:
        ValueError: the format has no place for the architecture.
    """
    if key == 'ours':
        return tensors
    form = FORMATS[key]
    for name in tensors:
        if not re.match(form.holds, name) and not CLASSIFIER.match(name):
            raise ValueError(f'the format {key!r} has no place for {name}')
    convs = [name for name in tensors if '.mlp.dwconv.' in name]
    if convs and not form.conv_in_mlp:
        raise ValueError(f'the format {key!r} has no place for {convs[0]}')
    if form.conv_in_mlp and not convs:
        raise ValueError(f'the format {key!r} is of models with a convolution in the MLP only')
    reduction = tensors.get('blocks.0.0.attn.sr.weight')
    if convs and reduction is not None and reduction.shape[2:] == (1, 1) and not form.linear:
        raise ValueError(f'the format {key!r} has no place for linear attention')
    pairs = list(form.names)
    if key == 'mmpretrain' and 'norm_list.0.weight' not in tensors:
        pairs.append(('norm.', 'norm_after_stage3.'))
    tables = [name for name in tensors if name.endswith('.table')]
    table_with_class_entry = ''
    if form.class_entry and tables and 'cls_pos' in tensors:
        table_with_class_entry = max(tables)  # of the last stage
    theirs = {}
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition('.attn.')
        if name == 'cls_pos' and table_with_class_entry:
            continue
        if form.in_proj and f'{stem}.attn.q.weight' in tensors:  # global attention
            if leaf.startswith('kv.'):
                continue
            if leaf.startswith('q.'):
                kind = leaf.removeprefix('q.')
                value = joined(tensors, name, f'{stem}.attn.kv.{kind}', dim=0)
                name = f'{stem}.attn.attn.in_proj_{kind}'
            if leaf.startswith('proj.'):
                name = f'{stem}.attn.attn.out_{leaf}'
        if form.pointwise and LINEAR_IN_MLP.search(name) and value.dim() == 2:
            value = value[..., None, None]
        if name.endswith('.table') and form.flat_tables:
            value = value.flatten(1, 2)
            if name == table_with_class_entry:
                value = joined({**tensors, name: value}, 'cls_pos', name, dim=1)
        prefix = '' if name.startswith('head.') else form.prefix
        if form.split_kv and leaf.startswith('kv.'):
            for part, half in zip(('key', 'value'), value.chunk(2)):
                theirs[prefix + rename(name.replace('.kv.', f'.{part}.'), pairs)] = half
            continue
        theirs[prefix + rename(name, pairs)] = value
    return theirs


def joined(tensors: dict[str, Tensor], first: str, second: str, dim: int) -> Tensor:
    """Concatenate two tensors that are one in another format.

    Raises:
        ValueError: they have different dtypes.
    """
    a = tensors[first]
    b = tensors[second]
    if a.dtype != b.dtype:
        raise ValueError(
            f'{first} and {second} are one tensor in this format and must have one dtype, got '
            f'{a.dtype} and {b.dtype}'
        )
    return torch.cat([a, b], dim)


def rename(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Rename a key by every pair (from, to) that it matches; see `Format.names`."""
    for source, target in pairs:
        match = key_pattern(source).search(name)
        if match:
            for field, plus_one in FIELD.findall(source):
                index = int(match[field])
                if plus_one:
                    index -= 1
                target = target.replace(f'{{{field}}}', str(index))
                target = target.replace(f'{{{field}+1}}', str(index + 1))
            name = name[: match.start()] + target + name[match.end() :]
    return name


@functools.cache
def key_pattern(template: str) -> re.Pattern:
    """The regular expression of a side of a pair: numbers at its fields, the rest literally."""
    start = '' if template.startswith('.') else '^'
    return re.compile(start + FIELD.sub(r'(?P<\1>\\d+)', template.replace('.', r'\.')))
