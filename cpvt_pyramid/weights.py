"""Checkpoints: their formats, and what happens to them on the way into a model.

`prepare_state_dict` runs as a pre-hook of every `load_state_dict`, so that torch, timm, mmengine's
`Pretrained`, `load_from` and `resume` all read the same files:
  - wrappers (`state_dict`, `model`, ...) and prefixes (`module.`, `backbone.`) are taken off;
  - the names of another format, recognised by its keys, become ours, which are those of the Twins
    authors and of timm;
  - what a backbone has no use for is left out: the classifier, and stages that were not built;
  - the stage norms of SVT, which classification checkpoints do not hold, keep their values, and
    so do PEGs that were added at zero.

A checkpoint of another architecture is an error, wherever it is loaded.
"""

import functools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Union

import torch
from torch import Tensor, nn

WRAPPERS = ('state_dict_ema', 'model_ema', 'state_dict', 'model')
PREFIXES = ('module.', 'backbone.')


class Format(NamedTuple):
    """How a family of files names and shapes what we have under our own names."""

    mark: str  # regular expression: some key of such a file, and of no other, matches it
    # (ours, theirs): the beginning of a key or, with a dot in front, what stands inside of it.
    # i is the stage, j the block; {i+1} counts from one.
    names: tuple[tuple[str, str], ...]
    in_proj: bool = False  # q and kv of global attention are one tensor, rows [q; kv]
    pointwise: bool = False  # the MLP's weights are those of 1x1 convolutions
    flat_tables: bool = False  # tables are (1, N, C), a class token's entry in front of the rest


FORMATS = {
    'mmseg': Format(  # mmsegmentation's PCPVT and SVT
        r'position_encodings\.\d+\.|layers\.\d+\.\d+\.attn\.',
        (
            ('patch_embeds.{i}.proj.', 'patch_embeds.{i}.projection.'),
            ('pos_block.{i}.proj.0.', 'position_encodings.{i}.proj.'),
            ('blocks.{i}.{j}.', 'layers.{i}.{j}.'),
            ('.mlp.fc1.', '.ffn.layers.0.0.'),
            ('.mlp.fc2.', '.ffn.layers.1.'),
        ),
        in_proj=True,
    ),
    'mmpretrain': Format(  # mmpretrain's PCPVT and SVT
        r'stages\.\d+\.\d+\.',
        (
            ('patch_embeds.{i}.proj.', 'patch_embeds.{i}.projection.'),
            ('pos_block.{i}.proj.0.', 'position_encodings.{i}.proj.'),
            ('blocks.{i}.{j}.', 'stages.{i}.{j}.'),
            ('.mlp.fc1.', '.ffn.layers.0.0.'),
            ('.mlp.fc2.', '.ffn.layers.1.'),
            ('norm_list.{i}.', 'norm_after_stage{i}.'),
            ('head.', 'head.fc.'),
        ),
    ),
    'mmdet': Format(  # mmdetection's PyramidVisionTransformer; a stage is [patches, blocks]
        r'layers\.\d+\.1\.\d+\.',
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
        (
            ('patch_embeds.{i}.', 'patch_embed{i+1}.'),
            ('pos_embeds.{i}.table', 'pos_embed{i+1}'),
            ('blocks.{i}.{j}.', 'block{i+1}.{j}.'),
        ),
        flat_tables=True,
    ),
    'mmpretrain_vit': Format(  # mmpretrain's VisionTransformer
        r'layers\.\d+\.ln1\.',
        (
            ('patch_embed.proj.', 'patch_embed.projection.'),
            ('blocks.{j}.norm1.', 'layers.{j}.ln1.'),
            ('blocks.{j}.norm2.', 'layers.{j}.ln2.'),
            ('blocks.{j}.', 'layers.{j}.'),
            ('.mlp.fc1.', '.ffn.layers.0.0.'),
            ('.mlp.fc2.', '.ffn.layers.1.'),
            ('norm.', 'ln1.'),
            ('pos_embed.table', 'pos_embed'),
        ),
        flat_tables=True,
    ),
    'vit': Format(  # DeiT's authors, and timm's ViT
        r'pos_embed$', (('pos_embed.table', 'pos_embed'),), flat_tables=True
    ),
}
# What tells one architecture from another; position, norms and the classifier are a choice.
BODY = re.compile(r'(patch_embeds?|blocks)\.(?!\d+\.attn\.(relative|peg)\.)')
FIELD = re.compile(r'\{(\w)(\+1)?\}')


class LoadReport(NamedTuple):
    """What became of the tensors of a checkpoint; names are those of the model."""

    loaded: list[str]  # in both, with one shape
    kept: list[str]  # in the model alone: these keep their values
    unused: list[str]  # in the checkpoint alone
    mismatched: list[str]  # in both, with two shapes

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.kept) + len(self.mismatched)
        lines = [f'loaded {len(self.loaded)} of {total} tensors of the backbone']
        for what, names in (
            ('not in the checkpoint', self.kept),
            ('not in the model', self.unused),
            ('of another shape', self.mismatched),
        ):
            if names:
                more = f' and {len(names) - 6} more' if len(names) > 6 else ''
                lines.append(f'{what}: {", ".join(names[:6])}{more}')
        return '; '.join(lines)


def load_weights(model: nn.Module, path: Union[str, Path]) -> LoadReport:
    """Load a checkpoint file into a model of this package.

    Args:
        model: a `CPVTPyramid`.
        path: a `.pth` or `.safetensors` file in any format that this module reads.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: hardly anything in the checkpoint matches the model, or shapes differ.
    """
    model.load_state_dict(read_checkpoint(path), strict=False)
    if model.load_report.mismatched:
        raise ValueError(f'{path} is of another architecture: {model.load_report}')
    return model.load_report


def read_checkpoint(path: Union[str, Path], map_location: str = 'cpu') -> dict:
    """The content of a `.pth` or `.safetensors` file, of tensors and plain values alone."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f'no checkpoint at {path}')
    if path.suffix == '.safetensors':
        from safetensors.torch import load_file

        return load_file(path, device=map_location)
    return torch.load(path, map_location=map_location, weights_only=True)


def prepare_state_dict(module: nn.Module, state_dict: dict, prefix: str, *_unused: object) -> None:
    """Turn a checkpoint into the model's own keys, in place; a load-state-dict pre-hook.

    Leaves `module.load_report` behind.

    Args:
        module: the model that loads.
        state_dict: the checkpoint, or the part of it under `prefix`.
        prefix: the module's name in the model that loads, with a dot behind it, or ''.

    Raises:
        ValueError: the checkpoint is of another architecture.
    """
    theirs = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
    if not theirs:  # a checkpoint of something else: a neck, a head
        return
    theirs = to_ours(tensors_of(theirs))
    ours = nn.Module.state_dict(module)
    theirs = {k: v for k, v in theirs.items() if k in ours or not module.has_no_use_for(k)}
    report = module.load_report = compare(ours, theirs)
    if any(BODY.match(name) for name in (*report.kept, *report.unused, *report.mismatched)):
        raise ValueError(
            f'the checkpoint is not one of this backbone: {report}. '
            f'Check the arch, the file and, in an init_cfg, the prefix'
        )

    for name in report.mismatched:
        if name.endswith('.table'):
            there, here = (f'{len(x[0])} x {len(x[0][0])}' for x in (theirs[name], ours[name]))
            raise ValueError(
                f'{name} is {there} in the checkpoint and {here} in the model. Build the model '
                f'with the pretrain_img_size of the checkpoint: at any other size of image the '
                f'table is interpolated'
            )

    theirs |= {name: ours[name] for name in report.kept if module.can_do_without(name)}
    for name in [name for name in state_dict if name.startswith(prefix)]:
        del state_dict[name]
    state_dict.update({prefix + name: value for name, value in theirs.items()})


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> LoadReport:
    """What is where, of a model's state dict and a checkpoint under the same names."""
    shared = [name for name in ours if name in theirs]
    return LoadReport(
        loaded=[name for name in shared if theirs[name].shape == ours[name].shape],
        kept=[name for name in ours if name not in theirs],
        unused=[name for name in theirs if name not in ours],
        mismatched=[name for name in shared if theirs[name].shape != ours[name].shape],
    )


def tensors_of(checkpoint: dict) -> dict[str, Tensor]:
    """The tensors of a model inside a checkpoint, without wrapper and prefix."""
    for wrapper in WRAPPERS:
        if isinstance(checkpoint.get(wrapper), dict):
            checkpoint = checkpoint[wrapper]
    for prefix in PREFIXES:
        inner = {k[len(prefix) :]: v for k, v in checkpoint.items() if k.startswith(prefix)}
        checkpoint = inner or checkpoint
    return {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}


def format_of(names: Iterable[str]) -> str:
    """The key in `FORMATS` of a checkpoint with these names, or 'ours'."""
    names = list(names)
    for key, form in FORMATS.items():
        if any(re.match(form.mark, name) for name in names):
            return key
    return 'ours'


def to_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of any format under our names, in our shapes. Nothing is lost.

    Args:
        tensors: as `tensors_of` returns them.
    """
    key = format_of(tensors)
    if key == 'ours':
        return tensors
    form = FORMATS[key]
    pairs = [(theirs, ours) for ours, theirs in form.names]
    if key == 'mmpretrain' and 'norm_after_stage0.weight' not in tensors:
        pairs.insert(0, ('norm_after_stage3.', 'norm.'))  # the classifier's, of a plain stage's end
    ours = {}
    for name, value in tensors.items():
        name = rename(name, pairs)
        if '.attn.attn.in_proj_' in name:
            stem, kind = name.split('.attn.attn.in_proj_')
            dim = len(value) // 3
            ours[f'{stem}.attn.q.{kind}'], ours[f'{stem}.attn.kv.{kind}'] = value.split(
                [dim, 2 * dim]
            )
            continue
        name = name.replace('.attn.attn.out_proj.', '.attn.proj.')
        if form.pointwise and '.mlp.' in name:
            value = value.flatten(1) if value.dim() == 4 else value
        if name.endswith('.table') and form.flat_tables:
            side = math.isqrt(value.shape[1])
            if side**2 != value.shape[1]:
                ours['cls_pos'] = value[:, :1]
                value = value[:, 1:]
            value = value.unflatten(1, (side, side))
        ours[name] = value
    return ours


def to_format(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    """The reverse of `to_ours`: our names and shapes in one of `FORMATS`, or 'ours'."""
    if key == 'ours':
        return tensors
    form = FORMATS[key]
    theirs = {}
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition('.attn.')
        if name == 'cls_pos':
            continue
        if form.in_proj and f'{stem}.attn.q.weight' in tensors:
            if leaf.startswith('kv.'):
                continue
            if leaf.startswith('q.'):
                kind = leaf[2:]
                value = torch.cat([value, tensors[f'{stem}.attn.kv.{kind}']])
                name = f'{stem}.attn.attn.in_proj_{kind}'
            if leaf.startswith('proj.'):
                name = f'{stem}.attn.attn.out_{leaf}'
        if form.pointwise and '.mlp.' in name and value.dim() == 2:
            value = value[..., None, None]
        if name.endswith('.table') and form.flat_tables:
            value = value.flatten(1, 2)
            if 'cls_pos' in tensors and name == max(k for k in tensors if k.endswith('.table')):
                value = torch.cat([tensors['cls_pos'], value], dim=1)
        theirs[rename(name, form.names)] = value
    return theirs


def rename(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """A key after every row of pairs (from, to) of a `Format` that it matches."""
    for source, target in pairs:
        match = pattern_of(source).search(name)
        if match:
            for field, one in FIELD.findall(source):
                index = int(match[field]) - bool(one)
                target = target.replace(f'{{{field}}}', str(index))
                target = target.replace(f'{{{field}+1}}', str(index + 1))
            name = name[: match.start()] + target + name[match.end() :]
    return name


@functools.cache
def pattern_of(template: str) -> re.Pattern:
    """What a row of a `Format` matches: numbers at its fields, the rest as it stands."""
    start = '' if template.startswith('.') else '^'
    return re.compile(start + FIELD.sub(r'(?P<\1>\\d+)', template.replace('.', r'\.')))
