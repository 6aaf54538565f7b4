"""Ending a training that cannot succeed in its first iteration, instead of letting it run on."""

import math
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ...tooling.command import UserError


@HOOKS.register_module()
class FirstLossHook(Hook):
    """Ends a training whose first loss is not finite: neither are its weights from then on."""

    def after_train_iter(self, runner: Runner, outputs: dict, **_: Any) -> None:
        if runner.iter > 0:  # reading a loss waits for the GPU
            return
        loss = torch.as_tensor(outputs.get('loss', 0)).item()
        if not math.isfinite(loss):
            raise UserError(
                f'the first loss must be finite, got {loss}: check what the model divides by, such '
                'as data_preprocessor.std and bbox_coder.target_stds, the data, and the weights '
                'that training starts from'
            )
