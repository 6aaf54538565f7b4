"""A training that was killed at any moment resumes to the same result, bit for bit.

mmengine alone does not guarantee this. It writes checkpoints in place and deletes older ones first,
so that a kill can leave a truncated checkpoint or none. And checkpoints do not hold the state of
the random generators; they cannot, since each data worker has its own, several batches ahead.

Here checkpoints are written atomically, and no random number depends on earlier ones: the
augmentations of each sample, and each iteration of the model (drop path, dropout), have their own
seeds. Everything else is in mmengine's checkpoints.
"""

import itertools
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

from .configs import kind_of
from .files import atomic_write

SAMPLE, ITERATION = 0, 1  # first numbers of the two kinds of seeds, so that they never coincide


def make_resumable(cfg: Config) -> None:
    """Add the classes of this file to a training config. Idempotent."""
    hooks = cfg.get('default_hooks') or {}
    checkpoint = hooks.get('checkpoint') or {'type': 'CheckpointHook', 'interval': 1}
    if kind_of(checkpoint) == 'CheckpointHook':
        cfg.default_hooks = {**hooks, 'checkpoint': {**checkpoint, 'type': 'WholeCheckpointHook'}}
    loader = cfg.train_dataloader
    if kind_of(loader.sampler) != 'SeededSampler':
        cfg.custom_hooks = [*(cfg.get('custom_hooks') or []), {'type': 'SeedHook'}]
        loader.sampler = {'type': 'SeededSampler', 'sampler': loader.sampler}
        loader.dataset = {'type': 'SeededDataset', 'dataset': loader.dataset}


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
    """mmengine's CheckpointHook, which always leaves at least one complete checkpoint.

    Args:
        **options: see `CheckpointHook`. With a remote `out_dir`, writing is only as atomic as its
            backend.
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
    """Inside this context the backend removes files only at the end, once new ones are written."""
    remove, held = backend.remove, []
    backend.remove = held.append
    try:
        yield
    finally:
        backend.remove = remove
    for path in held:
        remove(path)


def read_training(path: Union[str, Path]) -> Optional[dict]:
    """The checkpoint of a training at `path`, or None if it is something else or truncated."""
    try:
        checkpoint = torch.load(path, map_location='cpu', mmap=True, weights_only=False)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError):
        return None
    is_training = isinstance(checkpoint, dict) and {'meta', 'optimizer'} <= checkpoint.keys()
    return checkpoint if is_training else None


def last_checkpoint(folder: Path) -> Optional[Path]:
    """The last complete checkpoint of a training in `folder`, if there is one.

    mmengine's own file `last_checkpoint` may be truncated or out of date after a kill.
    """
    written = {}
    for path in folder.glob('*.pth'):
        checkpoint = read_training(path)
        if checkpoint:
            written[checkpoint['meta']['time'], checkpoint['meta']['iter']] = path
    return written[max(written)] if written else None


# Randomness


def seed_generators(*numbers: int) -> None:
    """Seed all global random generators with these numbers."""
    seeds = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(seeds[1])
    torch.manual_seed(int(seeds[2]))


class SeededIndex(int):
    """The index of a sample, with the seed of its augmentations."""

    def __new__(cls, index: int, numbers: tuple[int, ...]) -> 'SeededIndex':
        self = super().__new__(cls, index)
        self.numbers = numbers
        return self

    def __reduce__(self) -> tuple:  # pickled to the data workers
        return SeededIndex, (int(self), self.numbers)


@DATA_SAMPLERS.register_module()
class SeededSampler(Sampler):
    """Wraps a sampler; adds to each index a seed from the run, the epoch and the position.

    Positions count through the batches of all processes, so that augmentations do not depend on
    the number of processes or data workers.

    Args:
        dataset: the data set to sample.
        sampler: config of the wrapped sampler.
        seed: seed of the run; None takes that of the wrapped sampler.
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
    """Wraps a data set; seeds the augmentations of a sample from its `SeededIndex`.

    All other attributes are those of the wrapped data set, for hooks and samplers.

    Args:
        dataset: config of the wrapped data set.
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

    def before_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Optional[dict] = None
    ) -> None:
        seed_generators(ITERATION, runner.seed, runner.rank, runner.iter)
