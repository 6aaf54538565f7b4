"""Checkpoints that survive a kill, and the best of them, which is always there."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional, Union

from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ..tooling.files import atomic_write


@register_backend('atomic')
class AtomicBackend(LocalBackend):
    """mmengine's local files, written as a whole or not at all.

    Examples:
        >>> default_hooks = dict(
        ...     checkpoint=dict(type='CheckpointHook', backend_args=dict(backend='atomic'))
        ... )
    """

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(filepath) as partial:
            partial.write_bytes(obj)


class LateRemoval:
    """A file backend of mmengine that removes files only when `remove_all` is called."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.removed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def remove(self, path: str) -> None:
        self.removed.append(path)

    rmtree = remove  # deepspeed writes folders

    def remove_all(self, kept: Iterable[Optional[str]]) -> None:
        """Remove the files, but not those that were written again meanwhile."""
        for path in self.removed:
            if path in kept:
                continue
            if self.backend.isfile(path):
                self.backend.remove(path)
            elif self.backend.isdir(path):
                self.backend.rmtree(path)
        self.removed.clear()


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, without the moments in which there is no checkpoint.

    - A new checkpoint is written before the one that it replaces is deleted, also with
      `max_keep_ckpts=1`. mmengine deletes first: a kill between the two would lose everything.
    - With `save_best`, a finished training has a best checkpoint. Where no evaluation had a metric,
      as that of a detector that finds nothing yet, it has the last weights.

    Examples:
        >>> default_hooks = dict(
        ...     checkpoint=dict(type='SafeCheckpointHook', max_keep_ckpts=2, save_best='auto')
        ... )
    """

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        self.file_backend: Any = LateRemoval(self.file_backend)

    def after_train_iter(self, runner: Runner, *args: Any, **named: Any) -> None:
        super().after_train_iter(runner, *args, **named)
        self.remove_old()

    def after_train_epoch(self, runner: Runner) -> None:
        super().after_train_epoch(runner)
        self.remove_old()

    def after_val_epoch(self, runner: Runner, metrics: Optional[dict[str, float]] = None) -> None:
        if metrics:
            super().after_val_epoch(runner, metrics)
        else:
            runner.logger.warning(
                'the evaluation has no metric, as that of a detector that finds nothing yet: it '
                'does not change the best checkpoint'
            )
        self.remove_old()

    def after_train(self, runner: Runner) -> None:
        if self.save_best and runner.val_loop is not None and not any(self.best_paths()):
            self.save_last_as_best(runner)
        super().after_train(runner)

    def best_paths(self) -> list[Optional[str]]:
        """The path of the best checkpoint for each metric; None of those without one."""
        if len(self.key_indicators) == 1:
            return [self.best_ckpt_path]
        return list(self.best_ckpt_path_dict.values())

    def remove_old(self) -> None:
        best = self.best_paths() if self.save_best else []
        self.file_backend.remove_all([self.last_ckpt, *best])

    def save_last_as_best(self, runner: Runner) -> None:
        """Write the weights as the best ones."""
        step = runner.epoch if self.by_epoch else runner.iter
        name = f'best_{self.filename_tmpl.format(step)}'
        path = self.file_backend.join_path(self.out_dir, name)
        first = self.key_indicators[0]
        if len(self.key_indicators) == 1:
            self.best_ckpt_path = path
            runner.message_hub.update_info('best_ckpt', path)
        else:
            self.best_ckpt_path_dict[first] = path
            runner.message_hub.update_info(f'best_ckpt_{first}', path)
        places = {'epoch': runner.epoch, 'iter': runner.iter}
        runner.save_checkpoint(
            self.out_dir,
            name,
            save_optimizer=False,
            save_param_scheduler=False,
            meta=places,
            by_epoch=False,
            backend_args=self.backend_args,
        )
        if self.last_ckpt is not None:  # so that it names the best one, as mmengine does
            self._save_checkpoint_with_step(runner, step, places)
        runner.logger.warning(
            f'no evaluation had a metric to choose the best checkpoint by: {name} has the last '
            'weights'
        )
