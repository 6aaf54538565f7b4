"""Comparing a checkpoint with a model, both under our names."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..archs import ARCHS, COLUMNAR_ARCHS, Arch
from ..names import IN_ATTENTION, role_of
from .files import listed
from .rgb import FIRST_CONV

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

    @property
    def misfit(self) -> Optional[str]:
        """Why the checkpoint is not one of exactly this model; None if it is."""
        if self.kept:
            return f'lacks: {listed(self.kept)}'
        if self.unused:
            return f'has more than the model: {listed(self.unused)}'
        if self.mismatched:
            return f'has other shapes: {listed(self.mismatched)}'
        return None

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
    ours: dict[str, Tensor], theirs: dict[str, Tensor], report: LoadReport
) -> Optional[str]:
    """Why a checkpoint does not fit the model, and what to do; None if it fits."""
    others = [a for a, b in zip(shape_of(ours), shape_of(theirs)) if a != b]
    archs = {arch_of(ours), arch_of(theirs)}
    if others or report.mismatched and len(archs - {None}) == 2:
        return (
            f'the checkpoint is of another architecture, {describe_arch(theirs)}; the model is '
            f'{describe_arch(ours)}. Set its arch, or load another file'
        )
    if report.mismatched:
        name = report.mismatched[0]
        return describe_mismatch(name, tuple(ours[name].shape), tuple(theirs[name].shape))
    # What gives position, and the stage norms of SVT, a checkpoint may lack, but not in part.
    needed = {part_of(name) for name in theirs if role_of(name) in ('position', 'norm')}
    if has_mlp_conv(ours):
        needed.add('norm_list')  # those of PVTv2 and MiT are in every checkpoint
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


def describe_mismatch(name: str, here: tuple[int, ...], there: tuple[int, ...]) -> str:
    """Say that a tensor has another shape in the checkpoint than in the model, and what to do."""
    advice = ''
    if FIRST_CONV.match(name) and there[2:] == here[2:]:
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


def shape_of(tensors: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """The channels and the number of blocks of each stage of a pyramid."""
    stages: list[tuple[int, ...]] = []
    while (patches := f'patch_embeds.{len(stages)}.proj.weight') in tensors:
        stage = f'blocks.{len(stages)}.'
        blocks = {name.split('.')[2] for name in tensors if name.startswith(stage)}
        # The shape of a damaged tensor may be ().
        stages.append((*tensors[patches].shape[:1], len(blocks)))
    return stages


def has_mlp_conv(tensors: dict[str, Tensor]) -> bool:
    """True for the tensors of models with a convolution in the MLP, PVTv2 and MiT."""
    return any('.mlp.dwconv.' in name for name in tensors)


def arch_of(tensors: dict[str, Tensor]) -> Optional[str]:
    """The key in `ARCHS` or `COLUMNAR_ARCHS` of the model with these tensors, or None."""
    if 'patch_embed.proj.weight' in tensors:
        dim = tensors['patch_embed.proj.weight'].shape[:1].numel()
        depth = len({name.split('.')[1] for name in tensors if name.startswith('blocks.')})
        for name, column in COLUMNAR_ARCHS.items():
            if (column.dim, column.depth) == (dim, depth):
                return name
        return None
    stages = shape_of(tensors)
    if not stages:
        return None
    fitting = []
    for name, arch in ARCHS.items():
        known = list(zip(arch.dims, arch.depths))
        if known[: len(stages)] == stages and arch.mlp_conv == has_mlp_conv(tensors):
            fitting.append(name)
    # Those that are left differ in less; the checkpoint may lack what they differ in.
    return max(fitting, key=lambda name: agreement(ARCHS[name], tensors), default=None)


def agreement(arch: Arch, tensors: dict[str, Tensor]) -> int:
    """In how much an architecture agrees with tensors of its dims and depths."""
    agreeing = 0
    if 'blocks.0.0.mlp.fc1.bias' in tensors:
        hidden = tensors['blocks.0.0.mlp.fc1.bias'].shape[:1].numel()
        agreeing += hidden == arch.dims[0] * arch.mlp_ratios[0]
    if 'blocks.0.0.attn.sr.weight' in tensors:
        side = tensors['blocks.0.0.attn.sr.weight'].shape[-1:].numel()
        agreeing += side == (1 if arch.linear else arch.sr_ratios[0])
    has_table = 'pos_embeds.0.table' in tensors
    return agreeing + (has_table == (arch.position == 'learned'))


def describe_arch(tensors: dict[str, Tensor]) -> str:
    """The name of an architecture, or its numbers if it has none."""
    dims = tuple(stage[0] for stage in shape_of(tensors))
    depths = tuple(stage[-1] for stage in shape_of(tensors))
    return arch_of(tensors) or f'of dims {dims} and depths {depths}'
