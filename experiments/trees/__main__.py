"""Train the demo's detector of trees with several seeds, from distilled weights and from scratch.

    cpvt demo-data trees
    python -m experiments.trees --seeds 5

Prints and writes a table with what each finds in the three photographs it has not seen: AP and AP50
as in COCO, and recall and precision of detections with a score above 0.3 at an IoU of 0.4. All runs
have the same number of steps. They are kept in WORK_DIR: what is there is not computed twice.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

from cpvt_pyramid.tooling.command import UserError, check_at_least, run_command
from cpvt_pyramid.tooling.files import make_folder, write_text
from cpvt_pyramid.tooling.threads import usable_cores

from .runs import ARMS, PHOTOGRAPHS, train


def compare(
    *,
    work_dir: str = 'work_dirs/trees_seeds',
    seeds: int = 5,
    seed: int = 0,
    arms: Sequence[Literal['distilled', 'scratch', 'resnet18']] = tuple(ARMS),
    workers: Optional[int] = None,
    finished: bool = False,
    cfg_options: Sequence[str] = (),
) -> None:
    """Train what is missing, and print the table.

    Args:
        work_dir: folder of all runs
        seeds: number of seeds
        seed: the first one
        arms: what to train
        workers: trainings at the same time, of one thread each (default: the number of cores)
        finished: report the runs that are finished, and train no more
        cfg_options: more changes of the config, as those of cpvt train
    """
    check_at_least('--seeds', seeds, 1)
    check_at_least('--seed', seed, 0)
    check_at_least('--workers', workers, 1)
    folder = make_folder(work_dir)
    if not finished:
        from experiments.parallel import in_parallel

        jobs = [
            (train, (arm, number, folder, list(cfg_options)))
            for number in range(seed, seed + seeds)
            for arm in arms
        ]
        in_parallel(jobs, workers or usable_cores(), 'trainings')
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob('*/measures.json'))]
    if not runs:
        raise UserError(f'no finished run in {folder}')
    text = '\n\n'.join(table.markdown() for table in tables(runs))
    write_text(folder / 'trees.md', text + '\n')
    write_text(folder / 'trees.json', json.dumps(runs, indent=1) + '\n')
    print(text)
    print(f'\n{Path(work_dir, "trees.md")}')


def tables(runs: list[dict]) -> list:
    """What each arm finds in each photograph, in %, and what the distilled weights gain."""
    from experiments.report import Table
    from experiments.statistics import estimate, paired_difference, show_p

    measures = [
        f'{place} {name}' for place in PHOTOGRAPHS for name in ('AP', 'AP50', 'recall', 'precision')
    ]
    of_arm = {arm: {r['seed']: r for r in runs if r['arm'] == arm} for arm in ARMS}
    rows = []
    for arm, of_seeds in of_arm.items():
        if of_seeds:
            cells = [estimate([r[m] for r in of_seeds.values()]).show() for m in measures]
            rows.append([arm, str(len(of_seeds)), *cells])
    found = [Table('In %, over seeds', ['', 'seeds', *measures], rows)]
    rows = []
    for arm in list(ARMS)[1:]:
        both = sorted(of_arm['distilled'].keys() & of_arm[arm].keys())
        if len(both) > 1:
            cells = []
            for m in measures:
                ours, theirs = ([of_arm[a][s][m] for s in both] for a in ('distilled', arm))
                difference = paired_difference(ours, theirs)
                cells.append(f'{difference.show(sign=True)} (p {show_p(difference.p)})')
            rows.append([f'distilled minus {arm}', str(len(both)), *cells])
    if rows:
        found.append(
            Table('Differences, in points, paired by seed', ['', 'seeds', *measures], rows)
        )
    return found


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(compare, argv, interrupted='run the same command to continue')


if __name__ == '__main__':
    sys.exit(main())
