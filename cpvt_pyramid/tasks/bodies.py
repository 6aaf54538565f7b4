"""The backbone of a detector or a segmentor, from its name or options."""

from collections.abc import Sequence
from typing import Any, Union

from ..archs import COLUMNAR_ARCHS, Arch, ColumnarArch
from ..columnar import DenseCPVT
from ..model import CPVTPyramid

# A name from `ARCHS` or `COLUMNAR_ARCHS`; a dict of `arch` and other options of `CPVTPyramid` or
# `DenseCPVT`; or one of these.
Body = Union[CPVTPyramid, DenseCPVT]
Backbone = Union[str, dict[str, Any], Body]


def build_body(backbone: Backbone, finest: int) -> Body:
    """Build a backbone from its name or options, or check a given one.

    Args:
        backbone: see `Backbone`.
        finest: stride of its first map, 4 or 8.
    """
    if isinstance(backbone, str):
        backbone = dict(arch=backbone)
    if isinstance(backbone, dict):
        options: dict[str, Any] = dict(out_indices=(0, 1, 2, 3) if finest == 4 else (1, 2, 3))
        options |= backbone
        if is_columnar(options.get('arch', 'pcpvt_small')):
            backbone = DenseCPVT(**options)
        else:
            backbone = CPVTPyramid(**options)
    strides = (4, 8, 16, 32) if finest == 4 else (8, 16, 32)
    if tuple(backbone.strides) != strides:
        raise ValueError(
            f'the strides of the backbone must be {strides}, got {tuple(backbone.strides)}; '
            f'choose out_indices'
        )
    return backbone


def check_normalization(
    image_mean: Sequence[float], image_std: Sequence[float], in_channels: int
) -> None:
    """Raise a ValueError unless there are a mean and a deviation for each channel of the image, or
    one for all."""
    for name, values in (('image_mean', image_mean), ('image_std', image_std)):
        if len(values) not in (1, in_channels):
            raise ValueError(
                f'{name} must have a value for each of the {in_channels} channels of the image '
                f'(in_channels), or one for all, got {len(values)}: {tuple(values)}'
            )


def is_columnar(arch: Union[str, dict[str, Any], Arch, ColumnarArch]) -> bool:
    """True for an arch of `DenseCPVT`: its name, its row, or a dict of its fields."""
    if isinstance(arch, str):
        return arch in COLUMNAR_ARCHS
    if isinstance(arch, dict):
        return 'dim' in arch
    return isinstance(arch, ColumnarArch)
