"""Layer-wise decay of the learning rate: the nearer a layer is to the image, the less it moves."""

from typing import Optional

from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from ..columnar import DenseCPVT
from ..pyramid import CPVTPyramid


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """mmengine's constructor, with a learning rate for each layer of a backbone.

    Args:
        optim_wrapper_cfg: as of `DefaultOptimWrapperConstructor`.
        paramwise_cfg: as of `DefaultOptimWrapperConstructor`, all of whose options work besides
            `layer_decay`, above 0 and at most 1: the factor from each layer to the one before it,
            beginning at what comes after the backbone, which keeps the whole rate.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: Optional[dict] = None) -> None:
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        decay = self.paramwise_cfg.get('layer_decay')
        if not isinstance(decay, (int, float)) or not 0 < decay <= 1:
            raise ValueError(
                f'paramwise_cfg.layer_decay={decay!r}; a factor above 0 and at most 1, such as 0.8'
            )

    def add_params(
        self, params: list[dict], module: nn.Module, prefix: str = '', **options: object
    ) -> None:
        super().add_params(params, module, prefix=prefix, **options)
        if prefix:  # mmengine calls it for each part of the model
            return
        scales = {}
        for part in module.modules():
            if not isinstance(part, (CPVTPyramid, DenseCPVT)):
                continue
            for name, parameter in part.named_parameters():
                layers_behind = part.num_layers - 1 - part.layer_of(name)
                scales[parameter] = self.paramwise_cfg['layer_decay'] ** layers_behind
        if not scales:
            raise ValueError(
                'layer_decay is for models with a CPVTPyramid or a CPVT, and this one has none'
            )
        for group in params:
            scale = scales.get(group['params'][0], 1.0)
            group['lr'] = group.get('lr', self.base_lr) * scale
