"""Create a data set of the demos.

    cpvt demo-data pages                      # 400 + 50 pages in data/pages
    cpvt demo-data trees                      # 132 tiles and 3 photographs in data/trees
    cpvt demo-data pages --root FOLDER --train 50 --val 10 --seed 1

Pages of documents are drawn, with boxes and masks of their texts, titles, lists, tables and
figures. Trees are boxes drawn by hand in aerial photographs. They are in the package deepforest,
which is downloaded (21 MB), but not installed. ROOT/SOURCES.md names the authors and licences.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Optional

from ..tooling.command import UserError, check_at_least, imports_of, run_command

GROUP = 'data'
ROOTS = {'pages': 'data/pages', 'trees': 'data/trees'}


def demo_data(
    data: Literal['pages', 'trees'],
    *,
    root: Optional[str] = None,
    train: Optional[int] = None,
    val: Optional[int] = None,
    seed: Optional[int] = None,
) -> None:
    """Create the data set, completely or not at all, unless it exists.

    Args:
        data: which data set
        root: folder to create (default: data/pages or data/trees)
        train: training pages (default: 400)
        val: validation pages (default: 50)
        seed: another seed gives other pages (default: 0)
    """
    check_at_least('train', train, 1)
    check_at_least('val', val, 1)
    check_at_least('seed', seed, 0)
    options = dict(train=train, val=val, seed=seed)
    given = {name: value for name, value in options.items() if value is not None}
    if data == 'trees' and given:
        raise UserError(f'the photographs of trees are given; they take no --{next(iter(given))}')
    root = root or ROOTS[data]
    with imports_of('cpvt demo-data', 'demo'):
        make = maker_of(data)
    is_new = make(root, **given)
    state = 'created' if is_new else 'already complete'
    print(f'{Path(root).resolve()}: {data}, {state}')


def maker_of(data: str) -> Callable[..., bool]:
    """The function that creates a data set; imports only what that needs."""
    if data == 'pages':
        from ..demo.pages import make_pages

        return make_pages
    from ..demo.trees import make_trees

    return make_trees


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(demo_data, argv)
