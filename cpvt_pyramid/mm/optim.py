"""Layer-wise learning rate decay: the closer a layer is to the image, the lower its rate."""

import warnings
from collections.abc import Iterable
from typing import Any, Optional

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
            has the full rate. A warning names settings of `custom_keys` that a longer key hides.

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
        names = [name for name, _ in module.named_parameters()]
        for line in hidden_settings(self.paramwise_cfg.get('custom_keys') or {}, names):
            warnings.warn(line, stacklevel=2)
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


def hidden_settings(custom_keys: dict[str, dict[str, Any]], names: Iterable[str]) -> list[str]:
    """What mmengine's `custom_keys` set in vain, a line for each pair of keys.

    mmengine applies to a parameter the longest key that its name contains, and nothing of others.

    Args:
        custom_keys: from parts of names to settings, such as `lr_mult`.
        names: of the parameters.
    """
    lines = {}
    for name in names:
        # In mmengine's order: the longest one first, and of equally long ones by the alphabet.
        matching = sorted((key for key in custom_keys if key in name), key=lambda k: (-len(k), k))
        for other in matching[1:]:
            applied = matching[0]
            lost = {k: v for k, v in custom_keys[other].items() if k not in custom_keys[applied]}
            if lost and (applied, other) not in lines:
                settings = ', '.join(f'{k}={v!r}' for k, v in lost.items())
                lines[applied, other] = (
                    f'custom_keys: {other!r} has {settings}, which does not apply to {name}, '
                    f'because the longer key {applied!r} does; repeat it there'
                )
    return list(lines.values())
