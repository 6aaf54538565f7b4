"""Train detectors and segmentors without padding, and test them in padded batches.

    python -m experiments.unpadded --page experiments/unpadded/findings/unpadded.md
    python -m experiments.unpadded --arms RetinaNet DINO --seeds 3

Every step of the training has pictures of one size. The same weights are then tested alone and in
padded batches, with and without the valid region. Prints the tables and writes
WORK_DIR/unpadded.json, with every run, and a figure. Runs are kept in WORK_DIR/runs: an interrupted
command continues where it was, with the same results.
"""

import sys
from collections.abc import Sequence
from typing import Optional

from cpvt_pyramid.app.tooling.command import (
    UserError,
    check_at_least,
    prepare_for_torch,
    run_command,
)
from cpvt_pyramid.app.tooling.files import make_folder
from cpvt_pyramid.app.tooling.threads import usable_cores

from .arms import ARMS

prepare_for_torch()  # before torch is imported

NOTES = (
    'All models begin with the weights that come with the package, the ResNet-18 with random ones. '
    "± is the 95 % interval of Student's t over seeds; p values are adjusted for the comparisons "
    'of their table (Holm). Failed runs are counted and stay in the means.',
)
TITLE = 'Trained without padding, tested in padded batches'


def compare_batches(
    *,
    work_dir: str = 'work_dirs/unpadded',
    seed: int = 0,
    seeds: int = 5,
    arms: Sequence[str] = tuple(ARMS),
    steps: int = 400,
    pictures: int = 104,
    workers: Optional[int] = None,
    page: Optional[str] = None,
) -> None:
    """Train what is missing, and write the report.

    Args:
        work_dir: folder of all results
        seed: first seed of the tables
        seeds: number of seeds
        arms: what to train, by its name in the tables
        steps: of each training, of 8 pictures
        pictures: of each test
        workers: processes that train, of one thread each (default: the number of cores)
        page: Markdown page that takes the tables and the figure between <!-- findings --> and
            <!-- /findings -->; the JSON file is copied next to it
    """
    if unknown := set(arms) - set(ARMS):
        raise UserError(f'--arms must be of {", ".join(ARMS)}; got {", ".join(sorted(unknown))}')
    for name, value, least in (
        ('seed', seed, 0),
        ('seeds', seeds, 1),
        ('steps', steps, 2),
        ('pictures', pictures, 2),
        ('workers', workers, 1),
    ):
        check_at_least(name, value, least)
    arms = list(dict.fromkeys(arms))

    from experiments.report import Answer, check_page, publish
    from experiments.runs import run_all

    from . import report
    from .runs import RunSettings

    check_page(page)
    folder = make_folder(work_dir)
    used_seeds = range(seed, seed + seeds)
    todo = []
    for one in used_seeds:
        for arm in arms:
            todo.append(
                RunSettings(
                    model=ARMS[arm].model,
                    backbone=ARMS[arm].backbone,
                    seed=one,
                    steps=steps,
                    pictures=pictures,
                )
            )
    results = run_all(todo, folder / 'runs', workers or usable_cores())
    runs = {}
    for i, arm in enumerate(arms):
        runs[arm] = [result.data() for result in results[i :: len(arms)]]

    report.draw(runs, folder / 'batches.png')
    answer = Answer('unpadded', TITLE, NOTES, report.tables(runs), ['batches.png'], runs)
    settings = dict(steps=steps, pictures=pictures, seeds=list(used_seeds))
    publish(answer, settings, folder, page)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(compare_batches, argv, interrupted='run the same command to continue')


if __name__ == '__main__':
    sys.exit(main())
