"""What `cpvt test` adds to mmengine's loop: pictures, and files of all predictions."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.dist import get_rank, get_world_size
from mmengine.evaluator import DumpResults
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement

from ..config.parts import dataset_meta, loaded_bands
from ..predict.openmmlab.postprocessing import skip_class_scores
from ..predict.openmmlab.prediction import to_prediction
from ..predict.openmmlab.rasters import picture, read_image
from ..tooling.files import atomic_write, distinct_name


@HOOKS.register_module()
class PictureHook(Hook):
    """Writes every prediction of a test into a folder, as a picture and as cpvt infer writes it."""

    def __init__(self, folder: str, score_thr: float = 0.3) -> None:
        self.folder = Path(folder)
        self.score_thr = score_thr
        self.names: dict[str, str] = {}  # by path
        self.seen = 0  # images of this process

    def before_test(self, runner: Runner) -> None:
        dataset = runner.test_dataloader.dataset
        taken: set[str] = set()
        for i in range(len(dataset)):  # the same in all processes
            path = dataset.get_data_info(i)['img_path']
            self.names[path] = distinct_name(Path(path).stem, taken)

    def after_test_iter(
        self, runner: Runner, *_: Any, outputs: Sequence[BaseDataElement], **__: Any
    ) -> None:
        meta = dataset_meta(runner.cfg, {})
        bands = loaded_bands(runner.cfg)
        images = len(runner.test_dataloader.dataset)
        for sample in outputs:
            place = self.seen * get_world_size() + get_rank()  # among those of all processes
            self.seen += 1
            if place >= images:  # a first image again, which fills the last round of the processes
                continue
            path = Path(sample.img_path)
            image = picture(read_image(path, bands))
            found = to_prediction(sample, image, meta, self.score_thr)
            found.write(self.folder, self.names[sample.img_path], path)


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


def skip_unread_scores(runner: Runner) -> None:
    """`skip_class_scores` in a test, unless a metric or hook of others may read them."""
    readers = [*runner.test_evaluator.metrics, *runner.hooks]
    homes = {type(reader).__module__.split('.')[0] for reader in readers}
    if homes <= {'mmengine', 'mmseg', 'cpvt_pyramid'}:
        skip_class_scores(runner.model)
