"""The pyramid as a backbone of MMDetection, MMSegmentation and MMPretrain configs."""

import copy
from typing import Any, Optional, Union

from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor

from .. import pyramid
from .valid_region import split_validity


@MODELS.register_module()
class CPVTPyramid(pyramid.CPVTPyramid, BaseModule):
    """`cpvt_pyramid.CPVTPyramid` with mmengine's `init_cfg`.

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
        self.register_load_state_dict_post_hook(print_load_report)

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """As of the core class; `image` may have a validity channel (see `valid_region.py`)."""
        if image.shape[1] == self.in_channels + 1:
            return self.maps(*split_validity(image, self.in_channels))
        return super().forward(image, valid)


def print_load_report(module: CPVTPyramid, _keys: object) -> None:
    if hasattr(module, 'load_report'):
        print_log(str(module.load_report), logger='current')
