"""A training that resumes at a checkpoint is the one that its config describes.

mmengine restores weights, optimizer and schedules from the checkpoint, whatever the config says.
Here this is compared with the config, in one place: what is restored and cannot be changed is an
error, what follows the config is said.
"""

import bisect
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import torch
from mmengine.config import Config
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import nn
from torch.utils.data import DataLoader

from ...checkpoints.reading import listed
from ..config.load import SETTINGS, settings_in_checkpoint
from ..config.schedules import schedule_problems
from ..tooling.command import UserError
from ..tooling.files import keep_former
from ..tooling.report import amount
from .seeds import IterationSeedHook

# Settings that a checkpoint replaces when a training resumes: mmengine restores the optimizer with
# its learning rates.
RESTORED = (
    'optim_wrapper.optimizer',
    'optim_wrapper.paramwise_cfg',
    'optim_wrapper.constructor',
    'param_scheduler',
    'auto_scale_lr.enable',
)
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
    'tta_model',
    'tta_pipeline',
    'vis_backends',
    'visualizer',
    'work_dir',
)
# Settings by which a model is evaluated: with others, scores cannot be compared.
SCORED_BY = 'data_preprocessor', 'model', 'val_cfg', 'val_dataloader', 'val_evaluator'
LOADING = 'num_workers', 'persistent_workers', 'pin_memory', 'prefetch_factor'  # changes no score
STATE = 'cpvt_pyramid'  # in a checkpoint: what the ResumeHook keeps there
EVALUATED = 'evaluated_iter'  # in the message hub: the iteration of the last evaluation
# Entries of the state of a schedule that change while it runs.
PROGRESS = {'last_step', '_global_step', '_last_value', 'verbose'}


@HOOKS.register_module()
class ResumeHook(Hook):
    """Lets a training that is stopped or killed, and resumes, end as one that was not.

    - An interrupted epoch continues with its next batch.
    - An evaluation that was interrupted, or was due after the checkpoint, is made first.
    - Schedules are those of the config, at the iteration at which the training is: with another
      batch size, number of processes or length they differ from those of the checkpoint.
    - The best checkpoint is the best one by the score of the config: if the scores before were by
      another metric, rule, model or other validation data, the best one is chosen again, and the
      file of the one before stays, as `former_best_...`.
    - EarlyStoppingHooks go on counting, if the scores are the same. Sums of gradients
      (`accumulative_counts`) continue, in a training of one process.
    - Without the EMAHook that the checkpoint was trained with, the trained weights are resumed, and
      not the averaged ones.

    What differs from the checkpoint's training is logged in one line each.

    Examples:
        >>> default_hooks = dict(resume=dict(type='ResumeHook'))
    """

    priority = 'LOWEST'  # an evaluation needs what other hooks do before the training

    def __init__(self) -> None:
        self.whole_epoch: Optional[DataLoader] = None
        self.done = 0  # batches of the epoch with which the training continues
        self.epoch = 0  # that is trained, and the iteration with which it began
        self.first = 0
        self.former_best: list[str] = []  # best checkpoints by another score

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if 'optimizer' not in checkpoint:  # nothing resumes at it
            return
        meta = checkpoint['meta']
        checkpoint[STATE] = {
            'epoch_length': epoch_iterations(runner),
            'done': meta['iter'] - self.first if meta['epoch'] == self.epoch else 0,
            'processes': get_world_size(),
            'early_stopping': {
                hook.monitor: {
                    'rule': hook.rule,
                    'wait_count': hook.wait_count,
                    'best_score': float(hook.best_score),
                }
                for hook in early_stopping(runner)
            },
            'gradients': summed_gradients(runner),
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
        check_restored(changed, 'the checkpoint')
        used = [f'{path} {new!r} instead of {old!r}' for path, (old, new) in changed.items()]
        if state.get('processes', get_world_size()) != get_world_size():
            processes = amount(get_world_size(), 'process', 'processes')
            used.append(f'{processes} instead of {state["processes"]}')
        if used:
            say(f'this training differs from that of the checkpoint: {listed(used)}')
        saved_at = checkpoint['meta']['iter']
        self.done = restore_position(runner, checkpoint, state, say)
        restore_trained_weights(runner, checkpoint, say)
        restore_schedules(runner, checkpoint, say)
        same_sum = 'optim_wrapper.accumulative_counts' not in changed
        if same_sum and checkpoint['meta']['iter'] == saved_at:
            restore_gradients(runner, checkpoint, state, say)
        is_same_score = not any(map(changes_scores, changed))
        if not is_same_score or any(map(chooses_best, changed)):
            self.former_best = forget_best(checkpoint)
        if not is_same_score:
            forget_scores(checkpoint)
        restore_early_stopping(runner, state.get('early_stopping', {}), is_same_score, say)

    def before_train(self, runner: Runner) -> None:
        """Say what is odd about the schedules, and make the evaluation that is due after the
        checkpoint.

        mmengine writes a checkpoint before it evaluates the model. A training that ends in between
        would lose the result, and maybe the best model.
        """
        for problem in schedule_problems(runner.cfg, epoch_iterations(runner)):
            runner.logger.warning(problem)
        if runner.iter == 0:
            return
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook):
                keep_former_best(runner, hook, self.former_best)
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


def changes_scores(path: str) -> bool:
    """Whether a setting changes the score that a model gets."""
    return is_within(path, SCORED_BY) and path.split('.')[-1] not in LOADING


def chooses_best(path: str) -> bool:
    """Whether a setting is the score, or its rule, by which a hook chooses the best checkpoint."""
    is_of_hook = is_within(path, ('default_hooks', 'custom_hooks'))
    return is_of_hook and path.split('.')[-1] in ('save_best', 'rule')


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


def check_restored(changed: dict[str, Any], path: Union[str, Path]) -> None:
    """Check that a config does not change what a checkpoint restores: it would have no effect.

    Raises:
        UserError: it does.
    """
    refused = [name for name in RESTORED if any(is_within(key, [name]) for key in changed)]
    if refused:
        raise UserError(
            f'{path} restores its own {", ".join(refused)}, and the config has another. '
            'Resume with the settings of the checkpoint, or start another training from its '
            f'weights, in another --work-dir: --cfg-options load_from={path}'
        )


# What is restored


def epoch_iterations(runner: Runner) -> Optional[int]:
    """Iterations of an epoch; None in a training that counts iterations."""
    loop = runner.train_loop
    return loop.max_iters // loop.max_epochs if isinstance(loop, EpochBasedTrainLoop) else None


def restore_position(
    runner: Runner, checkpoint: dict, state: dict, say: Callable[[str], None]
) -> int:
    """Set epoch and iteration of a checkpoint, for epochs of the length that they have now; returns
    how many batches of the epoch are trained."""
    meta = checkpoint['meta']
    length = epoch_iterations(runner)
    if length is None:
        return 0
    saved_at = meta['iter']
    if state.get('epoch_length'):
        before = state['epoch_length']
        done = state['done']
        if done >= before:
            meta['epoch'] += 1
            done = 0
    else:  # by mmengine alone, which begins at an epoch
        before = saved_at / meta['epoch'] if meta['epoch'] else length
        done = 0
        meta['iter'] = meta['epoch'] * length
    if before == length:
        return done
    done = int(done * length // before)
    meta['iter'] = meta['epoch'] * length + done
    within = f' within epoch {meta["epoch"] + 1}' if done else ''
    say(
        f'an epoch has {amount(length, "iteration")} now, and had {before:g}: the training '
        f'continues{within} after iteration {meta["iter"]}, where the checkpoint says {saved_at}'
    )
    hub = checkpoint['message_hub']['runtime_info']
    if hub.get(EVALUATED) == saved_at:
        hub[EVALUATED] = meta['iter']
    return done


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


def forget_best(checkpoint: dict) -> list[str]:
    """Let the best checkpoint be chosen again, because the one so far was by another score; returns
    the names of the files of the one so far."""
    hub = checkpoint['message_hub']['runtime_info']
    if not any(key.startswith('best_score') for key in hub):
        return []  # no evaluation had a score
    names = {Path(path).name for key, path in hub.items() if key.startswith('best_ckpt')}
    for key in [key for key in hub if key.startswith(('best_score', 'best_ckpt'))]:
        del hub[key]
    return sorted(names)


def keep_former_best(runner: Runner, hook: CheckpointHook, names: Sequence[str]) -> None:
    """Give files that were the best ones by another score a name of their own, so that no other
    best one takes their place."""
    for name in names:
        kept = keep_former(Path(hook.out_dir, name)) if is_main_process() else None
        if kept is not None:
            runner.logger.warning(
                f'the best checkpoint is chosen again, because {name} was by another score: it is '
                f'{kept} now'
            )


def forget_scores(checkpoint: dict) -> None:
    """Let the model of a checkpoint be evaluated again, if that is due, because it was evaluated in
    another way; schedules that wait for a better score begin with this one."""
    checkpoint['message_hub']['runtime_info'].pop(EVALUATED, None)
    schedules = checkpoint.get('param_schedulers')
    for schedule in schedules if isinstance(schedules, list) else ():
        if 'num_bad_epochs' in schedule:
            schedule.update(best=schedule['rule_worse'], num_bad_epochs=0)


def restore_early_stopping(
    runner: Runner, states: dict[str, dict], is_same_score: bool, say: Callable[[str], None]
) -> None:
    """Let EarlyStoppingHooks go on counting, or say that they begin to count."""
    for hook in early_stopping(runner):
        state = states.get(hook.monitor)
        if state is not None and is_same_score and state['rule'] == hook.rule:
            hook.wait_count = state['wait_count']
            hook.best_score = state['best_score']
        elif states:
            say(f'early stopping begins to count: {hook.monitor} was not its score before')


def restore_trained_weights(runner: Runner, checkpoint: dict, say: Callable[[str], None]) -> None:
    """Take the trained weights if the averaged ones are not used: an EMAHook has written these as
    `state_dict`, which exchanges them again when it resumes."""
    averaged = checkpoint.get('ema_state_dict')
    if not averaged or any(isinstance(hook, EMAHook) for hook in runner.hooks):
        return
    trained = {
        name.removeprefix('module.'): value
        for name, value in averaged.items()
        if name.startswith('module.')
    }
    checkpoint['state_dict'].update(trained)
    say(
        'the config has no EMAHook: the training continues with the trained weights of the '
        'checkpoint, without their average'
    )


def restore_schedules(runner: Runner, checkpoint: dict, say: Callable[[str], None]) -> None:
    """Let the schedules be those of the config, at the iteration at which the training continues,
    if those of the checkpoint are others or at another one."""
    schedules = runner.param_schedulers
    saved = checkpoint.get('param_schedulers')
    if not isinstance(schedules, list) or not isinstance(saved, list):
        return  # several optimizers, each with its own; or none
    meta = checkpoint['meta']
    differences = []
    for schedule, old in zip(schedules, saved):
        name = type(schedule).__name__
        new = schedule.state_dict()
        differences += [
            f'{name}.{key} {brief(new[key])} instead of {brief(old[key])}'
            for key in new.keys() & old.keys() - PROGRESS
            if new[key] != old[key]
        ]
        place = meta['epoch'] if schedule.by_epoch else meta['iter']
        if old['_global_step'] != place and not getattr(schedule, 'need_val_args', False):
            differences.append(f'{name} at {place} instead of {old["_global_step"]}')
    if len(schedules) != len(saved):
        differences.append(f'{amount(len(schedules), "schedule")} instead of {len(saved)}')
    if not differences:
        return
    if any(getattr(schedule, 'need_val_args', False) for schedule in schedules):
        say(
            'the schedules of the checkpoint are restored, which differ from those of the config: '
            f'{listed(sorted(differences))}'
        )
        return
    advance(schedules, meta['iter'], epoch_iterations(runner))
    checkpoint['param_schedulers'] = [schedule.state_dict() for schedule in schedules]
    optimizer = checkpoint['optimizer']
    groups = [*optimizer['param_groups'], optimizer.get('base_param_settings')]
    for ours, theirs in zip(runner.optim_wrapper.param_groups, groups):
        for key in ours:
            if any(is_scheduled(key, schedule.param_name) for schedule in schedules):
                theirs[key] = ours[key]
    say(
        f'the schedules differ from those of the checkpoint, {listed(sorted(differences))}: they '
        f'continue as those of the config do after iteration {meta["iter"]}'
    )


def brief(value: Any) -> Any:
    """A value for a message; the first one of a list with one for each group of parameters."""
    return brief(value[0]) if isinstance(value, list) and value else value


def advance(schedules: list, iterations: int, length: Optional[int]) -> None:
    """Step new schedules as a training does.

    Args:
        schedules: of mmengine.
        iterations: how many.
        length: iterations of an epoch, None if epochs are not counted.
    """
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # the optimizer should step, too
        for iteration in range(1, iterations + 1):
            ends = bool(length and iteration % length == 0)
            for schedule in schedules:
                if not schedule.by_epoch:
                    schedule.step()
            for schedule in schedules:
                if schedule.by_epoch and ends:
                    schedule.step()


def is_scheduled(key: str, name: str) -> bool:
    """Whether a setting of a group of parameters belongs to schedules of the parameter `name`."""
    return key == name or key.endswith(f'_{name}') or (key == 'betas' and name == 'momentum')


# Sums of gradients


def is_within_sum(runner: Runner) -> bool:
    """Whether gradients are summed that have not changed the weights (`accumulative_counts`)."""
    wrapper = runner.optim_wrapper
    return not isinstance(wrapper, OptimWrapperDict) and not wrapper.should_update()


def summed_gradients(runner: Runner) -> Optional[dict[str, torch.Tensor]]:
    """The gradients of a sum that is not complete, by the names of the parameters; None if it is,
    and in several processes, each of which has its own."""
    if not is_within_sum(runner) or get_world_size() > 1:
        return None
    return {
        name: parameter.grad.cpu()
        for name, parameter in bare_model(runner).named_parameters()
        if parameter.grad is not None
    }


def restore_gradients(
    runner: Runner, checkpoint: dict, state: dict, say: Callable[[str], None]
) -> None:
    """Continue a sum of gradients that was not complete."""
    counts = runner.cfg.optim_wrapper.get('accumulative_counts', 1)
    iteration = checkpoint['meta']['iter']
    if iteration % counts == 0:
        return
    gradients = state.get('gradients')
    if gradients is None or get_world_size() > 1:
        say(
            f'lost gradients: those of the last {amount(iteration % counts, "iteration")}, which '
            f'are part of a sum of {counts} (accumulative_counts)'
        )
        return
    for name, parameter in bare_model(runner).named_parameters():
        if name in gradients:
            parameter.grad = gradients[name].to(parameter)


def bare_model(runner: Runner) -> nn.Module:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


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
