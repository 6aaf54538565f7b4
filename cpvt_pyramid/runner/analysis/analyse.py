"""The analysis of the results of a test."""

from pathlib import Path
from typing import Optional

from mmengine.config import Config

from ...config.parts import data_of, kind_of
from ...predict.predictor import check_score_thr
from ...tooling.command import UserError
from .detections import analyse_detections
from .label_maps import analyse_label_maps
from .parts import Analysis


def analyse_results(cfg: Config, path: Path, score_thr: Optional[float], worst: int) -> Analysis:
    """Analyse the results of a test, in a file of cpvt test --out or as COCO results; for the other
    arguments, see cpvt analyse."""
    datasets = data_of(cfg, 'test')
    kinds = [kind_of(dataset) for dataset in datasets]
    is_segmentor = cfg.default_scope == 'mmseg'
    if len(datasets) != 1 or (not is_segmentor and kinds != ['CocoDataset']):
        raise UserError(
            f'the test data must be one CocoDataset or one of segmentation masks, got {kinds}'
        )
    if is_segmentor:
        check_score_thr(score_thr, 'labels')
        return analyse_label_maps(cfg, datasets[0], path, worst)
    return analyse_detections(cfg, datasets[0], path, score_thr, worst)
