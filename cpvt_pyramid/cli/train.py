"""Train a detector or a segmentor. For several GPUs or processes, see dist_train.sh.

    cpvt train configs/retinanet_cpvt_s.py
    cpvt train FOLDER_WITH_DATA

For a folder with images and annotations, it writes a config next to the work dir, as cpvt
new-config does, and trains with it.

After SIGTERM or SIGUSR1 it writes a checkpoint and ends with exit status 75; --resume continues. A
second signal ends it at once.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
from collections.abc import Sequence
from typing import Literal, Optional, Union

from ..tooling.command import run_command


def train(
    config: str,
    *,
    base: Optional[str] = None,
    assign: Sequence[str] = (),
    work_dir: Optional[str] = None,
    amp: bool = False,
    resume: Union[bool, str] = False,
    auto_scale_lr: bool = False,
    auto_scale_iters: bool = False,
    early_stop: Optional[int] = None,
    log_to: Sequence[Literal['tensorboard', 'wandb', 'mlflow']] = (),
    skip_bad: bool = False,
    no_pictures: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
    dry_run: bool = False,
) -> None:
    """Train the model of a config.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py; or a folder with data.
        base: for a folder with data, config with the model and the recipe; by default a
            RetinaNet, or for segmentation masks a Semantic FPN.
        assign: for a folder with data, what folders or files in it are for, where
            their names say something else; see cpvt new-config.
        work_dir: folder for checkpoints and logs; by default the config's own, or
            work_dirs/NAME.
        amp: train in mixed precision.
        resume: resume from this checkpoint; without a value from the last complete one in the work
            dir, or from the start if there is none.
        auto_scale_lr: scale the learning rate with the images in a step.
        auto_scale_iters: scale the iterations so that training sees as many images as the recipe.
        early_stop: stop after N evaluations without a better model.
        log_to: log to these, too, in folders of the work dir; see docs/training.md.
        skip_bad: train without images and annotations that have errors; see cpvt check-data.
        no_pictures: draw neither validation images nor, at the end, the curves.
        cfg_options: override settings of the config, for example randomness.seed=0.
        launcher: what started the processes.
        dry_run: print what the other options and this package change in the config, and stop.
    """
    from ..runner.train import run_training
    from ..runner.training.plan import TrainingOptions

    options = TrainingOptions(
        base=base,
        assign=assign,
        work_dir=work_dir,
        amp=amp,
        resume=resume,
        auto_scale_lr=auto_scale_lr,
        auto_scale_iters=auto_scale_iters,
        early_stop=early_stop,
        log_to=log_to,
        skip_bad=skip_bad,
        pictures=not no_pictures,
        cfg_options=cfg_options,
        launcher=launcher,
        dry_run=dry_run,
    )
    run_training(config, options)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(train, argv, 'continue with the same command and --resume')
