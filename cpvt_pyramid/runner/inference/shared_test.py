"""An evaluation that several processes share, see `sharing.py`.

Each process writes what the metrics keep of its batches into files. The process that finishes the
last batch computes the metrics from all of them, in the order of the data set, so that they are
those of one process.
"""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.evaluator.metric import _to_cpu
from mmengine.registry import LOOPS
from mmengine.runner import TestLoop

from ...tooling.command import rank
from ...tooling.files import atomic_write
from ..config.load import leaves
from ..training.resume import loader_of
from .large_images import fingerprint, identity
from .sharing import FOLDER, MOST, PARTS, Task, finished, share

FEWEST = 8  # images in a part


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
