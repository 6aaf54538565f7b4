"""The page of `cpvt test --report`."""

from pathlib import Path

from mmengine.config import Config

from ...config.parts import data_of, kind_of
from ...tooling.command import UserError
from ...tooling.files import write_text
from ...tooling.pages import html_page
from .common import Analysis
from .detections import analyse_detections
from .label_maps import analyse_label_maps

WORST = 12  # images with the most errors, which are shown


def check_reported(cfg: Config) -> None:
    """Check that there is a report for the test data of a config."""
    kinds = [kind_of(dataset) for dataset in data_of(cfg, 'test')]
    is_one = len(kinds) == 1
    if not is_one or (cfg.default_scope != 'mmseg' and kinds != ['CocoDataset']):
        raise UserError(
            f'--report needs test data of one CocoDataset or one of segmentation masks, got {kinds}'
        )


def write_test_report(cfg: Config, predictions: Path, out: Path, title: str) -> None:
    """Write a page about the predictions of a test, in a file of `cpvt test --out`."""
    found = analyse(cfg, predictions)
    write_text(out, html_page(title, f'Predictions: {predictions}', found.sections))


def analyse(cfg: Config, predictions: Path, worst: int = WORST) -> Analysis:
    """Analyse the predictions of a test, in a file of `cpvt test --out`."""
    (dataset,) = data_of(cfg, 'test')
    if cfg.default_scope == 'mmseg':
        return analyse_label_maps(cfg, dataset, predictions, worst)
    return analyse_detections(cfg, dataset, predictions, worst)
