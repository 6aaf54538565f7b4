"""Checkpoints in the format of another package: read, converted, checked, and written."""

import hashlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor

from ..archs import ARCHS
from ..columnar import DenseCPVT
from ..meta import layout_of, without_values
from ..model import CPVTPyramid
from ..names import PYRAMID, ModelPart, locate, model_parts, role_of
from . import formats, reading
from .fit import arch_of, compare, defect_of, objection_to


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
    check_complete(ours)
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


def check_complete(ours: dict[str, Tensor]) -> None:
    """Raise a ValueError unless these tensors, under our names, are those of a known variant.

    It may lack what `expected_tensors` does not expect.
    """
    arch = arch_of(ours)
    if arch is None:
        raise ValueError(f'no known architecture has these tensors: {reading.listed(list(ours))}')
    with without_values():
        model: Any = CPVTPyramid(arch) if arch in ARCHS else DenseCPVT(arch)
    expected = expected_tensors(ours, model)
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


def expected_tensors(ours: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The tensors, of zeros, that a checkpoint of a model has to have if it has these.

    All patch embeddings and blocks up to its last stage; of position encodings, norms and levels
    those that it has; and a classifier, which it may have as a whole.
    """
    arch = model.arch
    is_pyramid = isinstance(model, CPVTPyramid)
    parts = model_parts(arch)
    stages = [stage_of(name, parts) for name in ours if role_of(name) == 'features']
    last = max(stages, default=0)
    together = {expected_together(name, parts) for name in ours}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in layout_of(model.with_all_parts, arch).items():
        is_of_stage = not is_pyramid or stage_of(name, parts) <= last
        is_needed = role_of(name) == 'features' or expected_together(name, parts) in together
        if is_of_stage and is_needed:
            shapes[name] = size
    dim = arch.dims[last] if is_pyramid else arch.dim
    shapes |= {'head.weight': (labels_of(ours), dim), 'head.bias': (labels_of(ours),)}
    if getattr(arch, 'classifier_norm', True):
        shapes |= {'norm.weight': (dim,), 'norm.bias': (dim,)}
        shapes |= {'cls_token': (1, 1, dim), 'cls_pos': (1, 1, dim)}
    # These depend on the channels and the size of images:
    for name in ours:
        if name == model.first_conv or name.endswith('.table'):
            value = ours[name]
            if value.dim() != 4 or not value.numel():
                shape = tuple(value.shape)
                raise ValueError(f'{name} must have 4 dimensions and values, got {shape}')
            if name == model.first_conv:
                shapes[name] = (shapes[name][0], value.shape[1], *shapes[name][2:])
            elif name in shapes:
                shapes[name] = (*value.shape[:3], shapes[name][3])
    return {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}


def stage_of(name: str, parts: dict[str, ModelPart]) -> int:
    """The index of the stage of a tensor; 0 if it is in none."""
    place = locate(name, parts)
    if place is None or place.stage is None:
        return 0
    return place.stage


def expected_together(name: str, parts: dict[str, ModelPart]) -> str:
    """What a checkpoint has as a whole or not at all: a part of all stages of a pyramid, or a part
    with its indices, such as a PEG after a block."""
    place = locate(name, parts)
    if place is None:
        return name
    indices = parts[place.part].indices
    is_of_each_stage = parts is PYRAMID and indices == ('{i}',)
    return '.'.join(name.split('.')[: 1 if is_of_each_stage else 1 + len(indices)])


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
        if formats.is_one_of(str(arch), getattr(form, publisher))
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
