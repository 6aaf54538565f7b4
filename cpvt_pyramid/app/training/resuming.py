"""A training that resumes at a checkpoint ends as if it had not been interrupted.

mmengine restores weights, optimizer and schedules from the checkpoint, whatever the config says.
Settings that it restores, and others with which the training could not go on exactly, must be those
of the checkpoint. What else differs is said.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Optional, Union

from mmengine.config import Config
from mmengine.dist import get_world_size
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch.utils.data import DataLoader

from ...checkpoints.reading import listed
from ..config.load import SETTINGS, settings_in_checkpoint
from ..config.parts import data_paths
from ..config.schedules import schedule_problems
from ..data.config_data import annotation_file
from ..tooling.command import UserError
from ..tooling.files import digest_of
from ..tooling.report import amount
from .seeds import IterationSeedHook

# Settings that a training that resumes cannot change: mmengine restores the optimizer with its
# learning rates; schedules and sums of gradients count iterations; scores must be comparable.
FIXED = (
    'optim_wrapper.optimizer',
    'optim_wrapper.paramwise_cfg',
    'optim_wrapper.constructor',
    'optim_wrapper.accumulative_counts',
    'param_scheduler',
    'auto_scale_lr.enable',
    'train_cfg.type',
    'train_cfg.by_epoch',
    'train_cfg.max_epochs',
    'train_cfg.max_iters',
    'train_dataloader.batch_size',
    'val_cfg',
    'val_evaluator',
)
FIXED_IN_HOOKS = 'save_best', 'rule', 'monitor'
MOVED = 'ann_file', 'data_root', 'data_prefix'  # data may be elsewhere
# Settings that a training that resumes may change without a word. All others are compared.
UNCOMPARED = (
    'check_classes',
    'experiment_name',
    'launcher',
    'load_from',
    'log_level',
    'log_processor',
    'randomness.seed',  # is restored, which `resume_from` says
    'resume',
    'test_cfg',
    'test_dataloader',
    'test_evaluator',
    'trial',
    'tta_model',
    'tta_pipeline',
    'vis_backends',
    'visualizer',
    'work_dir',
)
STATE = 'cpvt_pyramid'  # in a checkpoint: what the ResumeHook keeps there
EVALUATED = 'evaluated_iter'  # in the message hub: the iteration of the last evaluation


@HOOKS.register_module()
class ResumeHook(Hook):
    """Lets a training that is stopped or killed, and resumes, end as one that was not.

    - An interrupted epoch continues with its next batch.
    - An evaluation that was interrupted, or was due after the checkpoint, is made first.
    - EarlyStoppingHooks go on counting.

    With another length, other batches, another number of processes, or another optimizer, schedule,
    EMAHook or score, it ends with one line. What else differs from the checkpoint's training is
    logged: settings, and the content of files with annotations.

    Examples:
        >>> default_hooks = dict(resume=dict(type='ResumeHook'))
    """

    priority = 'LOWEST'  # an evaluation needs what other hooks do before the training

    def __init__(self) -> None:
        self.annotations: dict[str, str] = {}  # see `digests_of_annotations`
        self.whole_epoch: Optional[DataLoader] = None
        self.done = 0  # batches of the epoch with which the training continues
        self.epoch = 0  # that is trained, and the iteration with which it began
        self.first = 0

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if 'optimizer' not in checkpoint:  # nothing resumes at it
            return
        meta = checkpoint['meta']
        checkpoint[STATE] = {
            'epoch_length': epoch_iterations(runner),
            'done': meta['iter'] - self.first if meta['epoch'] == self.epoch else 0,
            'processes': get_world_size(),
            'annotations': self.annotations,
            'early_stopping': {
                hook.monitor: {
                    'wait_count': hook.wait_count,
                    'best_score': float(hook.best_score),
                }
                for hook in early_stopping(runner)
            },
        }

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if not runner.cfg.get('resume') or 'optimizer' not in checkpoint:
            return
        state = checkpoint.get(STATE, {})
        say = runner.logger.warning
        try:
            changed = changed_settings(runner.cfg, checkpoint, 'the checkpoint')
        except UserError as error:
            changed = {}
            say(f'the settings of the training are not compared with those before: {error}')
        check_fixed(changed, 'the checkpoint')
        if changed:
            used = [f'{path} {new!r} instead of {old!r}' for path, (old, new) in changed.items()]
            say(f'this training differs from that of the checkpoint: {listed(used)}')
        self.annotations = digests_of_annotations(runner.cfg)
        before = state.get('annotations', {})
        others = [
            path for path, digest in self.annotations.items() if before.get(path, digest) != digest
        ]
        if others:
            say(f'files of annotations have changed since the checkpoint: {listed(others)}')
        check_state(runner, checkpoint, state)
        self.done = restore_position(runner, checkpoint, state)
        for hook in early_stopping(runner):
            if kept := state.get('early_stopping', {}).get(hook.monitor):
                hook.wait_count = kept['wait_count']
                hook.best_score = kept['best_score']

    def before_train(self, runner: Runner) -> None:
        """Say what is odd about the schedules, and make the evaluation that is due after the
        checkpoint.

        mmengine writes a checkpoint before it evaluates the model. A training that ends in between
        would lose the result, and maybe the best model.
        """
        if not self.annotations:  # those of a training that resumes have been read
            self.annotations = digests_of_annotations(runner.cfg)
        for problem in schedule_problems(runner.cfg, epoch_iterations(runner)):
            runner.logger.warning(problem)
        if runner.iter == 0:
            return
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook):
                restore_names(runner, hook)
        loop = runner.train_loop
        if runner.val_loop is None:
            return
        if runner.message_hub.runtime_info.get(EVALUATED) == runner.iter:
            return
        if isinstance(loop, EpochBasedTrainLoop):
            if self.done:
                return
            step = loop.epoch
            last = loop.max_epochs
        else:
            step = loop.iter
            last = loop.max_iters
        interval = loop.dynamic_intervals[bisect.bisect(loop.dynamic_milestones, step + 1) - 1]
        is_due = step % interval == 0 or step == last
        if is_due and step >= loop.val_begin:
            runner.logger.info('evaluating the model of the checkpoint first')
            runner.val_loop.run()

    def after_val_epoch(self, runner: Runner, **_: Any) -> None:
        runner.message_hub.update_info(EVALUATED, runner.iter)

    def before_train_epoch(self, runner: Runner) -> None:
        """Skip the batches of an epoch that were trained before."""
        loop = runner.train_loop
        if not isinstance(loop, EpochBasedTrainLoop):
            return
        self.epoch = runner.epoch
        self.first = runner.iter - self.done
        if self.done:
            runner.logger.info(f'continuing epoch {runner.epoch + 1} after batch {self.done}')
            self.whole_epoch = loop.dataloader
            loop.dataloader = rest_of_epoch(runner, loop.dataloader, self.done)
            self.done = 0

    def after_train_epoch(self, runner: Runner) -> None:
        if self.whole_epoch is not None:
            runner.train_loop.dataloader = self.whole_epoch
            self.whole_epoch = None


# What differs


def changed_settings(
    cfg: Config, checkpoint: dict, path: Union[str, Path]
) -> dict[str, tuple[Any, Any]]:
    """The settings of a training that differ from those in a checkpoint at `path`: by their paths
    as in --cfg-options, the checkpoint's and the config's value, None where there is none.

    Raises:
        UserError: the checkpoint has no config, or one that is not readable.
    """
    before = settings_in_checkpoint(checkpoint, path)
    changed: dict[str, tuple[Any, Any]] = {}
    names = dict.fromkeys([*before, *cfg])
    for name in sorted(names, key=lambda name: name not in SETTINGS):
        old = dict(settings_in(before.get(name), name))
        new = dict(settings_in(cfg.get(name), name))
        for key in {**old, **new}:
            change = old.get(key), new.get(key)
            if change[0] == change[1] or is_within(key, UNCOMPARED):
                continue
            # Variables of a config file come last: the settings that they are used in are said.
            if name in SETTINGS or change not in changed.values():
                changed[key] = change
    return changed


def is_within(path: str, names: Sequence[str]) -> bool:
    """Whether the path of a setting is one of some names, or within a part of one."""
    return any(f'{path}.'.startswith(f'{name}.') for name in names)


def settings_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values in a part of a config, with their paths as in --cfg-options. Lists of plain values
    are one value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from settings_in(inner, f'{path}.{key}')
    elif isinstance(value, (list, tuple)) and any(isinstance(x, dict) for x in value):
        for index, inner in enumerate(value):
            yield from settings_in(inner, f'{path}.{index}')
    elif isinstance(value, type):  # as mmengine writes it
        yield path, f'{value.__module__}.{value.__name__}'
    elif isinstance(value, tuple):
        yield path, list(value)
    elif value is not None:
        yield path, value


def check_fixed(changed: dict[str, Any], path: Union[str, Path]) -> None:
    """Check that a config changes none of the settings with which a checkpoint goes on.

    Raises:
        UserError: it does.
    """
    names = [name for name in map(fixed_setting, changed) if name]
    if names:
        refuse(path, f'the config has another {", ".join(dict.fromkeys(names))}')


def fixed_setting(path: str) -> str:
    """The setting that cannot be changed to which a path belongs; '' if it can."""
    last = path.split('.')[-1]
    if is_within(path, ('default_hooks', 'custom_hooks')) and last in FIXED_IN_HOOKS:
        return path
    if last in MOVED:
        return ''
    return next((name for name in FIXED if is_within(path, [name])), '')


def refuse(path: Union[str, Path], problem: str) -> NoReturn:
    raise UserError(
        f'{path} cannot be resumed exactly: {problem}. Resume with the settings of the checkpoint, '
        'or start another training from its weights, in another --work-dir: '
        f'--cfg-options load_from={path}'
    )


def check_state(runner: Runner, checkpoint: dict, state: dict) -> None:
    """Check what the settings do not tell.

    Raises:
        UserError: the training has other epochs, processes or averaged weights than the checkpoint.
    """
    path = runner.cfg.load_from
    length = epoch_iterations(runner)
    before = state.get('epoch_length', length)
    if length is not None and before != length:
        refuse(path, f'an epoch has {amount(length, "iteration")} now, and had {before}')
    processes = state.get('processes', get_world_size())
    if processes != get_world_size():
        own = amount(get_world_size(), 'process', 'processes')
        refuse(path, f'{own} instead of {processes}')
    averages = any(isinstance(hook, EMAHook) for hook in runner.hooks)
    if averages != ('ema_state_dict' in checkpoint):
        refuse(path, f'the EMAHook of the config is {"new" if averages else "missing"}')


def digests_of_annotations(cfg: Config) -> dict[str, str]:
    """The SHA-256 of the file with the annotations, or with a list of the images, of each data set
    that has one, by the path of its settings."""
    found = {}
    for split in ('train', 'val'):
        for path, dataset in data_paths(cfg, split):
            file = annotation_file(dataset)
            if file.is_file():
                found[path] = digest_of(file)
    return found


# What is restored


def epoch_iterations(runner: Runner) -> Optional[int]:
    """Iterations of an epoch; None in a training that counts iterations."""
    loop = runner.train_loop
    return loop.max_iters // loop.max_epochs if isinstance(loop, EpochBasedTrainLoop) else None


def restore_position(runner: Runner, checkpoint: dict, state: dict) -> int:
    """Set the epoch with which the training continues; returns how many of its batches are
    trained. A checkpoint by mmengine alone begins at an epoch."""
    length = epoch_iterations(runner)
    if length is None or not state:
        return 0
    if state['done'] < length:
        return state['done']
    checkpoint['meta']['epoch'] += 1
    return 0


def restore_names(runner: Runner, hook: CheckpointHook) -> None:
    """Let a hook know the checkpoints that it has written, in its own folder.

    mmengine forgets the last one. And it keeps the path of the best one, which it deletes when the
    next one is better: in a copied work dir, or in one that resumes a checkpoint of another, that
    would be a file of the other training.
    """
    names = runner.message_hub.runtime_info
    for key in list(names):
        if key == 'last_ckpt' or key.startswith('best_ckpt'):
            names[key] = hook.file_backend.join_path(hook.out_dir, Path(names[key]).name)
        if key.startswith('best_ckpt') and not hook.file_backend.exists(names[key]):
            del names[key]
    hook.last_ckpt = names.get('last_ckpt')
    hook.best_ckpt_path = names.get('best_ckpt')
    for indicator in getattr(hook, 'best_ckpt_path_dict', None) or ():
        hook.best_ckpt_path_dict[indicator] = names.get(f'best_ckpt_{indicator}')


def early_stopping(runner: Runner) -> list[EarlyStoppingHook]:
    return [hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook)]


# The rest of an epoch


class RestOfBatches:
    """A batch sampler: the batches of another one without the first ones."""

    def __init__(self, batches: Any, done: int, before_first: Callable[[], None]) -> None:
        self.batches = batches
        self.done = done
        self.before_first = before_first

    def __len__(self) -> int:
        return len(self.batches) - self.done

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batches)
        for _ in range(self.done):
            next(batches)
        self.before_first()
        yield from batches


def rest_of_epoch(runner: Runner, loader: DataLoader, done: int) -> DataLoader:
    """A loader of the batches of an epoch without the first ones, which it does not load."""

    def seed() -> None:
        for hook in runner.hooks:
            if isinstance(hook, IterationSeedHook):
                hook.seed_loading(runner, runner.iter)

    options = {}
    if loader.num_workers:
        options = {
            'prefetch_factor': loader.prefetch_factor,
            'multiprocessing_context': loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset,
        batch_sampler=RestOfBatches(loader.batch_sampler, done, seed),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **options,
    )
