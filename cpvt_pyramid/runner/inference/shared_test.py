"""An evaluation that several processes share: forks of one (`workers.py`), or processes that a
launcher has started (`sharing.py`), each of which writes what the metrics keep of its batches.

One process computes the metrics from what all have kept, in the order of the data set, so that they
are those of one process.
"""

import math
import pickle
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Optional

import torch
from mmengine.config import Config
from mmengine.dataset import DefaultSampler
from mmengine.device import get_device
from mmengine.evaluator.metric import _to_cpu
from mmengine.hooks import LoggerHook
from mmengine.registry import LOOPS
from mmengine.runner import TestLoop
from tqdm import tqdm

from ...tooling.command import rank
from ...tooling.files import atomic_write
from ..config.parts import data_of
from ..datasets.checks import annotation_file
from ..training.resume import loader_of
from .large_images import fingerprint, identity
from .sharing import FOLDER, MOST, PARTS, Task, finished, share
from .workers import Cores, Workers

FEWEST = 8  # images in a part
# Metrics of these packages keep what they need of an image in `results`, and nothing elsewhere.
METRICS = {'mmdet', 'mmseg', 'mmengine', 'cpvt_pyramid'}


def share_test(cfg: Config, weights: dict, *outputs: Any) -> None:
    """Set a config up for an evaluation in several processes, of which this is one. Its work dir is
    set. `outputs` are further files to write to, and options that change the results."""
    about = [
        fingerprint(cfg, weights, torch.device(get_device())),
        *(repr(cfg.get(f'test_{name}')) for name in ('dataloader', 'evaluator')),
        *(identity(annotation_file(dataset)) for dataset in data_of(cfg, 'test')),
        *map(str, outputs),
    ]
    folder = str(Path(cfg.work_dir, FOLDER))
    options = {k: v for k, v in cfg.test_cfg.items() if k == 'fp16'}
    cfg.test_cfg = {'type': 'SharedTestLoop', 'folder': folder, 'about': about, **options}
    if rank():  # the logs of processes must not overwrite each other
        cfg.work_dir, cfg.log_level = str(Path(folder, f'process{rank()}')), 'WARNING'


class DividedTestLoop(TestLoop):
    """mmengine's TestLoop, whose batches are divided among processes by `metrics`."""

    def run(self) -> dict:
        self.runner.call_hook('before_test')
        self.runner.call_hook('before_test_epoch')
        self.runner.model.eval()
        metrics = self.metrics(list(self.dataloader.batch_sampler))
        self.runner.call_hook('after_test_epoch', metrics=metrics)
        self.runner.call_hook('after_test')
        return metrics

    def results_of(self, batches: Iterable, first: int = 0) -> list[list]:
        """What the metrics keep of batches, of which the first one has this index."""
        for metric in self.evaluator.metrics:
            metric.results.clear()
        for i, batch in enumerate(batches, first):
            self.run_iter(i, batch)
        return [_to_cpu(metric.results) for metric in self.evaluator.metrics]

    def evaluate(self, parts: Iterable[list[list]]) -> dict:
        """The metrics of all images, from `results_of` parts of them in their order."""
        for metric, *results in zip(self.evaluator.metrics, *parts):
            metric.results = list(chain(*results))
        return self.evaluator.evaluate(len(self.dataloader.dataset))


@LOOPS.register_module()
class ForkedTestLoop(DividedTestLoop):
    """A TestLoop in which forked processes do the batches on a CPU, by default as many as the cores
    and the memory allow.

    One process does all where the order of the images may matter: in videos, and for metrics of
    other packages.
    """

    def __init__(self, *args: Any, processes: Optional[int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.processes = processes

    def metrics(self, batches: Sequence[list[int]]) -> dict:
        runner, loader = self.runner, self.dataloader
        homes = {type(metric).__module__.split('.')[0] for metric in self.evaluator.metrics}
        in_order = type(loader.sampler) is not DefaultSampler or not homes <= METRICS
        device = next(runner.model.parameters()).device
        cores = None if in_order else Cores.for_model(device, self.processes)

        def results_of(index: int) -> list[list]:
            batch = loader.collate_fn([loader.dataset[i] for i in batches[index]])
            return self.results_of([batch], index)

        hooks, parts = runner._hooks, []
        runner._hooks = [hook for hook in hooks if not isinstance(hook, LoggerHook)]  # in forks
        with Workers(results_of, len(batches), cores) as forks:
            runner._hooks = hooks
            if not len(forks):
                for i, batch in enumerate(loader):
                    self.run_iter(i, batch)
                return self.evaluator.evaluate(len(loader.dataset))
            with tqdm(total=len(loader.dataset), unit='image', disable=None) as bar:
                for batch, part in zip(batches, forks.map(range(len(batches)))):
                    parts.append(part)
                    bar.update(len(batch))
        return self.evaluate(parts)


@LOOPS.register_module()
class SharedTestLoop(DividedTestLoop):
    """A TestLoop whose batches are shared by the processes of a launcher, through a folder. The
    results depend on `about`, JSON values."""

    def __init__(self, *args: Any, folder: str, about: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.folder, self.about = Path(folder), about
        # Whether this process computed the metrics or, if they were known before, is the first
        self.evaluated = False

    def metrics(self, batches: Sequence[list[int]]) -> dict:
        size = batches_in_part(len(batches), len(batches[0]))
        files = {start: f'batches-{start}.pkl' for start in range(0, len(batches), size)}

        def write(start: int, name: str) -> str:
            loader = loader_of(self.dataloader, batches[start : start + size])
            with atomic_write(self.folder / name) as file:
                file.write_bytes(pickle.dumps(self.results_of(loader, start)))
            return name

        def kept(name: str) -> bool:
            return (self.folder / name).exists() or finished(self.folder, last) is not None

        def evaluate(*names: str) -> dict[str, float]:
            paths = [self.folder / name for name in names]
            metrics = self.evaluate(pickle.loads(path.read_bytes()) for path in paths)
            for path in paths:
                path.unlink()
            self.evaluated = True
            return {name: float(value) for name, value in metrics.items()}

        about = [self.about, size]
        parts = []
        for start, name in files.items():
            parts.append(Task(name, about, partial(write, start, name), kept=kept))
        last = Task('metrics', about, evaluate, list(files.values()))
        self.evaluated = rank() == 0 and finished(self.folder, last) is not None
        return share(self.folder, [*parts, last])['metrics'].outcome


def batches_in_part(batches: int, batch_size: int) -> int:
    """How many batches a process does at a time: a share of all, within limits."""
    fewest = math.ceil(FEWEST / batch_size)
    most = max(MOST, fewest)
    return min(max(batches // PARTS, fewest), most)
