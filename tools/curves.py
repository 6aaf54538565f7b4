#!/usr/bin/env python
"""Draw the losses and validation metrics of a training, also of one that runs.

    python tools/curves.py work_dirs/retinanet_cpvt_s

A training draws them itself when it ends.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
from cpvt_pyramid.tooling.command import UserError, run_command


def curves(work_dir: str, *, out: Optional[str] = None) -> None:
    """Draw the logs of a work dir.

    Args:
        work_dir: folder of the training, as in train.py --work-dir.
        out (FILE): the picture; by default curves.png in the work dir.
    """
    from cpvt_pyramid.runner.training.curves import write_curves

    path = Path(out or Path(work_dir, 'curves.png'))
    try:
        write_curves(Path(work_dir), path)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    print(path)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(curves, argv)


if __name__ == '__main__':
    sys.exit(main())
