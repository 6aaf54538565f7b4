"""Converting tensors between the formats of checkpoint files, in both directions.

The formats are the rows of `table`. `to_ours` and `to_format` convert. A file is of the format that
knows most of its names: `find_formats`. Our names are those of the models, as the Twins authors and
timm have them.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..meta import names_of_rows
from ..names import OF_CLASSIFIERS, in_block, role_of, template_of
from .table import FORMATS

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


def is_one_of(arch: str, patterns: Sequence[str]) -> bool:
    """Whether patterns of `Format` name a variant."""
    return any(fnmatch(arch, pattern) for pattern in patterns)


@functools.cache
def templates(key: str) -> tuple[str, ...]:
    """Our names of all tensors that a format has a place for, as templates."""
    form = FORMATS[key]

    def has_part(name: str) -> bool:
        return '*' in form.parts or name.split('.')[0] in form.parts

    found = []
    for arch, names in names_of_rows().items():
        if is_one_of(arch, form.archs):
            for name in names:
                if has_part(name) or role_of(name) == 'features':
                    found.append(template_of(name))
    found += [name for name in OF_CLASSIFIERS if has_part(name)]
    return tuple(dict.fromkeys(found))


@functools.cache
def of_all_blocks(key: str) -> tuple[str, ...]:
    """The tensors that every block of a format's variants has, as templates."""
    form = FORMATS[key]
    blocks: dict[tuple[str, str], set[str]] = defaultdict(set)
    for arch, names in names_of_rows().items():
        if is_one_of(arch, form.archs):
            for name in names:
                if block := in_block(name):
                    blocks[arch, block].add(template_of(name))
    return tuple(sorted(set.intersection(*blocks.values())))


def names_between(key: str) -> list[str]:
    """Our names of a format's tensors, but for those that it splits or joins: they have its own
    names for them, `attn.attn.in_proj_weight` or `attn.key` and `attn.value`."""
    form = FORMATS[key]
    names = []
    windows = any('.attn.qkv.' in name for name in templates(key))
    for name in templates(key):
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
        key: of `FORMATS`.
        whole: with the prefix that names have in files of whole classifiers.
    """
    form = FORMATS[key]
    pairs = []
    for ours in names_between(key):
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
    for key, form in FORMATS.items():
        for whole in (False, True) if form.prefix else (False,):
            for ours, theirs in name_pairs(key, whole):
                known[skeleton(theirs)].append(Known(key, whole, spelling(theirs, ours)))
    return dict(known)


class Found(NamedTuple):
    """The names of a file that are those of one format.

    Attributes:
        root: what precedes them: the path of the backbone in a larger model, and a dot.
        key: of `FORMATS`, or 'own' for names of a given model.
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
    order = ['own', *FORMATS]
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
    form = FORMATS.get(found.key, FORMATS['ours'])
    renamed = {}
    for name in tensors:
        if name in found.names:
            renamed[name] = found.names[name]
        elif name.startswith(found.prefix):
            renamed[name] = name[len(found.prefix) :]
        elif found.whole and name.startswith(found.root):  # beside the backbone of a classifier
            renamed[name] = name[len(found.root) :]
    if form.norm_of_last_stage and 'norm_list.0.weight' not in renamed.values():
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
        key: of `FORMATS`. Tensors of a classifier keep our names where a format of backbones has
            none.

    Raises:
        ValueError: the format has no place for the architecture.
    """
    if key == 'ours':
        return tensors
    form = FORMATS[key]
    present = {template_of(name) for name in tensors}
    if lacking := [name for name in of_all_blocks(key) if name not in present]:
        raise ValueError(f'the format {key!r} is of models with {lacking[0]} only')
    reduction = tensors.get('blocks.0.0.attn.sr.weight')
    if reduction is not None and reduction.shape[2:] == (1, 1) and not form.linear:
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
        if form.norm_of_last_stage and 'norm_list.0.weight' not in tensors:
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
