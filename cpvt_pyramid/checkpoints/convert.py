"""Checkpoints in the format of another package: read, converted, checked, and written."""

import hashlib
import io
import os
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor, nn

from ..archs import ARCHS, COLUMNAR_ARCHS
from ..columnar import Column
from ..meta import without_values
from ..model import CPVTPyramid
from ..names import role_of
from . import formats, reading
from .fit import arch_of, compare, defect_of, objection_to, shape_of


def convert_checkpoint(
    source: Union[str, Path],
    to: str,
    folder: Union[str, Path] = '.',
    backbone_only: bool = False,
    safetensors: bool = False,
) -> tuple[Path, bool]:
    """The path of the converted checkpoint, and whether it was written now.

    Raises:
        ConnectionError: the checkpoint cannot be downloaded.
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is damaged, it is not of a known architecture, or the format has no place for
            the architecture.
    """
    checkpoint = reading.read_checkpoint(source)
    ours = formats.to_ours(reading.tensors_of(checkpoint))
    if not ours:
        inner, _ = reading.unwrapped(checkpoint)
        raise ValueError(f'{source} has no tensors, but {reading.contents_of(inner) or "nothing"}')
    check_complete(ours, model_of(ours))
    if backbone_only:
        classifier = ('classifier', 'token')
        ours = {k: v for k, v in ours.items() if role_of(k) not in classifier}
    key = to if to in formats.FORMATS else published_format(ours, to)
    # Parts of a split tensor share its memory; copied, each is saved by itself.
    tensors = {k: v.clone().contiguous() for k, v in formats.to_format(ours, key).items()}

    suffix = '.safetensors' if safetensors else '.pth'
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.convert-', dir=folder) as scratch:
        partial = Path(scratch, 'partial' + suffix)
        content = file_content(tensors, suffix)
        partial.write_bytes(content)
        check_round_trip(ours, reading.read_checkpoint(partial))
        digest = hashlib.sha256(content).hexdigest()
        path = folder / f'{Path(source).stem}_{to}-{digest[:8]}{suffix}'
        if not path.exists():
            os.replace(partial, path)
            return path, True
        if path.read_bytes() != content:
            raise ValueError(f'{path} already exists with other content; remove it')
        return path, False


def check_complete(ours: dict[str, Tensor], model: Union[CPVTPyramid, Column]) -> None:
    """Raise a ValueError if a tensor is damaged or missing.

    The names are ours; some tensors may have no place in the model, which is that of `model_of`.
    """
    expected = model.state_dict()
    # Add what its classifier holds.
    if isinstance(model, CPVTPyramid):
        dim = model.channels[-1]
        has_norm = model.arch.classifier_norm
        if has_norm:
            token = torch.zeros(1, 1, dim)
            expected |= {'cls_token': token, 'cls_pos': token}
    else:
        dim = model.arch.dim
        has_norm = True
    classifier: dict[str, nn.Module] = {'head': nn.Linear(dim, labels_of(ours))}
    if has_norm:
        classifier['norm'] = nn.LayerNorm(dim)
    expected |= nn.ModuleDict(classifier).state_dict()
    report = compare(expected, ours)
    if objection := objection_to(model, expected, ours, report):
        raise ValueError(objection)
    held = {name.split('.')[0] for name in ours}
    held |= {part for part, other in (('norm', 'head'), ('cls_token', 'cls_pos')) if other in held}
    if lacking := [name for name in report.kept if name.split('.')[0] in held]:
        raise ValueError(f'the checkpoint is damaged: it lacks {reading.listed(lacking)}')
    for name in report.unused:
        if defect := defect_of(ours[name], next(iter(expected.values()))):
            raise ValueError(f'the checkpoint is damaged: {name} {defect}')


def labels_of(ours: dict[str, Tensor]) -> int:
    """Number of classes of a checkpoint; 1000 if it has no classifier."""
    labels = ours['head.bias'].shape[:1].numel() if 'head.bias' in ours else 1000
    if not labels:
        raise ValueError('head.bias must have a value for each class, got none')
    return labels


def published_format(ours: dict[str, Tensor], publisher: str) -> str:
    """The format of the model's authors ('official') or of timm ('timm')."""
    arch = arch_of(ours)
    published = [
        key
        for key, form in formats.FORMATS.items()
        if any(fnmatch(str(arch), pattern) for pattern in getattr(form, publisher))
    ]
    # Our own names last: those of DeiT have no place for PEGs.
    for key in sorted(published, key=lambda key: key == 'ours'):
        try:
            formats.to_format(ours, key)
        except ValueError:
            continue
        return key
    raise ValueError(f'{publisher} has no {arch}; for the names of its authors, use --to official')


def file_content(tensors: dict[str, Tensor], suffix: str) -> bytes:
    """The content of a .pth or .safetensors file. Where these libraries write a file, their errors
    do not say that the disk is full."""
    if suffix == '.safetensors':
        from safetensors.torch import save

        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return save(tensors, metadata={'format': 'pt'})
    content = io.BytesIO()
    torch.save(tensors, content)
    return content.getvalue()


def check_round_trip(ours: dict[str, Tensor], written: dict) -> None:
    """Check that the content of a file, converted back, is every tensor under our names."""
    again = formats.to_ours(reading.tensors_of(written))
    for name in ours.keys() | again.keys():
        a = ours.get(name)
        b = again.get(name)
        if a is None or b is None or a.dtype != b.dtype or not a.equal(b):
            raise ValueError(f'the conversion changes {name}')


def model_of(ours: dict[str, Tensor]) -> Union[CPVTPyramid, Column]:
    """The backbone that has these tensors, which have our names. It lacks encodings inside the
    attention, and the levels of a columnar model, whose tensors are all optional."""
    arch = arch_of(ours)
    if arch is None:
        raise ValueError(f'no known architecture has these tensors: {reading.listed(list(ours))}')
    is_pyramid = arch in ARCHS
    with without_values():
        first_conv = (CPVTPyramid(arch) if is_pyramid else Column(arch)).first_conv
    tables = [name for name in ours if name.endswith('.table')]
    for name in (first_conv, *tables[:1]):
        if name in ours and (ours[name].dim() != 4 or not ours[name].numel()):
            shape = tuple(ours[name].shape)
            raise ValueError(f'{name} must have 4 dimensions and values, got {shape}')
    peg_names = [name.split('.')[1] for name in ours if name.startswith('pos_block.')]
    pegs = sorted({int(name) for name in peg_names if name.lstrip('-').isdecimal()})
    kinds = []
    if tables:
        kinds.append('learned')
    if pegs:
        kinds.append('peg')
    options: dict[str, Any] = dict(
        position='+'.join(kinds) or 'none',
        in_channels=ours[first_conv].shape[1] if first_conv in ours else 3,
    )
    if is_pyramid:
        row = ARCHS[arch]
        stride = row.strides[0]
        options['out_indices'] = range(len(shape_of(ours)))
        options['stage_norm'] = 'norm_list.0.weight' in ours or not row.classifier_norm
    else:
        stride = COLUMNAR_ARCHS[arch].patch_size
        options['peg'] = dict(after=pegs) if pegs else None
        options['class_token'] = 'cls_token' in ours or 'cls_pos' in ours
    if tables:
        options['pretrain_img_size'] = [stride * side for side in ours[tables[0]].shape[1:3]]
    return (CPVTPyramid if is_pyramid else Column)(arch, **options).eval()
