"""A training that was stopped at any moment resumes to the same result, bit for bit.

mmengine alone does not guarantee this:

- It writes checkpoints in place and deletes older ones first, so that a kill can leave a truncated
  checkpoint or none. Here they are written atomically.
- Checkpoints do not hold the state of the random generators; they cannot, since each data worker
  has its own, several batches ahead. Here no random number depends on earlier ones: the
  augmentations of each sample, and each iteration of the model (drop path, dropout), have their own
  seeds.
- An epoch-based training that resumes in mid-epoch starts the epoch again. Here it goes on with the
  next batch.
- A checkpoint is written before the model is evaluated, and a resumed training does not evaluate
  it: the best model can be missed. Here an evaluation that is missing is made up for first.
- Gradients that are accumulated over iterations, and what an EarlyStoppingHook has counted, are not
  in checkpoints. Here they are.

Everything else is in mmengine's checkpoints.
"""

import copy
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dist import get_dist_info, is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import DATA_SAMPLERS, DATASETS, HOOKS, LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch.utils.data import DataLoader, Dataset, Sampler

from ...config.parts import items_of, kind_of
from ...config.plan import PRESENT, Change, append, remove, set_value, wrap
from ...tooling.command import UserError
from ...tooling.files import atomic_write

SAMPLE, ITERATION = 0, 1  # first numbers of the two kinds of seeds, so that they never coincide
# The metric by which a model is the best one: the first of this name.
MAIN_METRIC = re.compile(r'(.*/|.*_)?(mAP|PQ|mIoU|mDice|mFscore)')
EVALUATED = 'evaluated_iter'  # in the message hub: the iteration of the last evaluation
PREEMPTED = 'preempted.pth'  # a checkpoint that preemption.py writes in the work dir
# The hooks of every training, and what for.
TRAINING_HOOKS = {
    'SeedHook': 'seeds each iteration, so that a resumed training is the same',
    'FirstLossHook': 'ends a training whose first loss is not finite',
    'PreemptionHook': 'writes a checkpoint on SIGTERM and SIGUSR1',
    'ResumeHook': 'resumes where the training stopped',
}


def plan_resuming(cfg: Config) -> list[Change]:
    """The classes of this file and the hooks of this folder, for a training config that does not
    have them."""
    return [*plan_checkpoints(cfg), *plan_loop(cfg), *plan_hooks(cfg), *plan_seeds(cfg)]


def plan_checkpoints(cfg: Config) -> list[Change]:
    checkpoint = (cfg.get('default_hooks') or {}).get('checkpoint')
    reason = 'writes checkpoints atomically, and keeps the best one'
    if not checkpoint:
        hook = {'type': 'WholeCheckpointHook', 'interval': 1}
        return [set_value('default_hooks.checkpoint', hook, reason)]
    if kind_of(checkpoint) == 'CheckpointHook':
        return [set_value('default_hooks.checkpoint.type', 'WholeCheckpointHook', reason)]
    return []


def plan_loop(cfg: Config) -> list[Change]:
    if not counts_epochs(cfg.train_cfg):
        return []
    changes = [set_value('train_cfg.type', 'MidEpochTrainLoop', 'can resume in mid-epoch')]
    if 'by_epoch' in cfg.train_cfg:
        changes.append(remove('train_cfg.by_epoch', 'the type says it'))
    return changes


def counts_epochs(train_cfg: dict) -> bool:
    """Whether a loop is mmengine's for epochs."""
    kind = kind_of(train_cfg)
    return kind == 'EpochBasedTrainLoop' or (not kind and train_cfg.get('by_epoch', True))


def plan_hooks(cfg: Config) -> list[Change]:
    changes = []
    kinds = []
    for path, hook in items_of(cfg, 'custom_hooks', ''):
        kinds.append(kind_of(hook))
        if kind_of(hook) == 'EarlyStoppingHook':
            reason = 'its count is in checkpoints'
            changes.append(set_value(f'{path}.type', 'StoppingHook', reason))
    for name, reason in TRAINING_HOOKS.items():
        if name not in kinds:
            changes.append(append('custom_hooks', {'type': name}, reason))
    return changes


def plan_seeds(cfg: Config) -> list[Change]:
    if kind_of(cfg.train_dataloader.sampler) == 'SeededSampler':
        return []
    sampler = {'type': 'SeededSampler', 'sampler': PRESENT}
    dataset = {'type': 'SeededDataset', 'dataset': PRESENT}
    reason = 'augmentations do not depend on processes, workers and resuming'
    return [
        wrap('train_dataloader.sampler', sampler, 'gives each sample a seed'),
        wrap('train_dataloader.dataset', dataset, reason),
    ]


# Checkpoints


@register_backend('atomic')
class AtomicBackend(LocalBackend):
    """mmengine's local files, written atomically."""

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(filepath) as partial:
            partial.write_bytes(obj)


@HOOKS.register_module()
class WholeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, which always leaves at least one complete checkpoint, and keeps
    the best one by default.

    A checkpoint of an iteration after which the model is evaluated is written again afterwards, so
    that it holds the result.

    Args:
        save_best: as CheckpointHook's; 'auto' is the first metric that is named mAP, PQ, mIoU,
            mDice or mFscore.
        **options: see `CheckpointHook`. With a remote `out_dir`, writing is only as atomic as its
            backend.
    """

    def __init__(self, save_best: Union[str, list[str], None] = 'auto', **options: Any) -> None:
        if '://' not in str(options.get('out_dir')):
            options.setdefault('backend_args', {'backend': 'atomic'})
        options.setdefault('greater_keys', [*self._default_greater_keys, 'PQ', 'mFscore'])
        super().__init__(save_best=save_best, **options)
        self.saved = None  # what the last checkpoint holds: its iteration and the evaluated one

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if runner._resume and Path(runner._load_from).name != PREEMPTED:
            evaluated = checkpoint['message_hub']['runtime_info'].get(EVALUATED)
            self.saved = checkpoint['meta']['iter'], evaluated

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        if getattr(self, 'best_ckpt_path', None):  # of a folder that may have been copied since
            name = Path(self.best_ckpt_path).name
            self.best_ckpt_path = self.file_backend.join_path(self.out_dir, name)

    def after_val_epoch(self, runner: Runner, metrics: dict) -> None:
        runner.message_hub.update_info(EVALUATED, runner.iter)
        super().after_val_epoch(runner, metrics)
        has_result = self.saved == (runner.iter, runner.iter)
        if self.saved is None or has_result:
            return
        if self.saved[0] == runner.iter or runner.train_loop.stop_training:
            step = runner.epoch if self.by_epoch else runner.iter
            meta = {'epoch': runner.epoch, 'iter': runner.iter}
            self._save_checkpoint_with_step(runner, step, meta)

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        with removing_afterwards(self.file_backend):
            super()._save_checkpoint_with_step(runner, step, meta)
        self.saved = meta['iter'], runner.message_hub.runtime_info.get(EVALUATED)
        if is_main_process():  # this one is later
            Path(runner.work_dir, PREEMPTED).unlink(missing_ok=True)

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        if self.save_best and self.key_indicators == ['auto']:
            main = main_metric(metrics)
            if main is None:
                names = ', '.join(metrics)
                runner.logger.info(f'no best checkpoint: set save_best to one of {names}')
                return
            self._init_rule(self.rules, [main])
        with removing_afterwards(self.file_backend):
            super()._save_best_checkpoint(runner, metrics)


def main_metric(metrics: Iterable[str]) -> Optional[str]:
    """The name of the metric by which models are compared, if one of an evaluation's has it."""
    for name in metrics:
        if MAIN_METRIC.fullmatch(name):
            return name
    return None


@contextmanager
def removing_afterwards(backend: LocalBackend) -> Iterator[None]:
    """Inside this context the backend removes files only at the end, once new ones are written."""
    held: list[Any] = []
    remove = backend.remove
    backend.remove = held.append
    try:
        yield
    finally:
        backend.remove = remove
    for path in held:
        remove(path)


@HOOKS.register_module()
class StoppingHook(EarlyStoppingHook):
    """mmengine's EarlyStoppingHook, whose count is in checkpoints.

    Args:
        monitor: name of a metric; None takes the one by which checkpoints are the best, see
            `main_metric`.
        **options: see `EarlyStoppingHook`.
    """

    priority = 'LOW'  # before a checkpoint is written

    def __init__(self, monitor: Optional[str] = None, **options: Any) -> None:
        super().__init__(monitor or 'mAP', **options)
        self.follows_main = monitor is None

    def before_train(self, runner: Runner) -> None:
        if state := runner.message_hub.runtime_info.get('StoppingHook'):
            self.wait_count, self.best_score, runner.train_loop.stop_training = state

    def after_val_epoch(self, runner: Runner, metrics: dict) -> None:
        if self.follows_main:
            self.monitor = main_metric(metrics) or self.monitor
        super().after_val_epoch(runner, metrics)
        state = self.wait_count, self.best_score, runner.train_loop.stop_training
        runner.message_hub.update_info('StoppingHook', state)


# Position


@LOOPS.register_module()
class MidEpochTrainLoop(EpochBasedTrainLoop):
    """mmengine's EpochBasedTrainLoop, which can resume in mid-epoch.

    Attributes:
        batches_done: batches of the current epoch that were trained before the training resumed.
    """

    batches_done = 0

    def run_epoch(self) -> None:
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        start = self.batches_done
        self.batches_done = 0
        loader = self.dataloader
        if start:
            loader = loader_of(loader, list(loader.batch_sampler)[start:])
        for i, batch in enumerate(loader, start):
            self.run_iter(i, batch)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1


def loader_of(loader: DataLoader, batches: Sequence[list[int]]) -> DataLoader:
    """A copy of a data loader, for these batches of indices."""
    loader = copy.copy(loader)
    vars(loader).update(batch_sampler=batches, _iterator=None)  # a DataLoader refuses to set it
    return loader


@HOOKS.register_module()
class ResumeHook(Hook):
    """Lets a training resume where it stopped, see the top of this file."""

    priority = 'LOWEST'  # what it does at the start of a training needs the other hooks

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        checkpoint['meta'] |= runner_counts(runner)
        updated = all(wrapper.should_update() for wrapper in optimizers(runner))
        if not updated and runner.world_size == 1:  # each process has its own, which are lost
            checkpoint['gradients'] = [p.grad for p in runner.model.parameters()]

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        meta = checkpoint.get('meta', {})
        if not runner._resume or 'processes' not in meta:
            return
        before = described_counts(meta)
        now = described_counts(runner_counts(runner))
        loop = runner.train_loop
        done = 0  # batches of the current epoch
        if isinstance(loop, EpochBasedTrainLoop):
            done = meta['iter'] - meta['epoch'] * meta['batches_per_epoch']
        if now != before:
            if done or 'gradients' in checkpoint:
                raise UserError(
                    f'the checkpoint was written in mid-epoch with {before}; now {now}. Resume '
                    f'with the same, or from a checkpoint at the end of an epoch'
                )
            runner.logger.warning(f'trained so far with {before}; now {now}: results will differ')
        loop.batches_done = done
        for parameter, gradient in zip(runner.model.parameters(), checkpoint.get('gradients', ())):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def before_train(self, runner: Runner) -> None:
        """Evaluate the model if the training stopped before an evaluation or in it."""
        loop = runner.train_loop
        if isinstance(loop, EpochBasedTrainLoop):
            step = loop.epoch
            last = loop.max_epochs
        elif isinstance(loop, IterBasedTrainLoop):
            step = loop.iter
            last = loop.max_iters
        else:
            return
        is_evaluated = runner.message_hub.runtime_info.get(EVALUATED) == loop.iter
        is_in_mid_epoch = getattr(loop, 'batches_done', 0) > 0
        if is_evaluated or is_in_mid_epoch or runner.val_loop is None:
            return
        if step < max(loop.val_begin, 1):
            return
        loop._decide_current_val_interval()
        if step % loop.val_interval == 0 or step == last:
            runner.logger.info('evaluating the model of the checkpoint first')
            runner.val_loop.run()


def runner_counts(runner: Runner) -> dict[str, Optional[int]]:
    return {
        'processes': runner.world_size,
        'batch_size': batch_size_of(runner),
        'batches_per_epoch': len(runner.train_dataloader),
    }


def described_counts(counts: dict[str, Any]) -> str:
    return (
        f'processes: {counts["processes"]}, images of each: {counts["batch_size"]}, batches per '
        f'epoch: {counts["batches_per_epoch"]}'
    )


def batch_size_of(runner: Runner) -> Optional[int]:
    """The number of images of a process in a training iteration."""
    return getattr(runner.train_dataloader.batch_sampler, 'batch_size', None)


def optimizers(runner: Runner) -> list[OptimWrapper]:
    wrapper = runner.optim_wrapper
    return list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]


# Randomness


def seed_generators(*numbers: int) -> None:
    """Seed all global random generators with these numbers."""
    seeds = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(seeds[1])
    torch.manual_seed(int(seeds[2]))


class SeededIndex(int):
    """The index of a sample, with the seed of its augmentations."""

    numbers: tuple[int, ...]


@DATA_SAMPLERS.register_module()
class SeededSampler(Sampler):
    """Builds a sampler and adds to each index a seed from the run, the epoch and the position.

    Positions count through the batches of all processes, so that augmentations do not depend on
    the number of processes or data workers. Without a seed of the run it is that of the sampler.
    """

    def __init__(self, dataset: Dataset, sampler: dict, seed: Optional[int] = None) -> None:
        self.dataset = dataset
        self.sampler = DATA_SAMPLERS.build(sampler, default_args={'dataset': dataset, 'seed': seed})
        self.seed = self.sampler.seed if seed is None else seed
        self.epoch = 0
        self.start = 0
        # When an iteration-based training resumes, mmengine calls `skip` if a sampler has it, as
        # infinite ones do, and iterates over the skipped indices otherwise.
        if hasattr(self.sampler, 'skip'):
            self.skip = partial(setattr, self, 'start')

    def __iter__(self) -> Iterator[SeededIndex]:
        rank, world_size = get_dist_info()
        indices = itertools.islice(self.sampler, self.start, None)
        for position, index in enumerate(indices, self.start):
            seeded = SeededIndex(index)
            seeded.numbers = SAMPLE, self.seed, self.epoch, position * world_size + rank
            yield seeded

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.sampler.set_epoch(epoch)


@DATASETS.register_module()
class SeededDataset(Dataset):
    """Builds a data set and seeds the augmentations of a sample from its `SeededIndex`.

    All other attributes are those of that data set, for hooks and samplers.
    """

    def __init__(self, dataset: dict) -> None:
        self.__dict__['dataset'] = DATASETS.build(dataset)

    def __getitem__(self, index: int) -> Any:
        if isinstance(index, SeededIndex):
            seed_generators(*index.numbers)
        return self.dataset[int(index)]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == 'dataset':  # while unpickling in a spawned worker
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)


@HOOKS.register_module()
class SeedHook(Hook):
    """Seeds each training iteration from the seed of the run, the process and the iteration."""

    priority = 'VERY_HIGH'

    def before_train_iter(self, runner: Runner, **_: Any) -> None:
        seed_generators(ITERATION, runner.seed, runner.rank, runner.iter)
