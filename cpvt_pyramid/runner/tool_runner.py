"""mmengine's Runner as the tools use it."""

import logging
import re
from typing import Any, Optional, Union

from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader

from .. import mm  # noqa: F401 (registers names)
from ..config.parts import as_list, kind_of
from ..predict.openmmlab.models import FROM_SCRATCH, download_errors, trusted_checkpoints
from ..training import processes  # noqa: F401 (register names)
from ..versions import VERSION
from . import evaluation  # noqa: F401 (registers a hook)
from .training import pictures, preemption, resume, start  # noqa: F401 (register names)

if VERSION >= (2, 7):
    from .training import sharded

    SHARDED: tuple[type, ...] = (sharded.ShardedDataParallel,)
else:
    SHARDED = ()

# What mmengine logs at length or needlessly: kept in the log file, not shown in the terminal.
FILE_ONLY = re.compile(
    r'\n-{20}|Config:\n|Hooks will be executed|Distributed training is not used|'
    r'paramwise_options -- |'
    r'"(FileClient|HardDiskBackend)"'
)


def raise_active(record: logging.LogRecord) -> None:
    raise  # logging calls this while it handles an error


class ToolRunner(Runner):
    """mmengine's Runner with a short terminal log, one-line errors, and one-cycle schedules that
    respect the learning rate of each parameter group."""

    def build_logger(self, *args: Any, **options: Any) -> MMLogger:
        logger = super().build_logger(*args, **options)
        for handler in logger.handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handleError = raise_active  # else a full disk is a traceback for each line
            else:
                handler.addFilter(lambda record: not FILE_ONLY.match(record.getMessage()))
        return logger

    @staticmethod
    def build_dataloader(dataloader: Union[DataLoader, dict], **options: Any) -> DataLoader:
        loader = Runner.build_dataloader(dataloader, **options)
        if not len(loader.dataset):  # over which an InfiniteSampler would iterate forever
            raise ValueError('there are no images in the data set, or all are filtered out')
        return loader

    def wrap_model(self, model_wrapper_cfg: Optional[dict], model: nn.Module) -> nn.Module:
        if self.distributed and kind_of(model_wrapper_cfg or {}) == 'ShardedDataParallel':
            with trusted_checkpoints(), download_errors('the weights in an init_cfg', FROM_SCRATCH):
                model.init_weights()  # before the parameters are divided
        return super().wrap_model(model_wrapper_cfg, model)

    def build_optim_wrapper(self, optim_wrapper: Union[dict, OptimWrapper]) -> OptimWrapper:
        wrapper = super().build_optim_wrapper(optim_wrapper)
        if isinstance(self.model, SHARDED) and wrapper is not optim_wrapper:
            wrapper.optimizer.register_load_state_dict_post_hook(sharded.divide_states)
        return wrapper

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        if isinstance(self.model, SHARDED):
            with self.model.gathered(self.optim_wrapper.optimizer):
                super().save_checkpoint(*args, **options)
        else:
            super().save_checkpoint(*args, **options)

    def _init_model_weights(self) -> None:
        if isinstance(self.model, SHARDED):
            return
        with trusted_checkpoints(), download_errors('the weights in an init_cfg', FROM_SCRATCH):
            super()._init_model_weights()

    def load_or_resume(self) -> None:
        with trusted_checkpoints(), download_errors(str(self._load_from)):
            super().load_or_resume()

    def scale_lr(self, optim_wrapper: OptimWrapper, auto_scale_lr: Optional[dict] = None) -> None:
        counts = getattr(optim_wrapper, '_accumulative_counts', 1)
        if auto_scale_lr and counts > 1 and 'base_batch_size' in auto_scale_lr:
            # mmengine compares with the images in an iteration, of which a step has several.
            base = auto_scale_lr['base_batch_size'] / counts
            auto_scale_lr = {**auto_scale_lr, 'base_batch_size': base}
        super().scale_lr(optim_wrapper, auto_scale_lr)

    def _build_param_scheduler(
        self, scheduler: Union[dict, list], optim_wrapper: OptimWrapper
    ) -> list:
        scheduler = one_cycles_by_group(scheduler, optim_wrapper, self.logger)
        return super()._build_param_scheduler(scheduler, optim_wrapper)


def one_cycles_by_group(
    schedulers: Union[dict, list], optim_wrapper: OptimWrapper, logger: logging.Logger
) -> list:
    """Scheduler configs in which a one-cycle peak is scaled by each group's learning rate.

    mmengine's OneCycleLR sets every parameter group to `eta_max`, whatever `layer_decay`, `lr_mult`
    or `--auto-scale-lr` made of its learning rate. Here `eta_max` is the peak of a group with the
    optimizer's own `lr`, and the others keep their ratio to it. A list for `eta_max` is kept.
    """
    base = optim_wrapper.optimizer.defaults['lr']
    ratios = [group['lr'] / base if base else 1.0 for group in optim_wrapper.param_groups]
    if set(ratios) == {1.0}:
        return as_list(schedulers)
    result = []
    for config in as_list(schedulers):
        if has_one_peak(config):
            config = {**config, 'eta_max': [config['eta_max'] * ratio for ratio in ratios]}
            logger.info('eta_max is scaled by the learning rate of each parameter group')
        result.append(config)
    return result


def has_one_peak(scheduler: Any) -> bool:
    """Whether a scheduler is the config of a one-cycle schedule with one peak for all groups."""
    if not isinstance(scheduler, dict) or not isinstance(scheduler.get('eta_max'), (int, float)):
        return False
    kind = scheduler['type']
    if isinstance(kind, str):
        kind = PARAM_SCHEDULERS.get(kind)
    return isinstance(kind, type) and issubclass(kind, OneCycleParamScheduler)
