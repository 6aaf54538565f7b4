"""Create a data set of the demos.

    cpvt demo-data trees                      # 132 tiles and 3 photographs in data/trees
    cpvt demo-data digits                     # 1200 + 100 images in data/sample
    cpvt demo-data digits --root FOLDER --train 50 --val 10 --seed 1

Trees are boxes drawn by hand in aerial photographs. They are in the package deepforest, which is
downloaded (21 MB), but not installed. Handwritten digits are drawn on photographs from installed
packages, in the layouts of COCO and of ADE20K, without a network. ROOT/SOURCES.md names the authors
and licences.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

from ..tooling.command import UserError, check_at_least, imports_of, run_command


def demo_data(
    data: Literal['trees', 'digits'],
    *,
    root: Optional[str] = None,
    train: Optional[int] = None,
    val: Optional[int] = None,
    seed: Optional[int] = None,
) -> None:
    """Create the data set, completely or not at all, unless it exists.

    Args:
        data: which data set
        root: folder to create (default: data/trees or data/sample)
        train: training images of the digits (default: 1200)
        val: validation images of the digits (default: 100)
        seed: another seed gives other digits (default: 0)
    """
    check_at_least('--train', train, 1)
    check_at_least('--val', val, 1)
    check_at_least('--seed', seed, 0)
    options = dict(train=train, val=val, seed=seed)
    given = {name: value for name, value in options.items() if value is not None}
    if data == 'trees' and given:
        raise UserError(f'--{next(iter(given))} is for digits; the photographs of trees are given')
    root = root or {'trees': 'data/trees', 'digits': 'data/sample'}[data]
    with imports_of('cpvt demo-data', 'demo'):
        if data == 'trees':
            from ..demo.trees import make_trees as make
        else:
            from ..demo.digits import make_dataset as make
    is_new = make(root, **given)
    state = 'created' if is_new else 'already complete'
    print(f'{Path(root).expanduser().resolve()}: {data}, {state}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(demo_data, argv)
