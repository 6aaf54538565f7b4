"""A trial of what a training does only after hours: an evaluation, and a checkpoint.

The first iteration itself shows at once whether the model, the data and the optimizer fit.
"""

import copy
import io
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.fileio import get_file_backend
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, Hook
from mmengine.registry import LOOPS
from mmengine.runner import Runner
from mmengine.structures import InstanceData
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..tooling.command import UserError

CHECKPOINT = '.trial_checkpoint'  # is not taken for one of the training


class TrialHook(Hook):
    """Evaluates one batch of the validation data, and writes and removes a checkpoint, before the
    first iteration of a training, also of one that resumes.

    Mistakes in the validation data, metrics, names of metrics and folders end the training there.
    It leaves no trace in the training, whose results are the same without it.
    """

    priority = 'LOWEST'  # all that other hooks prepare for the training is there

    def __init__(self) -> None:
        self.is_done = False

    def before_train_iter(self, runner: Runner, batch_idx: int, **_: Any) -> None:
        if self.is_done:
            return
        self.is_done = True
        start = time.perf_counter()
        try:
            with unchanged_state(runner):
                metrics = evaluate_one_batch(runner)
                check_monitored(runner, metrics)
                write_checkpoints(runner)
        except UserError:
            raise
        except Exception:  # a metric may need all images
            runner.logger.error(
                'the trial before the first iteration failed. If its metrics need more than one '
                'batch: --cfg-options trial=False'
            )
            raise
        evaluated = 'one batch evaluated, ' if metrics else ''
        seconds = time.perf_counter() - start
        runner.logger.info(
            f'trial before the first iteration: {evaluated}a checkpoint written, in {seconds:.1f} s'
        )


@contextmanager
def unchanged_state(runner: Runner) -> Iterator[None]:
    """After this context, random generators and the modes of the model's modules are as before."""
    modes = [(module, module.training) for module in runner.model.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)
    for module, mode in modes:
        module.training = mode


def without_hooks(runner: Runner) -> Runner:
    """A runner of the same model, which calls no hooks."""
    other = copy.copy(runner)
    other.call_hook = lambda *_, **__: None  # type: ignore[method-assign]
    return other


# Evaluation


def evaluate_one_batch(runner: Runner) -> dict[str, Any]:
    """The metrics of one batch of the validation data, by a loop and an evaluator of its own; empty
    if there is no validation, or if its data have no order."""
    if runner.val_loop is None:
        return {}
    loader = runner.val_loop.dataloader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return {}
    batches: Any = loader.batch_sampler
    cfg: Config = runner.cfg
    other = without_hooks(runner)
    evaluator = other.build_evaluator(cfg.val_evaluator)
    process = evaluator.process

    def process_objects(data_samples: Sequence[Any], data_batch: Any = None) -> None:
        give_objects(data_samples)
        for metric in evaluator.metrics:
            if hasattr(metric, 'img_ids'):  # mmdet's for COCO, which else compare all images
                metric.img_ids = [sample.img_id for sample in data_samples]
        process(data_samples, data_batch)

    evaluator.process = process_objects
    batch = DataLoader(
        loader.dataset,
        batch_sampler=[next(iter(batches))],
        collate_fn=loader.collate_fn,
    )
    loop = LOOPS.build(
        {'type': 'ValLoop', **(cfg.get('val_cfg') or {})},
        default_args={'runner': other, 'dataloader': batch, 'evaluator': evaluator},
    )
    level = runner.logger.level
    runner.logger.setLevel('WARNING')  # its metrics say nothing about the model
    try:
        with redirect_stdout(io.StringIO()):
            metrics = loop.run()
    finally:
        runner.logger.setLevel(level)
    return metrics if isinstance(metrics, dict) else {}


def give_objects(samples: Sequence[Any]) -> None:
    """Give an object of zeros to each sample of a detector without one: most detectors find nothing
    in the beginning, and then there are no metrics."""
    for sample in samples:
        found = getattr(sample, 'pred_instances', None)
        if found is None or len(found):
            continue
        fields = dict(found.items())
        if all(isinstance(field, Tensor) for field in fields.values()):
            zeros = {name: field.new_zeros(1, *field.shape[1:]) for name, field in fields.items()}
            sample.pred_instances = InstanceData(**zeros)


# What hooks and schedules take from an evaluation


def check_monitored(runner: Runner, metrics: dict[str, Any]) -> None:
    """Check that an evaluation computes what hooks choose the best checkpoint by, or stop by, and
    what schedules wait for."""
    if not metrics:
        return
    for hook in runner.hooks:
        kind = type(hook).__name__
        if isinstance(hook, EarlyStoppingHook):
            check_name(f'monitor of {kind}', hook.monitor, metrics)
        if isinstance(hook, CheckpointHook):
            for name in hook.save_best or ():
                if name == 'auto':
                    check_rule(hook, next(iter(metrics)))
                else:
                    check_name(f'save_best of {kind}', name, metrics)
    schedules = runner.param_schedulers
    for schedule in schedules if isinstance(schedules, list) else ():
        if getattr(schedule, 'need_val_args', False) and schedule.by_epoch:
            check_name(f'monitor of {type(schedule).__name__}', schedule.monitor, metrics)


def check_name(setting: str, name: str, metrics: dict[str, Any]) -> None:
    if name not in metrics:
        raise UserError(
            f'{setting} must be a metric that the evaluation computes, got {name!r}; it computes '
            f'{", ".join(metrics)}'
        )


def check_rule(hook: CheckpointHook, name: str) -> None:
    """Check that mmengine knows whether the metric that it chooses itself should be high or low."""
    try:
        CheckpointHook(
            save_best=name,
            rule=hook.rules[0],
            greater_keys=hook.greater_keys,
            less_keys=hook.less_keys,
        )
    except ValueError:
        raise UserError(
            f"save_best='auto' of {type(hook).__name__} takes {name}; set its rule to 'greater' or "
            "'less'"
        ) from None


# Checkpoints


def write_checkpoints(runner: Runner) -> None:
    """Write a checkpoint as each hook of the training does, and remove it."""
    other = without_hooks(runner)
    for hook in runner.hooks:
        if not isinstance(hook, CheckpointHook):
            continue
        other.save_checkpoint(
            hook.out_dir,
            CHECKPOINT,
            file_client_args=hook.file_client_args,
            save_optimizer=hook.save_optimizer,
            save_param_scheduler=hook.save_param_scheduler,
            by_epoch=False,
            backend_args=hook.backend_args,
        )
        if is_main_process():
            backend = get_file_backend(hook.out_dir, backend_args=hook.backend_args)
            backend.remove(backend.join_path(hook.out_dir, CHECKPOINT))
