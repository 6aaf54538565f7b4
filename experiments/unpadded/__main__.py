"""Train detectors and segmentors without padding, and test them in padded batches.

    python -m experiments.unpadded --page experiments/unpadded/findings/unpadded.md
    python -m experiments.unpadded --arms RetinaNet DINO --seeds 3

Every step of the training has pictures of one size. The same weights are then tested alone and in
padded batches, with and without the valid region. Prints the tables and writes
WORK_DIR/unpadded.json, with every run, and a figure. Runs are kept in WORK_DIR/runs: an interrupted
command continues where it was, with the same results.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from cpvt_pyramid.tooling.command import UserError, check_at_least, prepare_for_torch, run_command
from cpvt_pyramid.tooling.files import make_folder
from cpvt_pyramid.tooling.threads import usable_cores

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
    finished: bool = False,
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
        finished: report the runs that are finished, and train no more
        page: Markdown page that takes the tables and the figure between <!-- findings --> and
            <!-- /findings -->; the JSON file is copied next to it
    """
    if unknown := set(arms) - set(ARMS):
        raise UserError(f'--arms must be of {", ".join(ARMS)}; got {", ".join(sorted(unknown))}')
    for name, value, least in (
        ('--seed', seed, 0),
        ('--seeds', seeds, 1),
        ('--steps', steps, 2),
        ('--pictures', pictures, 2),
        ('--workers', workers, 1),
    ):
        check_at_least(name, value, least)
    if page and not Path(page).is_file():
        raise UserError(f'there is no page {page}')
    arms = list(dict.fromkeys(arms))

    from experiments.parallel import in_parallel
    from experiments.report import LabAnswer, save, write_findings

    from . import report
    from .runs import RunSettings, path_of, run

    folder = make_folder(work_dir)
    todo = []
    for one in range(seed, seed + seeds):
        for arm in arms:
            settings = RunSettings(
                model=ARMS[arm].model,
                backbone=ARMS[arm].backbone,
                seed=one,
                steps=steps,
                pictures=pictures,
            )
            if not finished or path_of(settings, folder / 'runs').exists():
                todo.append((arm, settings))
    if not todo:
        raise UserError(f'no run of these models is finished in {folder}; leave out --finished')
    jobs = [(run, (settings, folder / 'runs')) for _, settings in todo]
    results = in_parallel(jobs, 1 if finished else workers or usable_cores(), 'training')
    runs = {}
    for arm in arms:
        of_arm = [result for (one, _), result in zip(todo, results) if one == arm]
        if of_arm:
            runs[arm] = [result._asdict() for result in of_arm]

    tables = report.tables(runs)
    report.draw(runs, folder / 'batches.png')
    answer = LabAnswer('unpadded', TITLE, NOTES, tables, ['batches.png'], dict(runs=runs))
    used = {settings.seed for _, settings in todo}
    save(answer, dict(steps=steps, pictures=pictures, seeds=sorted(used)), folder)
    for table in tables:
        print(f'\n{table.text()}')
    print(f'\n{folder / "unpadded.json"}; figure: {folder / "batches.png"}')
    if page:
        write_findings(folder, ['unpadded'], Path(page))
        shutil.copyfile(folder / 'unpadded.json', Path(page).with_suffix('.json'))


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(compare_batches, argv, interrupted='run the same command to continue')


if __name__ == '__main__':
    sys.exit(main())
