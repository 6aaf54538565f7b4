"""Evaluate a detector or a segmentor.

For several GPUs, processes or machines, see dist_test.sh.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

from ..tooling.command import UserError, rank, run_command


def test(
    config: str,
    checkpoint: str,
    *,
    work_dir: Optional[str] = None,
    out: Optional[str] = None,
    show_dir: Optional[str] = None,
    tta: bool = False,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
    skip_bad: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
) -> None:
    """Evaluate a checkpoint on the test set of a config, and print its metrics.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py.
        checkpoint: weights of the model, a path or an address.
        work_dir: folder for the log and the metrics; by default work_dirs/NAME/test.
        out: write the predictions, pickled.
        show_dir: write each prediction as a picture and as cpvt infer writes it.
        tta: test-time augmentation: merge predictions at several sizes, flipped and not, as
            tta_model and tta_pipeline of the config say, or else at 3 sizes.
        dtype: of the backbone, the neck and the heads of segmentors; boxes are float32.
        skip_bad: test without images and annotations that have errors; see cpvt check-data. The
            metrics are then those of the rest.
        cfg_options: override settings of the config, for example
            test_dataloader.num_workers=8.
        launcher: what started the processes.
    """
    from ..accelerate import use_winograd
    from ..config import check
    from ..config.load import load_config, work_dir_of
    from ..config.plan import apply, save_plan, show_plan
    from ..data.checks import check_before_run, plan_good_parts
    from ..mm.amp import replace_forward
    from ..predict.openmmlab.grouping import divide_batches
    from ..predict.openmmlab.models import fetch_checkpoint, load_whole_model
    from ..runner.evaluation import results_dump, skip_unread_scores
    from ..runner.evaluation_plan import plan_test
    from ..runner.tool_runner import ToolRunner
    from ..tooling.explain import explained
    from ..tooling.files import check_file, make_folder
    from ..training.processes import all_or_none, connect, leave_processes

    if out and not out.endswith(('.pkl', '.pickle')):
        raise UserError(f'--out must end in .pkl or .pickle, got {out}')
    with all_or_none(launcher):
        cfg = load_config(config, cfg_options)
        # Not the folder of the training: mmengine writes the config it runs, under the same name.
        folder = Path(work_dir or work_dir_of(cfg, config) / 'test')
        with explained():
            check.check_settings(cfg, 'test_dataloader', 'test_evaluator')
            check.check_samplers(cfg, 'test')
            check.check_data(cfg, 'test')
            weights = fetch_checkpoint(checkpoint)
            if out:
                check_file(out)
            make_folder(folder)
            if show_dir:
                make_folder(show_dir)
        connect(launcher, cfg.get('env_cfg') or {})
    with all_or_none(launcher), explained(folder):
        plan = plan_test(
            cfg,
            checkpoint,
            folder,
            given_work_dir=work_dir,
            show_dir=show_dir,
            tta=tta,
            dtype=dtype,
            launcher=launcher,
        )
        good_parts = check_before_run(cfg, 'test', folder=folder, skip_bad=skip_bad)
        plan = (*plan_good_parts(cfg, good_parts), *plan)
        if rank() == 0:
            show_plan(plan, config)
            save_plan(plan, config, folder / 'test.plan.txt')
        apply(cfg, plan)
    with explained(folder):
        runner = ToolRunner.from_cfg(cfg)
        with all_or_none(launcher):
            load_whole_model(runner.model, weights, checkpoint)
            check.check_classes(cfg, runner.model, 'test')
        use_winograd(runner.model)
        if dtype == 'bfloat16':
            replace_forward(runner.model)
        divide_batches(runner.model)
        if cfg.default_scope == 'mmseg':
            skip_unread_scores(runner)
        if out:
            runner.test_evaluator.metrics.append(results_dump(cfg.default_scope, out))
        metrics = runner.test()
    leave_processes()
    if rank() == 0:
        width = max(map(len, metrics), default=0)
        for name, value in metrics.items():
            print(f'{name:{width}}  {value:.4g}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(test, argv, 'the test is not finished')
