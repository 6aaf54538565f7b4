"""Several processes that train as one with their total batch."""

from functools import wraps
from typing import Any, Callable, Optional

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor


@HOOKS.register_module()
class TotalBatchHook(Hook):
    """Makes the losses, in training and in the log, those of the total batch.

    mmdet's anchor heads (RetinaNet) divide each process's loss by its own number of positive
    anchors, and mmengine logs the first process's losses. Here both are averaged over the
    processes. The mean of the gradients, which DDP takes, is then that of the total batch.
    """

    priority = 'HIGHEST'  # before mmengine's RuntimeInfoHook takes the losses

    def before_run(self, runner: Runner) -> None:
        if runner.cfg.get('default_scope') != 'mmdet':
            return
        from mmdet.models.dense_heads import AnchorHead

        for module in runner.model.modules():
            if getattr(type(module), 'get_targets', None) is AnchorHead.get_targets:
                module.get_targets = sharing_the_positives(module.get_targets)

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Optional[dict] = None,
        outputs: Optional[dict] = None,
    ) -> None:
        names = [name for name, value in outputs.items() if isinstance(value, Tensor)]
        values = torch.stack([outputs[name].detach().float() for name in names])
        all_reduce(values, 'mean')
        outputs.update(zip(names, values))


def sharing_the_positives(get_targets: Callable[..., tuple]) -> Callable[..., tuple]:
    """An anchor head's `get_targets` with the mean of all processes' positives as divisor."""

    @wraps(get_targets)
    def shared(*args: Any, **options: Any) -> tuple:
        labels, label_weights, boxes, box_weights, positives, *rest = get_targets(*args, **options)
        positives = torch.tensor(float(positives), device=labels[0].device)
        all_reduce(positives, 'mean')
        return labels, label_weights, boxes, box_weights, positives, *rest

    return shared
