"""`cpvt test`: load a config and a checkpoint, apply the options, check what is certain, test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..config import check
from ..config.load import load_config, work_dir_of
from ..data.checks import check_before_run
from ..predict.openmmlab.grouping import divide_batches
from ..predict.openmmlab.models import fetch_checkpoint, load_whole_model
from ..tooling.command import UserError, rank
from ..tooling.explain import explained
from ..tooling.files import check_file, make_folder
from .augmentation import augment
from .predictions import results_dump
from .processes import all_or_none, connect, leave_processes, use_launcher
from .runner import CommandRunner

PREDICTIONS = 'predictions.pkl'  # in the work dir, for a report


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
    if out and not out.endswith(('.pkl', '.pickle')):
        raise UserError(f'--out must end in .pkl or .pickle, got {out}')
    if report and not report.endswith('.html'):
        raise UserError(f'--report must end in .html, got {report}')
    with all_or_none(launcher), explained():
        cfg = load_config(config, cfg_options)
        check.check_settings(cfg, 'test_dataloader', 'test_evaluator')
        check.check_data(cfg, 'test')
        if report:
            from .report.page import check_reported

            check_reported(cfg)
        weights = fetch_checkpoint(checkpoint)
        # Not the folder of the training: mmengine writes the config it runs, under the same name.
        folder = Path(work_dir or work_dir_of(cfg, config) / 'test')
        for path in filter(None, (out, report)):
            check_file(path)
        make_folder(folder)
        cfg.work_dir = str(folder)
        cfg.load_from = None  # `weights` are loaded, and must fit
        cfg.resume = False
        if tta:
            augment(cfg)
        use_launcher(cfg, launcher)
        connect(launcher, cfg.get('env_cfg') or {})
    with all_or_none(launcher), explained(folder):
        check_before_run(cfg, 'test', folder=folder)
    with explained(folder):
        runner = CommandRunner.from_cfg(cfg)
        with all_or_none(launcher):
            load_whole_model(runner.model, weights, checkpoint)
            check.check_classes(cfg, runner.model, 'test')
        divide_batches(runner.model)
        predictions = Path(out or folder / PREDICTIONS)
        if out or report:
            dump = results_dump(cfg.default_scope, str(predictions))
            runner.test_evaluator.metrics.append(dump)
        metrics = runner.test()
    leave_processes()
    if rank() != 0:
        return
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f'{name:{width}}  {value:.4g}')
    if report:
        from .report.page import write_test_report

        with explained(folder):
            write_test_report(
                cfg, predictions, Path(report), title=f'{Path(config).stem}: {checkpoint}'
            )
        print(report)
