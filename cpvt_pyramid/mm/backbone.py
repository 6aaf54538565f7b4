"""The backbones of MMDetection, MMSegmentation and MMPretrain configs."""

import copy
from typing import Any, Optional, Union

from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor

from .. import columnar, pyramid
from ..mask import pixel_mask
from ..weights import LoadReport
from .valid_region import REGION, valid_of


class Configured:
    """Mixed into a core class, before it: mmengine's `init_cfg`, and the validity channel.

    Args:
        *args: as of the core class.
        init_cfg: mmengine's initialization config, for example
            `dict(type='Pretrained', checkpoint='twins_pcpvt_small.safetensors')`.
        **options: as of the core class, which refuses what it does not know.
    """

    def __init__(
        self, *args: Any, init_cfg: Optional[Union[dict, list]] = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.init_cfg = copy.deepcopy(init_cfg)

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """As of the core class; `image` may have a validity channel (see `valid_region.py`)."""
        if image.shape[1] == self.in_channels + 1:
            image, validity = image.split([self.in_channels, 1], dim=1)
            valid = valid_of(validity)
        REGION.announce(pixel_mask(valid, image))
        return super().forward(image, valid)

    def log_load_report(self, report: LoadReport) -> None:
        print_log(str(report), logger='current')


@MODELS.register_module()
class CPVTPyramid(Configured, pyramid.CPVTPyramid, BaseModule):
    """`cpvt_pyramid.CPVTPyramid` in a config; its arguments, and `init_cfg`."""


@MODELS.register_module()
class CPVT(Configured, columnar.DenseCPVT, BaseModule):
    """`cpvt_pyramid.DenseCPVT` in a config; its arguments, and `init_cfg`."""
