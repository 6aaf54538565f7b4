"""`cpvt test`: load a config and a checkpoint, apply the options, check what is certain, test."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

import numpy as np
from mmengine.config import Config
from torch import Tensor

from ..config import check
from ..config.load import load_config, work_dir_of
from ..config.parts import as_list, data_of
from ..data.config_data import check_before_run
from ..predict.openmmlab.grouping import divide_batches
from ..predict.openmmlab.loading import fetch_checkpoint, load_whole_model
from ..tooling.command import UserError, rank
from ..tooling.files import make_folder
from .dump import DumpHook
from .processes import connect, leave_processes, use_launcher
from .runner import CommandRunner, write_config


def run_test(
    config: str,
    checkpoint: str,
    *,
    work_dir: Optional[str] = None,
    out: Optional[str] = None,
    report: Optional[str] = None,
    tta: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: str = 'none',
) -> None:
    """Evaluate a checkpoint; see `cpvt test` for the arguments."""
    cfg = load_config(config, cfg_options)
    check.check_settings(cfg, 'test_dataloader', 'test_evaluator')
    check.check_data(cfg, 'test')
    if report:
        from .report_of_config import check_reported

        check_reported(cfg)
    weights = fetch_checkpoint(checkpoint)
    folder = make_folder(work_dir or work_dir_of(cfg, config) / 'test')
    if tta:
        augment(cfg)
    cfg.work_dir = str(folder)
    if rank() == 0:
        write_config(cfg, config, folder)
    use_launcher(cfg, launcher)
    connect(launcher, cfg.get('env_cfg') or {})
    with TemporaryDirectory(prefix='.test-', dir=folder) as own:
        predictions = Path(out or Path(own, 'predictions.pkl'))
        metrics = evaluate(cfg, weights, checkpoint, predictions if out or report else None)
        leave_processes()
        if rank() != 0:
            return
        print_metrics(metrics)
        check_evaluated(cfg, metrics)
        if report:
            from .report_of_config import write_test_report

            title = f'{Path(config).stem}: {checkpoint}'
            about = f'Predictions: {out}' if out else 'The test data of the config'
            write_test_report(cfg, predictions, Path(report), title, about)
            print(report)


def augment(cfg: Config) -> None:
    """Swap the model and the test pipeline of a config for those of test-time augmentation."""
    if not (cfg.get('tta_model') and cfg.get('tta_pipeline')):
        raise UserError(
            '--tta needs tta_model and tta_pipeline in the config; mmdet has them for boxes, and '
            'cannot merge masks'
        )
    cfg.model = {**cfg.tta_model, 'module': cfg.model}
    for dataset in data_of(cfg, 'test'):
        dataset['pipeline'] = cfg.tta_pipeline


def evaluate(cfg: Config, weights: dict, path: str, predictions: Optional[Path]) -> dict[str, Any]:
    """The metrics of a model on its test data.

    Args:
        cfg: the config.
        weights: the checkpoint, read from `path`; its tensors must be exactly those of the model.
        path: named in errors.
        predictions: write them to this file, if given.
    """
    check_before_run(cfg, 'test', folder=Path(cfg.work_dir))
    cfg.load_from = None
    cfg.resume = False
    runner = CommandRunner.from_cfg(cfg)
    load_whole_model(runner.model, weights, path)
    check.check_classes(cfg, runner.model, 'test')
    divide_batches(runner.model)
    if predictions:
        runner.register_hook(DumpHook(cfg.default_scope, str(predictions)))
    return runner.test()


def print_metrics(metrics: dict[str, Any]) -> None:
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f'{name:{width}}  {metric_text(value)}')


def metric_text(value: Any) -> str:
    """A metric in a line; one by a user may be an array or anything else."""
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    if isinstance(value, (int, float, np.number)):
        return f'{value:.4g}'
    return ' '.join(str(value).split())


def check_evaluated(cfg: Config, metrics: dict[str, Any]) -> None:
    """Check that a test has computed metrics, unless it only writes files."""
    writes = [metric for metric in as_list(cfg.test_evaluator) if metric.get('format_only')]
    if not metrics and not writes:
        raise UserError(
            'the test has computed no metric; the evaluation of boxes does so if the model detects '
            'nothing in any image. Lower its score threshold (model.test_cfg.score_thr), or train '
            'it longer'
        )
