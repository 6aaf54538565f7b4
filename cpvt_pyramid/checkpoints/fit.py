"""Comparing a checkpoint with a model, both under our names."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..archs import ARCHS, COLUMNAR_ARCHS
from ..meta import layout_of_row
from ..names import IN_ATTENTION, in_block, role_of
from .files import listed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LoadReport(NamedTuple):
    """What happened to the tensors of a checkpoint, under the names of the model.

    Examples:
        >>> weights = CPVTPyramid('pcpvt_nano').state_dict() | {'head.bias': torch.zeros(10)}
        >>> torch.save(weights, 'classifier.pth')
        >>> report = load_weights(CPVTPyramid('pcpvt_nano'), 'classifier.pth')
        >>> len(report.loaded), len(report.kept), report.ignored
        (160, 0, ['head.bias'])
    """

    loaded: list[str]  # in both, with the same shape
    kept: list[str]  # only in the model: these keep their values
    unused: list[str]  # only in the checkpoint
    mismatched: list[str]  # in both, with different shapes
    inflated: str = ''  # how the first convolution was made from that of RGB, if it was
    ignored: Sequence[str] = ()  # only in the checkpoint, and expected there, such as a classifier
    choice: str = ''  # which of several wrappers in the checkpoint was taken, if there were several

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.kept) + len(self.mismatched)
        parts = [f'loaded {len(self.loaded)} of {total} tensors']
        for what, names in (('missing', self.kept), ('unused', [*self.unused, *self.ignored])):
            parts.append(f'{len(names)} {what}' + (f' ({listed(names)})' if names else ''))
        remarks = [remark for remark in (self.inflated, self.choice) if remark]
        return '; '.join([', '.join(parts), *remarks])


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> LoadReport:
    """Compare a model's state dict with a checkpoint under the same names."""
    shared = [name for name in ours if name in theirs]
    mismatched = [name for name in shared if tensor_shape(theirs[name]) != tensor_shape(ours[name])]
    return LoadReport(
        loaded=[name for name in shared if name not in mismatched],
        kept=[name for name in ours if name not in theirs],
        unused=[name for name in theirs if name not in ours],
        mismatched=mismatched,
    )


def tensor_shape(value: object) -> Optional[torch.Size]:
    """The shape of a tensor; None for others, such as a quantized model's packed parameters."""
    return value.shape if isinstance(value, Tensor) else None


def objection_to(
    model: Any, ours: dict[str, Tensor], theirs: dict[str, Tensor], report: LoadReport
) -> Optional[str]:
    """Why a checkpoint does not fit a model, and what to do; None if it fits.

    Args:
        model: of this package.
        ours: its tensors, and others that the checkpoint may have.
        theirs: the checkpoint, under the same names.
        report: of the two, by `compare`.
    """
    if depths_differ(ours, theirs) or is_of_other_arch(ours, theirs, report):
        return (
            f'the checkpoint is of another architecture, {describe_arch(theirs)}; the model is '
            f'{describe_arch(ours)}. Set its arch, or load another file'
        )
    if report.mismatched:
        name = report.mismatched[0]
        return describe_mismatch(model, name, tuple(ours[name].shape), tuple(theirs[name].shape))
    # What gives position, and the stage norms of SVT, a checkpoint may lack, but not in part.
    needed = {part_of(name) for name in theirs if role_of(name) in ('position', 'norm')}
    if not getattr(model.arch, 'classifier_norm', True):
        needed.add('norm_list')  # which the classifier reads: it is in every checkpoint
    lacking = [n for n in report.kept if role_of(n) == 'features' or part_of(n) in needed]
    if lacking:
        return f'the checkpoint is of another architecture or damaged: it lacks {listed(lacking)}'
    besides = [name for name in report.unused if role_of(name) == 'features']
    if besides:
        return f'the checkpoint is of another architecture: the model has no {listed(besides)}'
    for name in report.loaded:
        if defect := defect_of(theirs[name], ours[name]):
            return f'the checkpoint is damaged: {name} {defect}'
    for name in report.loaded:
        if overflows(theirs[name], ours[name].dtype):
            return (
                f'{name} has values up to {theirs[name].abs().max():.3g}, which are infinite in '
                f"the model's dtype, {ours[name].dtype}"
            )
    return None


def part_of(name: str) -> str:
    """The part of the model that a name begins with; of position inside a block, that of the
    attention."""
    inside = IN_ATTENTION.search(name)
    return inside[0] if inside else name.split('.')[0]


def describe_mismatch(model: Any, name: str, here: tuple[int, ...], there: tuple[int, ...]) -> str:
    """Say that a tensor has another shape in the checkpoint than in the model, and what to do."""
    advice = ''
    if name == model.first_conv and there[2:] == here[2:]:
        advice = f'. in_channels={there[1]} fits the checkpoint'
        if there[1] == 3:
            advice += f"; or set rgb_weights='mean' to make it fit {here[1]} channels"
    if name.endswith('.table'):
        advice = (
            '. Build the model with the pretrain_img_size of the checkpoint (img_size in '
            'timm): at any other size of image the table is interpolated'
        )
    return f'{name} is {there} in the checkpoint and {here} in the model{advice}'


def defect_of(value: Tensor, ours: Tensor) -> Optional[str]:
    """Why a tensor of the right shape cannot be loaded; None if it can."""
    if value.dtype not in DTYPES:
        return f'has the dtype {value.dtype}; one of {", ".join(map(str, DTYPES))} loads'
    if value.is_meta:
        return None if ours.is_meta else 'is on the meta device and has no values'
    return None if value.isfinite().all() else 'has values that are not finite'


def overflows(value: Tensor, dtype: torch.dtype) -> bool:
    """True if a finite tensor is not finite in another dtype."""
    if torch.finfo(value.dtype).max <= torch.finfo(dtype).max:
        return False
    return not value.to(dtype).isfinite().all()


def is_of_other_arch(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], report: LoadReport
) -> bool:
    """True if shapes differ since the tensors are those of two different variants."""
    return bool(report.mismatched) and len({arch_of(ours), arch_of(theirs)} - {None}) == 2


def depths_differ(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """True if two pyramids differ in the channels or the number of blocks of a stage of both."""
    return any(a != b for a, b in zip(shape_of(ours), shape_of(theirs)))


def shape_of(tensors: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """The channels and the number of blocks of each stage of a pyramid."""
    stages: list[tuple[int, ...]] = []
    while (norm := f'blocks.{len(stages)}.0.norm1.weight') in tensors:
        stage = f'blocks.{len(stages)}.'
        blocks = {name.split('.')[2] for name in tensors if name.startswith(stage)}
        # The shape of a damaged tensor may be ().
        stages.append((*tensors[norm].shape[:1], len(blocks)))
    return stages


def arch_of(tensors: dict[str, Tensor]) -> Optional[str]:
    """The key in `ARCHS` or `COLUMNAR_ARCHS` of the model with these tensors, or None.

    It is the variant with as many blocks in each stage that has most of the tensors.
    """
    blocks = {block for name in tensors if (block := in_block(name))}
    depths = Counter(block.rpartition('.')[0] for block in blocks)  # of blocks.0, blocks.1, ...
    pyramids = [
        name
        for name, arch in ARCHS.items()
        if depths.items() <= {f'blocks.{i}': depth for i, depth in enumerate(arch.depths)}.items()
    ]
    columns = [name for name, arch in COLUMNAR_ARCHS.items() if depths == {'blocks': arch.depth}]
    found = None
    most = len(tensors) // 2
    for name in pyramids + columns:
        layout = layout_of_row(name)
        shared = sum(tensor_shape(value) == layout.get(key) for key, value in tensors.items())
        if shared > most:
            found = name
            most = shared
    return found


def describe_arch(tensors: dict[str, Tensor]) -> str:
    """The name of an architecture, or its numbers if it has none."""
    dims = tuple(stage[0] for stage in shape_of(tensors))
    depths = tuple(stage[-1] for stage in shape_of(tensors))
    return arch_of(tensors) or f'of dims {dims} and depths {depths}'
