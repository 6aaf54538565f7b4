"""Ending a training that cannot succeed in its first iteration, instead of letting it run on."""

from typing import Any, Optional

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

    def after_train_iter(self, runner: Runner, outputs: Optional[dict] = None, **_: Any) -> None:
        if self.checked:  # reading a loss waits for the GPU
            return
        self.checked = True
        wrong = [
            f'{name}={value.item():.3g}'
            for name, value in (outputs or {}).items()
            if 'loss' in name and isinstance(value, Tensor) and not value.isfinite()
        ]
        if wrong:
            raise UserError(
                f'the first loss must be finite, got {", ".join(wrong)}: check what the model '
                'divides by, such as data_preprocessor.std and bbox_coder.target_stds, the data, '
                'and the weights that training starts from'
            )
