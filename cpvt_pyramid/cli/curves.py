"""Draw the losses and validation metrics of a training, also of one that runs.

    cpvt curves work_dirs/retinanet_cpvt_s

A training draws them itself when it ends.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..tooling.command import UserError, run_command


def curves(work_dir: str, *, out: Optional[str] = None) -> None:
    """Draw the logs of a work dir.

    Args:
        work_dir: folder of the training, as in cpvt train --work-dir.
        out: the picture; by default curves.png in the work dir.
    """
    from ..runner.training.curves import write_curves

    path = Path(out or Path(work_dir, 'curves.png'))
    try:
        write_curves(Path(work_dir), path)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    print(path)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(curves, argv)
