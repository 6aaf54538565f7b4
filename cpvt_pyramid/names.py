"""The names of the models' parameters: the parts of a model, with which they begin.

A name is a part, the indices of its stage and block, and a tensor: `blocks.2.5.mlp.fc1.weight` is
`mlp.fc1.weight` of block 5 of stage 2. The names are those of Twins' authors and of timm; files of
others are converted to them by `checkpoints`.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple, Optional

from .archs import Arch
from .meta import layout_of


class ModelPart(NamedTuple):
    """A part of a model.

    Attributes:
        role: 'features': patch embeddings and blocks, in which architectures differ; 'position';
            'norm' of a stage; 'token': the class token; 'classifier'; 'level' of a feature pyramid.
        indices: what follows the part's name: '{i}', a stage or level; '{j}', a block.
    """

    role: str
    indices: tuple[str, ...] = ()


class Place(NamedTuple):
    """Where a parameter is; `stage` and `block` are None in parts without them."""

    part: str
    stage: Optional[int]
    block: Optional[int]
    tensor: str


PYRAMID = {
    'patch_embeds': ModelPart('features', ('{i}',)),
    'pos_embeds': ModelPart('position', ('{i}',)),
    'blocks': ModelPart('features', ('{i}', '{j}')),
    'pos_block': ModelPart('position', ('{i}',)),
    'more_pos_block': ModelPart('position', ('{i}', '{j}')),
    'norm_list': ModelPart('norm', ('{i}',)),
    # Of published classifiers:
    'cls_token': ModelPart('token'),
    'cls_pos': ModelPart('token'),
    'norm': ModelPart('classifier'),
    'head': ModelPart('classifier'),
}
COLUMN = {
    'patch_embed': ModelPart('features'),
    'pos_embed': ModelPart('position'),
    'cls_token': ModelPart('token'),
    'cls_pos': ModelPart('token'),
    'blocks': ModelPart('features', ('{j}',)),
    'pos_block': ModelPart('position', ('{j}',)),
    'norm': ModelPart('classifier'),
    'head': ModelPart('classifier'),
    'levels': ModelPart('level', ('{i}',)),
}
# What published classifiers have besides a backbone.
OF_CLASSIFIERS = ('cls_token', 'cls_pos', 'norm.weight', 'norm.bias', 'head.weight', 'head.bias')
# Position inside a block, of attentions.
IN_ATTENTION = re.compile(r'attn\.(position|peg)\.')
INDEX = re.compile(r'-1|0|[1-9][0-9]*')  # -1: before the first block


def locate(name: str, parts: dict[str, ModelPart]) -> Optional[Place]:
    """Where a parameter of a pyramid or of a columnar model is; None if it is in none of its parts.

    Examples:
        >>> locate('blocks.2.5.mlp.fc1.weight', PYRAMID)
        Place(part='blocks', stage=2, block=5, tensor='mlp.fc1.weight')
    """
    word, *rest = name.split('.')
    part = parts.get(word)
    if part is None or len(rest) < len(part.indices):
        return None
    indices = {}
    for index in part.indices:
        number = rest.pop(0)
        if not INDEX.fullmatch(number):
            return None
        indices[index] = int(number)
    return Place(word, indices.get('{i}'), indices.get('{j}'), '.'.join(rest))


def role_of(name: str) -> Optional[str]:
    """The role of a parameter of any model; None if it is in no part. See `ModelPart`."""
    parts = PYRAMID if name.split('.')[0] in PYRAMID else COLUMN
    place = locate(name, parts) or locate(name, COLUMN)
    if place is None:
        return None
    if IN_ATTENTION.match(place.tensor):
        return 'position'
    part = PYRAMID.get(place.part) or COLUMN[place.part]
    return part.role


def template_of(name: str) -> str:
    """A name with `{i}` and `{j}` in the place of its indices.

    Examples:
        >>> template_of('blocks.2.5.mlp.fc1.weight')
        'blocks.{i}.{j}.mlp.fc1.weight'
    """
    for parts in (PYRAMID, COLUMN):
        place = locate(name, parts)
        if place is not None:
            indices = parts[place.part].indices
            return '.'.join(filter(None, (place.part, *indices, place.tensor)))
    return name


def in_block(name: str) -> Optional[str]:
    """The block that a parameter belongs to, such as `blocks.2.5`; None: to none."""
    place = locate(name, PYRAMID) or locate(name, COLUMN)
    if place is None or place.part != 'blocks':
        return None
    return name[: -len(place.tensor) - 1]


def model_parts(arch: Any) -> dict[str, ModelPart]:
    """The parts of a model with this architecture, an `Arch` or a `ColumnarArch`."""
    return PYRAMID if isinstance(arch, Arch) else COLUMN


def is_left_out(name: str, model: Any, others: Collection[str]) -> bool:
    """True if a published file may have this tensor in a part that the model does not have: a
    classifier, a class token, a stage or a level that is not built.

    Args:
        name: under our names.
        model: a `CPVTPyramid` or a columnar model.
        others: all names of the file.
    """
    role = role_of(name)
    if role == 'token' and name in OF_CLASSIFIERS:  # of DeiT and of PVT, which have tables
        has_table = any(other.endswith('.table') for other in others)
        return has_table and getattr(model, 'cls_token', None) is None
    if role == 'classifier' and name in OF_CLASSIFIERS:
        part = name.split('.')[0]
        has_norm = getattr(model.arch, 'classifier_norm', True)
        return not hasattr(model, part) and (part == 'head' or has_norm)
    return is_of_unbuilt_part(name, model) and name in layout_of(model.with_all_parts, model.arch)


def is_of_unbuilt_part(name: str, model: Any) -> bool:
    """True for a tensor of a stage or a level that the model does not build."""
    place = locate(name, model_parts(model.arch))
    if place is None or place.stage is None:
        return False
    if place.part == 'levels':
        levels = getattr(model, 'levels', None)
        return levels is not None and str(place.stage) not in levels
    return place.stage >= len(model.blocks)


def layer_of(model: Any, name: str) -> int:
    """The depth of a parameter, for learning rates that grow layer by layer.

    0 is what makes the tokens of the first block (patch embedding, table, class token), 1 the first
    block and its PEG, and so on. A later stage's patch embedding counts with its first block, a
    stage norm with the last. Whatever a derived class adds counts with what comes after the
    backbone.

    Args:
        model: a `CPVTPyramid` or a columnar model.
        name: of a parameter, as in `model.named_parameters()`.
    """
    depths = depths_of(model)
    parts = model_parts(model.arch)
    place = locate(name, parts)
    if place is None or parts[place.part].role in ('classifier', 'level'):
        return sum(depths) + 1
    stage = place.stage or 0
    if place.block is not None:
        block = max(place.block, 0)
    elif parts[place.part].role == 'norm':
        block = depths[stage] - 1
    elif stage == 0 and place.part != 'pos_block':
        return 0
    else:
        block = 0
    return 1 + sum(depths[:stage]) + block


def count_layers(model: Any) -> int:
    """The number of layers that `layer_of` counts, with one for all after the backbone."""
    return sum(depths_of(model)) + 2


def depths_of(model: Any) -> tuple[int, ...]:
    """The number of blocks of each stage that is built."""
    if isinstance(model.arch, Arch):
        return tuple(model.arch.depths[: len(model.blocks)])
    return (model.arch.depth,)
