"""The formats of checkpoint files: how each names and shapes the tensors of our models.

A format is a row of `FORMATS`, which is read in both directions: `to_ours` and `to_format`. A file
is of the format that knows most of its names: `find_formats`. Our names, of `names`, are those of
the Twins authors and of timm.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..names import BLOCK, COLUMN, GLOBAL, JOINT, MLP_CONV, PYRAMID, ModelPart, role_of


class Format(NamedTuple):
    """How a family of checkpoint files names and shapes the tensors of our models.

    Attributes:
        tensors: our names of all tensors that it has a place for, where `{i}` is the index of a
            stage and `{j}` that of a block.
        names: pairs (ours, theirs). Each is the beginning of a name or, if it starts with a dot, a
            part inside of it. `{i+1}` and `{j+1}` count from 1.
        linear: whether its models may have linear attention (PVTv2's `li`).
        in_proj: whether q and kv of global attention are one tensor, with rows [q; kv].
        split_kv: whether k and v of global attention are two tensors, `key` and `value`.
        pointwise: whether the MLP's linear layers are 1x1 convolutions.
        flat_tables: whether tables are (1, N, C) instead of (1, H, W, C).
        class_entry: whether the last table has an entry for the class token before the others.
        prefix: of all names but those of the head, in files of whole classifiers.
    """

    tensors: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    linear: bool = False
    in_proj: bool = False
    split_kv: bool = False
    pointwise: bool = False
    flat_tables: bool = False
    class_entry: bool = False
    prefix: str = ''


def templates(parts: dict[str, ModelPart], **others: Sequence[str]) -> tuple[str, ...]:
    """The names of the tensors of some parts, all that are published or the given ones."""
    found = []
    for name, tensors in others.items():
        part = parts[name]
        for tensor in tensors or part.tensors:
            found.append('.'.join(filter(None, (name, *part.indices, tensor))))
    return tuple(found)


HEAD = templates(PYRAMID, head=())
TOKENS = templates(PYRAMID, cls_token=(), cls_pos=(), norm=(), head=())
TWINS = templates(
    PYRAMID, patch_embeds=(), blocks=BLOCK + GLOBAL + JOINT, pos_block=(), norm_list=(), norm=()
)
PVT = templates(PYRAMID, patch_embeds=(), pos_embeds=(), blocks=BLOCK + GLOBAL)
PVT_V2 = templates(PYRAMID, patch_embeds=(), blocks=BLOCK + GLOBAL + MLP_CONV, norm_list=())
DEIT = templates(COLUMN, patch_embed=(), pos_embed=(), blocks=())
OURS = Format(
    tuple(
        dict.fromkeys(
            templates(PYRAMID, **dict.fromkeys(PYRAMID, ()))
            + templates(COLUMN, **dict.fromkeys(COLUMN, ()))
        )
    ),
    (),
)
# Pairs of names that models of the mm packages have in common.
MM_MLP = (('.mlp.fc1.', '.ffn.layers.0.0.'), ('.mlp.fc2.', '.ffn.layers.1.'))
MM_PYRAMID = (
    ('patch_embeds.{i}.proj.', 'patch_embeds.{i}.projection.'),
    ('pos_block.{i}.proj.0.', 'position_encodings.{i}.proj.'),
    *MM_MLP,
)
FORMATS = {
    'mmseg': Format(  # mmsegmentation's PCPVT and SVT
        TWINS,
        (*MM_PYRAMID, ('blocks.{i}.{j}.', 'layers.{i}.{j}.')),
        in_proj=True,
    ),
    'mmpretrain': Format(  # mmpretrain's PCPVT and SVT
        TWINS + HEAD,
        (
            *MM_PYRAMID,
            ('blocks.{i}.{j}.', 'stages.{i}.{j}.'),
            ('norm_list.{i}.', 'norm_after_stage{i}.'),
            ('head.', 'head.fc.'),
        ),
        prefix='backbone.',
    ),
    'mm_pvt_v2': Format(  # mmdetection's PyramidVisionTransformerV2, mmsegmentation's MiT
        PVT_V2,
        (
            ('patch_embeds.{i}.proj.', 'layers.{i}.0.projection.'),
            ('patch_embeds.{i}.norm.', 'layers.{i}.0.norm.'),
            ('blocks.{i}.{j}.', 'layers.{i}.1.{j}.'),
            ('norm_list.{i}.', 'layers.{i}.2.'),
            ('.mlp.fc1.', '.ffn.layers.0.'),
            ('.mlp.dwconv.', '.ffn.layers.1.'),
            ('.mlp.fc2.', '.ffn.layers.4.'),
        ),
        in_proj=True,
        pointwise=True,
    ),
    'mmdet': Format(  # mmdetection's PyramidVisionTransformer; a stage is [patches, blocks]
        PVT,
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
        PVT_V2 + HEAD,
        (
            ('patch_embeds.{i}.', 'patch_embed{i+1}.'),
            ('blocks.{i}.{j}.', 'block{i+1}.{j}.'),
            ('norm_list.{i}.', 'norm{i+1}.'),
            ('.mlp.dwconv.', '.mlp.dwconv.dwconv.'),
        ),
        linear=True,
    ),
    'timm_pvt_v2': Format(  # timm's PVTv2
        PVT_V2 + HEAD,
        (
            ('patch_embeds.0.', 'patch_embed.'),
            ('patch_embeds.{i}.', 'stages.{i}.downsample.'),
            ('blocks.{i}.{j}.', 'stages.{i}.blocks.{j}.'),
            ('norm_list.{i}.', 'stages.{i}.norm.'),
        ),
        linear=True,
    ),
    'timm_pvt_v2_maps': Format(  # timm's PVTv2 with features_only=True
        PVT_V2,
        (
            ('patch_embeds.0.', 'patch_embed.'),
            ('patch_embeds.{i}.', 'stages_{i}.downsample.'),
            ('blocks.{i}.{j}.', 'stages_{i}.blocks.{j}.'),
            ('norm_list.{i}.', 'stages_{i}.norm.'),
        ),
        linear=True,
    ),
    'transformers': Format(  # files of transformers' SegFormer
        PVT_V2 + HEAD,
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
        split_kv=True,
        prefix='segformer.',
    ),
    'transformers_5': Format(  # the modules of SegFormer since transformers 5
        PVT_V2 + HEAD,
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
        split_kv=True,
        prefix='segformer.',
    ),
    'pvt': Format(  # PVT's authors
        PVT + TOKENS,
        (
            ('patch_embeds.{i}.', 'patch_embed{i+1}.'),
            ('pos_embeds.{i}.table', 'pos_embed{i+1}'),
            ('blocks.{i}.{j}.', 'block{i+1}.{j}.'),
        ),
        flat_tables=True,
        class_entry=True,
    ),
    'mmpretrain_vit': Format(  # mmpretrain's VisionTransformer
        DEIT + TOKENS,
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
        DEIT + TOKENS,
        (('pos_embed.table', 'pos_embed'),),
        flat_tables=True,
        class_entry=True,
    ),
}
LINEAR_IN_MLP = re.compile(r'\.mlp\.fc[12]\.')
FIELD = re.compile(r'\{(\w)(\+1)?\}')
INDEX = '(?:0|[1-9][0-9]*)'
DEEPEST = 10  # parts of a name in front of a backbone's


class Spelling(NamedTuple):
    """One name in two formats, as templates, and the pattern of the first."""

    pattern: re.Pattern
    source: str
    target: str

    def translate(self, name: str) -> Optional[str]:
        """The name in the second format; None if it is not this one."""
        match = self.pattern.fullmatch(name)
        if not match:
            return None
        text = self.target
        for field, plus_one in FIELD.findall(self.source):
            index = int(match[field]) - bool(plus_one)
            if index < 0:
                return None
            text = text.replace(f'{{{field}}}', str(index))
            text = text.replace(f'{{{field}+1}}', str(index + 1))
        return text


def spelling(source: str, target: str) -> Spelling:
    pattern = FIELD.sub(rf'(?P<\1>{INDEX})', source.replace('.', r'\.'))
    return Spelling(re.compile(pattern), source, target)


def skeleton(name: str) -> str:
    """A name without its numbers. Equal names of two formats have equal ones."""
    return re.sub('[0-9]+', '#', FIELD.sub('#', name))


def names_between(form: Format) -> list[str]:
    """Our names of a format's tensors, but for those that it splits or joins: they have its own
    names for them, `attn.attn.in_proj_weight` or `attn.key` and `attn.value`."""
    names = []
    windows = any('.attn.qkv.' in name for name in form.tensors)
    for name in form.tensors:
        if form.in_proj and '.attn.kv.' in name:
            continue
        if form.in_proj and '.attn.q.' in name:
            names.append(name.replace('.attn.q.', '.attn.attn.in_proj_'))
        elif form.in_proj and '.attn.proj.' in name:
            names.append(name.replace('.attn.proj.', '.attn.attn.out_proj.'))
            if windows:  # whose attention has tensors of its own
                names.append(name)
        elif form.split_kv and '.attn.kv.' in name:
            names.append(name.replace('.attn.kv.', '.attn.key.'))
            names.append(name.replace('.attn.kv.', '.attn.value.'))
        else:
            names.append(name)
    return names


@functools.cache
def name_pairs(key: str, whole: bool = False) -> tuple[tuple[str, str], ...]:
    """The templates (ours, theirs) of all names of a format; see `names_between`.

    Args:
        key: of `FORMATS`, or 'ours'.
        whole: with the prefix that names have in files of whole classifiers.
    """
    form = OURS if key == 'ours' else FORMATS[key]
    pairs = []
    for ours in names_between(form):
        first = ours.replace('{i}', '0')
        if any(first.startswith(source) for source, _ in form.names if '.0.' in source):
            pairs.append(first)
        pairs.append(ours)
    spelled = []
    for ours in pairs:
        theirs = respell(ours, form.names)
        if whole and not ours.startswith('head.'):
            theirs = form.prefix + theirs
        spelled.append((ours, theirs))
    return tuple(spelled)


def respell(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Rename a template by every pair (from, to) that it matches; see `Format.names`."""
    for source, target in pairs:
        if source.startswith('.'):
            name = name.replace(source, target)
        elif name.startswith(source):
            name = target + name[len(source) :]
    return name


class Known(NamedTuple):
    """A name of a format: that of a file, or of a backbone in it."""

    key: str
    whole: bool
    spelling: Spelling


@functools.cache
def known_names() -> dict[str, list[Known]]:
    """The names of all formats, by their skeletons."""
    known = defaultdict(list)
    for key in ('ours', *FORMATS):
        for whole in (False, True):
            if whole and not (key in FORMATS and FORMATS[key].prefix):
                continue
            for ours, theirs in name_pairs(key, whole):
                known[skeleton(theirs)].append(Known(key, whole, spelling(theirs, ours)))
    return dict(known)


class Found(NamedTuple):
    """The names of a file that are those of one format.

    Attributes:
        root: what precedes them: the path of the backbone in a larger model, and a dot.
        key: of `FORMATS`; 'ours'; or 'own' for names of a given model.
        whole: see `name_pairs`.
        names: ours, or with 'own' those of the model, by those in the file.
    """

    root: str
    key: str
    whole: bool
    names: dict[str, str]

    @property
    def prefix(self) -> str:
        """Of the names of the backbone."""
        return self.root + (FORMATS[self.key].prefix if self.whole else '')


def find_formats(names: Iterable[str], own: Iterable[str] = (), roots: bool = True) -> list[Found]:
    """The formats that know names of a file, those that know most of them first.

    Args:
        names: of a file.
        own: the names of the model that it is read for, which come before those of formats.
        roots: look for backbones inside of larger models, too.
    """
    own = set(own)
    known = known_names()
    found: dict[tuple[str, str, bool], dict[str, str]] = defaultdict(dict)
    for name in names:
        done: set[tuple[str, bool]] = set()
        for start in starts_of(name) if roots else [0]:
            inner = name[start:]
            root = name[:start]
            if inner in own and ('own', False) not in done:
                found[root, 'own', False][name] = inner
                done.add(('own', False))
            for key, whole, spelled in known.get(skeleton(inner), ()):
                if (key, whole) in done:
                    continue
                ours = spelled.translate(inner)
                if ours is not None:
                    found[root, key, whole][name] = ours
                    done.add((key, whole))
    order = ['own', 'ours', *FORMATS]
    results = [Found(*place, renamed) for place, renamed in found.items()]
    return sorted(
        results, key=lambda f: (-len(f.names), order.index(f.key), f.whole, len(f.root), f.root)
    )


def renames(found: Found, own: Iterable[str]) -> bool:
    """True if a format gives another name to a tensor that has the name of one of the model's."""
    own = set(own)
    for theirs, ours in found.names.items():
        name = theirs.removeprefix(found.root)
        if name in own and name != ours:
            return True
    return False


def backbones_in(names: Iterable[str], own: Iterable[str] = ()) -> list[Found]:
    """The backbones in a file, each with the format that knows most of its names.

    Arguments are those of `find_formats`. A backbone with less than half as many names as the first
    is none, but what another part of the model has in common with one.
    """
    backbones: list[Found] = []
    for found in find_formats(names, own):
        if backbones and 2 * len(found.names) < len(backbones[0].names):
            break
        is_same = any(not found.names.keys().isdisjoint(other.names) for other in backbones)
        if not is_same and not renames(found, own):
            backbones.append(found)
    return backbones


def check_only_one(backbones: Sequence[Found]) -> None:
    """Raise a ValueError if a file has several backbones."""
    if len(backbones) > 1:
        prefixes = ', '.join(found.prefix for found in backbones)
        raise ValueError(
            f'the checkpoint has several backbones, with the prefixes {prefixes}; give the prefix '
            f'of one of them, or save a checkpoint of one'
        )


def starts_of(name: str) -> list[int]:
    """Where the parts of a name begin, as far as a backbone's name may begin there."""
    starts = [0]
    while len(starts) <= DEEPEST and (dot := name.find('.', starts[-1])) >= 0:
        starts.append(dot + 1)
    return starts


def to_ours(tensors: dict[str, Tensor], found: Optional[Found] = None) -> dict[str, Tensor]:
    """Convert the tensors of a backbone to our names and shapes. Keeps every value.

    Args:
        tensors: of any format, of a backbone or of a larger model.
        found: their format, if it is known. Default: that of the only one of `backbones_in`.

    Returns:
        The tensors of the backbone and of its classifier. Those that the format does not know keep
        the rest of their names after its root.

    Raises:
        ValueError: a tensor has a shape that its format does not have, two names stand for one
            tensor, or there are several backbones.
    """
    if found is None:
        backbones = backbones_in(tensors)
        if not backbones:
            return dict(tensors)
        check_only_one(backbones)
        found = backbones[0]
    form = FORMATS.get(found.key, OURS)
    renamed = {}
    for name in tensors:
        if name in found.names:
            renamed[name] = found.names[name]
        elif name.startswith(found.prefix):
            renamed[name] = name[len(found.prefix) :]
        elif found.whole and name.startswith(found.root):  # beside the backbone of a classifier
            renamed[name] = name[len(found.root) :]
    if found.key == 'mmpretrain' and 'norm_list.0.weight' not in renamed.values():
        # It is the classifier's norm, not that of a stage.
        renamed = {k: re.sub(r'^norm_list\.3\.', 'norm.', v) for k, v in renamed.items()}
    if len(set(renamed.values())) < len(renamed):
        values = list(renamed.values())
        twice = next(name for name in values if values.count(name) > 1)
        both = [name[:100] for name, ours in renamed.items() if ours == twice]
        raise ValueError(f'{both[0]} and {both[1]} stand for one tensor, {twice[:100]}')
    ours = {}
    for theirs, name in renamed.items():
        value = tensors[theirs]
        name = name.replace('.attn.attn.out_proj.', '.attn.proj.')
        if form.pointwise and LINEAR_IN_MLP.search(name) and value.dim() == 4:
            value = value.flatten(1)
        if form.in_proj and '.attn.attn.in_proj_' in name:
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
    convs = [name for name in tensors if '.mlp.dwconv.' in name]
    if not convs and any('.mlp.dwconv.' in name for name in form.tensors):
        raise ValueError(f'the format {key!r} is of models with a convolution in the MLP only')
    reduction = tensors.get('blocks.0.0.attn.sr.weight')
    if convs and reduction is not None and reduction.shape[2:] == (1, 1) and not form.linear:
        raise ValueError(f'the format {key!r} has no place for linear attention')
    tables = [name for name in tensors if name.endswith('.table')]
    table_with_class_entry = ''
    if form.class_entry and tables and 'cls_pos' in tensors:
        table_with_class_entry = max(tables)  # of the last stage
    theirs = {}
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition('.attn.')
        between = name
        if name == 'cls_pos' and table_with_class_entry:
            continue
        if form.in_proj and f'{stem}.attn.q.weight' in tensors:  # global attention
            if leaf.startswith('kv.'):
                continue
            if leaf.startswith('q.'):
                kind = leaf.removeprefix('q.')
                value = joined(tensors, name, f'{stem}.attn.kv.{kind}', dim=0)
                between = f'{stem}.attn.attn.in_proj_{kind}'
            if leaf.startswith('proj.'):
                between = f'{stem}.attn.attn.out_{leaf}'
        if form.pointwise and LINEAR_IN_MLP.search(name) and value.dim() == 2:
            value = value[..., None, None]
        if name.endswith('.table') and form.flat_tables:
            value = value.flatten(1, 2)
            if name == table_with_class_entry:
                value = joined({**tensors, name: value}, 'cls_pos', name, dim=1)
        if key == 'mmpretrain' and 'norm_list.0.weight' not in tensors:
            between = re.sub(r'^norm\.', 'norm_list.3.', between)  # the classifier's
        if form.split_kv and leaf.startswith('kv.'):
            for part, half in zip(('key', 'value'), value.chunk(2)):
                theirs[their_name(name.replace('.kv.', f'.{part}.'), key, name)] = half
        else:
            theirs[their_name(between, key, name)] = value
    return theirs


def their_name(between: str, key: str, ours: str) -> str:
    """The name of a tensor in another format.

    Args:
        between: see `names_between`.
        key: of `FORMATS`.
        ours: our name.

    Raises:
        ValueError: the format has no place for it. Tensors of a classifier keep our names then.
    """
    for spelled in names_written(key).get(skeleton(between), ()):
        theirs = spelled.translate(between)
        if theirs is not None:
            return theirs
    if role_of(ours) not in ('classifier', 'token'):
        raise ValueError(f'the format {key!r} has no place for {ours}')
    prefix = '' if ours.startswith('head.') else FORMATS[key].prefix
    return prefix + ours


@functools.cache
def names_written(key: str) -> dict[str, list[Spelling]]:
    """The names that a format writes, by the skeletons of ours."""
    written = defaultdict(list)
    for ours, theirs in name_pairs(key, whole=True):
        written[skeleton(ours)].append(spelling(ours, theirs))
    return dict(written)


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
