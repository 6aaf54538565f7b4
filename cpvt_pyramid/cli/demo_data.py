"""Create a small data set of handwritten digits for detection and segmentation.

    cpvt demo-data                     # 1200 + 100 images in data/sample
    cpvt demo-data --root FOLDER --train 50 --val 10 --seed 1

The digits are drawn on photographs from Python packages, in the layouts of COCO and of ADE20K.
ROOT/SOURCES.md names the authors and licences of what they are made of.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..tooling.command import UserError, imports_of, run_command


def demo_data(
    *, root: str = 'data/sample', train: int = 1200, val: int = 100, seed: int = 0
) -> None:
    """Create the data set, completely or not at all, unless it exists.

    Args:
        root: folder to create
        train: training images
        val: validation images
        seed: another seed gives another data set
    """
    if min(train, val) < 1 or seed < 0:
        raise UserError(
            '--train and --val must be at least 1 and --seed at least 0, got '
            f'{train}, {val} and {seed}'
        )
    with imports_of('cpvt demo-data', 'demo'):
        from ..demo.digits import make_dataset

    is_new = make_dataset(root, train, val, seed)
    state = 'created' if is_new else 'already complete'
    print(f'{Path(root).expanduser().resolve()}: {train} + {val} images, {state}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(demo_data, argv)
