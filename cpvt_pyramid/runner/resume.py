"""What lets a training that was killed at any moment go on to the same result.

Two things stand in the way in mmengine. Checkpoints are written in place, after older ones are
deleted, so a kill leaves a torn file or none. And the state of the random generators is in no
checkpoint, nor could it be: each data worker has its own, some batches ahead of the training.

Here a file appears under its name only when it is whole, and nothing random depends on what came
before: each sample's augmentations are drawn from a seed of its own, and so is each iteration of
the model (drop path, dropout). What remains is the state that mmengine does save.
"""

import itertools
import os
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dist import get_dist_info
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import DATA_SAMPLERS, DATASETS, HOOKS
from mmengine.runner import Runner
from torch.utils.data import Dataset, Sampler

SAMPLE, ITERATION = 0, 1  # what a seed is for, so that no two of them coincide


def make_resumable(cfg: Config) -> None:
    """Put what this file holds into a training config; doing it again changes nothing."""
    hooks = cfg.get('default_hooks') or {}
    checkpoint = hooks.get('checkpoint') or {'type': 'CheckpointHook', 'interval': 1}
    if checkpoint['type'] == 'CheckpointHook':
        cfg.default_hooks = {**hooks, 'checkpoint': {**checkpoint, 'type': 'WholeCheckpointHook'}}
    loader = cfg.train_dataloader
    if loader.sampler.type != 'SeededSampler':
        cfg.custom_hooks = [*(cfg.get('custom_hooks') or []), {'type': 'SeedHook'}]
        loader.sampler = {'type': 'SeededSampler', 'sampler': loader.sampler}
        loader.dataset = {'type': 'SeededDataset', 'dataset': loader.dataset}


# Checkpoints


@contextmanager
def appearing_whole(path: Union[str, Path]) -> Iterator[Path]:
    """A hidden path beside `path` to write to; it takes the name `path` when all went well.

    However the writing ends, `path` holds what it held before or the whole of the new file.
    """
    path = Path(path)
    partial = path.with_name(f'.{path.name}.partial')
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@register_backend('atomic')
class AtomicBackend(LocalBackend):
    """mmengine's local files, where a file that is being written does not have its name yet."""

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with appearing_whole(filepath) as partial:
            partial.write_bytes(obj)


@HOOKS.register_module()
class WholeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, never without a whole checkpoint once it has saved one.

    Args:
        **options: as of `CheckpointHook`. With an `out_dir` that is no local folder, files are
            as whole as its backend makes them.
    """

    def __init__(self, **options: Any) -> None:
        if '://' not in str(options.get('out_dir')):
            options.setdefault('backend_args', {'backend': 'atomic'})
        super().__init__(**options)

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        with removing_afterwards(self.file_backend):
            super()._save_checkpoint_with_step(runner, step, meta)

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        with removing_afterwards(self.file_backend):
            super()._save_best_checkpoint(runner, metrics)


@contextmanager
def removing_afterwards(backend: LocalBackend) -> Iterator[None]:
    """Files that are removed meanwhile go at the end, once what replaces them is in place."""
    remove, held = backend.remove, []
    backend.remove = held.append
    try:
        yield
    finally:
        backend.remove = remove
    for path in held:
        remove(path)


def read_training(path: Union[str, Path]) -> Optional[dict]:
    """The checkpoint of a training at `path`, or None if that is something else or torn."""
    try:
        checkpoint = torch.load(path, map_location='cpu', mmap=True, weights_only=False)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError):
        return None
    is_training = isinstance(checkpoint, dict) and {'meta', 'optimizer'} <= checkpoint.keys()
    return checkpoint if is_training else None


def last_checkpoint(folder: Path) -> Optional[Path]:
    """The whole checkpoint that a training wrote last into `folder`, if there is one.

    mmengine's own note of it, the file `last_checkpoint`, may be torn itself or be behind.
    """
    written = {}
    for path in folder.glob('*.pth'):
        checkpoint = read_training(path)
        if checkpoint:
            written[checkpoint['meta']['time'], checkpoint['meta']['iter']] = path
    return written[max(written)] if written else None


# Randomness


def seed_generators(*numbers: int) -> None:
    """Set all global random generators to a state that depends on these numbers alone."""
    seeds = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(seeds[1])
    torch.manual_seed(int(seeds[2]))


class SeededIndex(int):
    """The index of a sample, with the numbers that its augmentations are seeded with."""

    def __new__(cls, index: int, numbers: tuple[int, ...]) -> 'SeededIndex':
        self = super().__new__(cls, index)
        self.numbers = numbers
        return self

    def __reduce__(self) -> tuple:  # indices travel to the data workers
        return SeededIndex, (int(self), self.numbers)


@DATA_SAMPLERS.register_module()
class SeededSampler(Sampler):
    """Another sampler, with a seed for each index: of the run, the epoch and its position.

    The position counts through the batches of all processes, so the augmentations of a sample do
    not depend on how many processes or data workers there are.

    Args:
        dataset: what to sample.
        sampler: config of the other sampler.
        seed: seed of the run; None lets the other sampler find one.
    """

    def __init__(self, dataset: Dataset, sampler: dict, seed: Optional[int] = None) -> None:
        self.dataset = dataset
        self.sampler = DATA_SAMPLERS.build(sampler, default_args={'dataset': dataset, 'seed': seed})
        self.seed = self.sampler.seed if seed is None else seed
        self.epoch = 0
        self.start = 0
        # mmengine looks for `skip`, which endless samplers have, when an iteration-based training
        # goes on. The others are run through from their first index.
        if hasattr(self.sampler, 'skip'):
            self.skip = self._skip

    def __iter__(self) -> Iterator[SeededIndex]:
        rank, world_size = get_dist_info()
        indices = itertools.islice(self.sampler, self.start, None)
        for position, index in enumerate(indices, self.start):
            numbers = (SAMPLE, self.seed, self.epoch, position * world_size + rank)
            yield SeededIndex(index, numbers)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.sampler.set_epoch(epoch)

    def _skip(self, samples: int) -> None:
        self.start = samples


@DATASETS.register_module()
class SeededDataset(Dataset):
    """Another data set, whose augmentations obey the seed of a `SeededIndex`.

    All else is passed on, so that hooks and samplers meet the data set they know.

    Args:
        dataset: config of the other data set.
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
        if name == 'dataset':  # while unpickling, in a worker that was spawned
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)


@HOOKS.register_module()
class SeedHook(Hook):
    """Seeds each iteration of the model from the run's seed, the process and the iteration."""

    priority = 'VERY_HIGH'

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Optional[dict] = None
    ) -> None:
        seed_generators(ITERATION, runner.seed, runner.rank, runner.iter)
