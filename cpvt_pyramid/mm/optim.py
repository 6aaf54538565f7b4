"""Layer-wise learning rate decay: the closer a layer is to the image, the lower its rate."""

from typing import Optional

from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from ..columnar import DenseCPVT
from ..model import CPVTPyramid
from ..names import count_layers, layer_of


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """mmengine's constructor, with a learning rate for each layer of the backbone.

    Args:
        optim_wrapper_cfg: see `DefaultOptimWrapperConstructor`.
        paramwise_cfg: options of `DefaultOptimWrapperConstructor`, and `layer_decay` in (0, 1]:
            the ratio of the rate of each layer to that of the next. Everything after the backbone
            has the full rate.

    Examples:
        >>> optim_wrapper = dict(
        ...     optimizer=dict(type='AdamW', lr=1e-4),
        ...     constructor='LayerDecayConstructor',
        ...     paramwise_cfg=dict(layer_decay=0.8),
        ... )
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: Optional[dict] = None) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        decay = self.paramwise_cfg.get('layer_decay')
        if not isinstance(decay, (int, float)) or not 0 < decay <= 1:
            raise ValueError(
                f'paramwise_cfg.layer_decay must be in (0, 1], such as 0.8, got {decay!r}'
            )

    def add_params(
        self, params: list[dict], module: nn.Module, prefix: str = '', **options: object
    ) -> None:
        super().add_params(params, module, prefix=prefix, **options)
        if prefix:  # called recursively, for each submodule
            return
        scales = {}
        for part in module.modules():
            if not isinstance(part, (CPVTPyramid, DenseCPVT)):
                continue
            for name, parameter in part.named_parameters():
                layers_after = count_layers(part) - 1 - layer_of(part, name)
                scales[parameter] = self.paramwise_cfg['layer_decay'] ** layers_after
        if not scales:
            raise ValueError(
                'layer_decay needs a CPVTPyramid or a DenseCPVT in the model; found neither'
            )
        for group in params:
            scale = scales.get(group['params'][0], 1.0)
            group['lr'] = group.get('lr', self.base_lr) * scale
