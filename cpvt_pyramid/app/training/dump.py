"""A file of all predictions of a test."""

import pickle
from collections.abc import Sequence
from typing import Any

from mmengine.evaluator import DumpResults, Evaluator
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement

from ..tooling.files import atomic_write


class DumpHook(Hook):
    """Pickles all predictions of a test, whatever evaluates them.

    Args:
        scope: mmdet or mmseg.
        path: of the file; it must end in .pkl or .pickle.
    """

    def __init__(self, scope: str, path: str) -> None:
        self.evaluator = Evaluator([results_dump(scope, path)])

    def after_test_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Sequence[BaseDataElement] = (),
    ) -> None:
        self.evaluator.process(outputs, data_batch)

    def after_test_epoch(self, runner: Runner, metrics: Any = None) -> None:
        self.evaluator.evaluate(len(runner.test_dataloader.dataset))


def results_dump(scope: str, path: str) -> DumpResults:
    """A metric that pickles all predictions to `path`."""
    base: Any = DumpResults
    if scope == 'mmdet':
        from mmdet.evaluation import DumpDetResults

        base = DumpDetResults  # compresses the masks

    class AtomicDump(base):
        def process(self, data_batch: Any, predictions: Sequence[dict]) -> None:
            left_out = 'gt_sem_seg', 'seg_logits'  # the latter: 150 floats per pixel for ADE20K
            kept = [{k: v for k, v in x.items() if k not in left_out} for x in predictions]
            super().process(data_batch, kept)

        def compute_metrics(self, results: list) -> dict:
            with atomic_write(path) as partial, partial.open('wb') as file:
                pickle.dump(results, file)
            return {}

    return AtomicDump(path)
