"""The names of the models' parameters: the one table of the parts of a model.

A name is a part, the indices of its stage and block, and a tensor: `blocks.2.5.mlp.fc1.weight` is
`mlp.fc1.weight` of block 5 of stage 2. The names are those of Twins' authors and of timm; files of
others are converted to them by `checkpoints`.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple, Optional

from .archs import Arch


class ModelPart(NamedTuple):
    """A part of a model.

    Attributes:
        role: 'features': patch embeddings and blocks, in which architectures differ; 'position';
            'norm' of a stage; 'token': the class token; 'classifier'; 'level' of a feature pyramid.
        indices: what follows the part's name: '{i}', a stage or level; '{j}', a block.
        tensors: the names after the indices, of all parts that have been published. Other models
            of this package may have others.
    """

    role: str
    indices: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ('weight', 'bias')


class Place(NamedTuple):
    """Where a parameter is; `stage` and `block` are None in parts without them."""

    part: str
    stage: Optional[int]
    block: Optional[int]
    tensor: str


def layers(*names: str) -> tuple[str, ...]:
    """Weight and bias of each layer."""
    return tuple(f'{name}.{kind}' for name in names for kind in ('weight', 'bias'))


GLOBAL = layers('attn.q', 'attn.kv', 'attn.sr', 'attn.norm')
JOINT = layers('attn.qkv')  # attention in windows, and of the columnar model
BLOCK = layers('norm1', 'attn.proj', 'norm2', 'mlp.fc1', 'mlp.fc2')
MLP_CONV = layers('mlp.dwconv')
PYRAMID = {
    'patch_embeds': ModelPart('features', ('{i}',), layers('proj', 'norm')),
    'pos_embeds': ModelPart('position', ('{i}',), ('table',)),
    'blocks': ModelPart('features', ('{i}', '{j}'), BLOCK + GLOBAL + JOINT + MLP_CONV),
    'pos_block': ModelPart('position', ('{i}',), layers('proj.0')),
    'more_pos_block': ModelPart('position', ('{i}', '{j}'), layers('proj.0')),
    'norm_list': ModelPart('norm', ('{i}',)),
    # Of published classifiers:
    'cls_token': ModelPart('token', (), ('',)),
    'cls_pos': ModelPart('token', (), ('',)),
    'norm': ModelPart('classifier'),
    'head': ModelPart('classifier'),
}
COLUMN = {
    'patch_embed': ModelPart('features', (), layers('proj')),
    'pos_embed': ModelPart('position', (), ('table',)),
    'cls_token': ModelPart('token', (), ('',)),
    'cls_pos': ModelPart('token', (), ('',)),
    'blocks': ModelPart('features', ('{j}',), BLOCK + JOINT),
    'pos_block': ModelPart('position', ('{j}',), layers('proj.0')),
    'norm': ModelPart('classifier'),
    'head': ModelPart('classifier'),
    'levels': ModelPart(
        'level',
        ('{i}',),
        (*layers('up.0', 'up.1', 'up.3'), 'proj.weight', *layers('norm1'), 'conv.weight')
        + layers('norm2'),
    ),
}
# Position inside a block, of attentions.
IN_ATTENTION = re.compile(r'attn\.(position|peg)\.')
LEVELS = 4  # of a feature pyramid
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
    parts = model_parts(model.arch)
    place = locate(name, parts)
    if place is None or place.tensor not in parts[place.part].tensors:
        return False
    role = parts[place.part].role
    if role == 'token':  # of DeiT and of PVT, which have tables
        has_table = any(other.endswith('.table') for other in others)
        return has_table and getattr(model, 'cls_token', None) is None
    if role == 'classifier':
        has_norm = not getattr(model.arch, 'mlp_conv', False)  # or its maps have, in PVTv2 and MiT
        return not hasattr(model, place.part) and (place.part == 'head' or has_norm)
    if role == 'level':
        return is_of_other_level(place, model)
    return is_of_later_stage(place, model)


def is_of_other_level(place: Place, model: Any) -> bool:
    """True for a level of a feature pyramid that the model, which has one, does not build."""
    levels = getattr(model, 'levels', None)
    return levels is not None and place.stage in range(LEVELS) and str(place.stage) not in levels


def is_of_later_stage(place: Place, model: Any) -> bool:
    """True for a tensor of a stage of the architecture that is not built."""
    arch = model.arch
    if not isinstance(arch, Arch) or place.stage not in range(len(model.blocks), len(arch.dims)):
        return False
    if place.part != 'blocks':
        return True
    assert place.stage is not None and place.block is not None
    in_stage = 0 <= place.block < arch.depths[place.stage]
    return in_stage and place.tensor in block_tensors(arch, place.stage, place.block)


def block_tensors(arch: Arch, stage: int, block: int) -> tuple[str, ...]:
    """The names of the tensors of a block of a pyramid."""
    tensors = BLOCK
    if arch.window and block % 2 == 0:
        tensors += JOINT
    else:
        tensors += layers('attn.q', 'attn.kv')
        if arch.linear or arch.sr_ratios[stage] > 1:
            tensors += layers('attn.sr', 'attn.norm')
    return tensors + MLP_CONV if arch.mlp_conv else tensors


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
