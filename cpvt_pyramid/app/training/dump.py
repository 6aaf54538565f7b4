"""A file of all predictions of a test."""

import pickle
from collections.abc import Sequence
from typing import Any

from mmengine.evaluator import DumpResults

from ..tooling.files import atomic_write


def results_dump(scope: str, path: str) -> DumpResults:
    """A metric that pickles all predictions to `path`, which must end in .pkl or .pickle."""
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
