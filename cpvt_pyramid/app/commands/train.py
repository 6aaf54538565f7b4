"""Train a detector or a segmentor. For several GPUs or processes, see dist_train.sh.

    cpvt train configs/retinanet_cpvt_s.py

After SIGTERM or SIGUSR1, a training with the hooks of our configs writes a checkpoint and ends with
exit status 75; --resume continues. A second signal ends the training at once. See docs/training.md.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
from collections.abc import Sequence
from typing import Literal, Optional, Union

from ..tooling.command import run_command

GROUP = 'training'


def train(
    config: str,
    *,
    work_dir: Optional[str] = None,
    amp: bool = False,
    resume: Union[bool, str] = False,
    auto_scale_lr: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
) -> None:
    """Train the model of a config.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py.
        work_dir: folder for checkpoints and logs; by default the config's own, or
            work_dirs/NAME.
        amp: train in mixed precision.
        resume: resume from this checkpoint (--resume=PATH); without a value from the last complete
            one in the work dir, or from the start if there is none.
        auto_scale_lr: scale the learning rate with the images in an iteration.
        cfg_options: override settings of the config, for example randomness.seed=0.
        launcher: what started the processes.
    """
    from ..training.train import run_training

    run_training(
        config,
        work_dir=work_dir,
        amp=amp,
        resume=resume,
        auto_scale_lr=auto_scale_lr,
        cfg_options=cfg_options,
        launcher=launcher,
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(train, argv, 'continue with the same command and --resume')
