"""Ending a training that cannot succeed in its first iteration, instead of letting it run on."""

import math
from typing import Optional

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from ...tooling.command import UserError


@HOOKS.register_module()
class FirstLossHook(Hook):
    """Ends a training whose first loss is not finite: neither are its weights from then on."""

    def __init__(self) -> None:
        self.checked = False

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Optional[dict] = None,
        outputs: Optional[dict] = None,
    ) -> None:
        if self.checked:  # reading a loss waits for the GPU
            return
        self.checked = True
        losses = {
            name: value.detach().item()
            for name, value in (outputs or {}).items()
            if 'loss' in name and isinstance(value, Tensor)
        }
        wrong = [
            f'{name}={value:.3g}' for name, value in losses.items() if not math.isfinite(value)
        ]
        if wrong:
            raise UserError(
                f'the first loss must be finite, got {", ".join(wrong)}: check what the model '
                'divides by, such as data_preprocessor.std and bbox_coder.target_stds, the data, '
                'and the weights that training starts from'
            )
