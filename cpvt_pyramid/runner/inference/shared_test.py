"""An evaluation that several processes share: forks of one (`workers.py`), or processes that a
launcher has started (`sharing.py`).

Each of the latter writes what the metrics keep of its batches into files. The process that finishes
the last batch computes the metrics from all of them, in the order of the data set, so that they are
those of one process.
"""

import pickle
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from mmengine.config import Config
from mmengine.dataset import DefaultSampler
from mmengine.device import get_device
from mmengine.evaluator.metric import _to_cpu
from mmengine.hooks import IterTimerHook, LoggerHook
from mmengine.registry import LOOPS
from mmengine.runner import TestLoop

from ...tooling.command import rank
from ...tooling.files import atomic_write
from ...tooling.threads import ahead
from ..config.load import leaves
from ..training.resume import loader_of
from .large_images import fingerprint, identity
from .sharing import FOLDER, MOST, PARTS, Task, finished, share
from .workers import Cores, Workers

FEWEST = 8  # images in a part
# Metrics of these packages keep what they need of an image in `results`, and nothing elsewhere.
METRICS = 'mmdet', 'mmseg', 'mmengine', 'cpvt_pyramid'


def share_test(cfg: Config, weights: dict, process: int, *outputs: Any) -> None:
    """Set a config up for an evaluation in several processes.

    Args:
        cfg: the config; its work dir is set.
        weights: the checkpoint.
        process: index of this process.
        outputs: further files and folders to write to, and options that change the results.
    """
    settings = [repr(cfg.get(f'test_{name}')) for name in ('dataloader', 'evaluator')]
    parts = leaves(cfg.test_dataloader.dataset)
    files = [Path(part.get('data_root') or '', part.get('ann_file') or '') for part in parts]
    about = [
        fingerprint(cfg, weights, torch.device(get_device())),
        settings,
        [identity(file) for file in files if file.is_file()],
        [str(output) for output in outputs],
    ]
    folder = str(Path(cfg.work_dir, FOLDER))
    options = {k: v for k, v in cfg.test_cfg.items() if k == 'fp16'}
    cfg.test_cfg = {'type': 'SharedTestLoop', 'folder': folder, 'about': about, **options}
    if process:  # the logs of processes must not overwrite each other
        cfg.work_dir, cfg.log_level = str(Path(folder, f'process{process}')), 'WARNING'


@LOOPS.register_module()
class ForkedTestLoop(TestLoop):
    """mmengine's TestLoop, in which forked processes do the batches on a CPU.

    One process does all where the order of the images may matter: in videos, and for metrics of
    other packages.

    Args:
        *args, **options: see `TestLoop`.
        processes: their number; None takes what finishes first.
    """

    def __init__(self, *args: Any, processes: Optional[int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.processes = processes

    def run(self) -> dict:
        runner, loader, metrics = self.runner, self.dataloader, self.evaluator.metrics
        batches = list(loader.batch_sampler)
        cores = Cores.for_model(next(runner.model.parameters()).device, self.processes)
        known = all(type(metric).__module__.split('.')[0] in METRICS for metric in metrics)
        in_order = type(loader.sampler) is not DefaultSampler or not known
        if in_order or cores.divided(len(batches))[0] == 1:
            return super().run()

        def results_of(index: int) -> list[list]:
            for metric in metrics:
                metric.results.clear()
            self.run_iter(index, loader.collate_fn([loader.dataset[i] for i in batches[index]]))
            return [_to_cpu(metric.results) for metric in metrics]

        runner.call_hook('before_test')
        runner.call_hook('before_test_epoch')
        runner.model.eval()
        hooks, found = runner._hooks, []
        timers = [hook for hook in hooks if isinstance(hook, (IterTimerHook, LoggerHook))]
        runner._hooks = [hook for hook in hooks if hook not in timers]  # the forks call these
        with Workers(results_of, len(batches), cores) as forks:
            runner._hooks = hooks
            for i, results in enumerate(ahead(forks, range(len(batches)), len(forks))):
                for hook in timers:
                    hook.before_test_iter(runner, i)
                found.append(results())
                for hook in timers:
                    hook.after_test_iter(runner, i)
        for metric, results in zip(metrics, zip(*found)):
            metric.results = [result for batch in results for result in batch]
        values = self.evaluator.evaluate(len(loader.dataset))
        runner.call_hook('after_test_epoch', metrics=values)
        runner.call_hook('after_test')
        return values


@LOOPS.register_module()
class SharedTestLoop(TestLoop):
    """mmengine's TestLoop, whose batches are shared.

    Args:
        *args, **options: see `TestLoop`.
        folder: for the parts of the results.
        about: what the results depend on, as JSON values.

    Attributes:
        evaluated: whether this process computed the metrics or, if they were known before, is the
            first.
    """

    def __init__(self, *args: Any, folder: str, about: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.folder, self.about, self.evaluated = Path(folder), about, False

    def run(self) -> dict:
        self.runner.call_hook('before_test')
        self.runner.call_hook('before_test_epoch')
        self.runner.model.eval()
        batches = list(self.dataloader.batch_sampler)
        size = -(-FEWEST // len(batches[0]))
        size = min(max(len(batches) // PARTS, size), max(MOST, size))
        starts = range(0, len(batches), size)
        last = Task('metrics', [self.about, size], self.evaluate, [str(s) for s in starts])

        def task(start: int) -> Task:
            run = partial(self.run_part, start, batches[start : start + size])
            return Task(
                str(start), [self.about, size], run,
                kept=lambda _: self.file(start).exists() or finished(self.folder, last) is not None,
            )  # fmt: skip

        self.parts = [self.file(start) for start in starts]
        self.evaluated = rank() == 0 and finished(self.folder, last) is not None
        metrics = share(self.folder, [*map(task, starts), last])['metrics'].outcome
        self.runner.call_hook('after_test_epoch', metrics=metrics)
        self.runner.call_hook('after_test')
        return metrics

    def file(self, start: int) -> Path:
        """The results of the part that starts with this batch."""
        return self.folder / f'batches-{start}.pkl'

    def run_part(self, start: int, batches: list[list[int]]) -> None:
        for metric in self.evaluator.metrics:
            metric.results.clear()
        for i, batch in enumerate(loader_of(self.dataloader, batches), start):
            self.run_iter(i, batch)
        results = [_to_cpu(metric.results) for metric in self.evaluator.metrics]
        with atomic_write(self.file(start)) as partial_file:
            partial_file.write_bytes(pickle.dumps(results))

    def evaluate(self) -> dict[str, float]:
        for metric in self.evaluator.metrics:
            metric.results.clear()
        for path in self.parts:
            for metric, results in zip(self.evaluator.metrics, pickle.loads(path.read_bytes())):
                metric.results.extend(results)
        metrics = self.evaluator.evaluate(len(self.dataloader.dataset))
        for path in self.parts:
            path.unlink()
        self.evaluated = True
        return {name: float(value) for name, value in metrics.items()}
