"""Train the detector of trees with several seeds, from distilled weights and from scratch.

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

from .runs import ARMS, MEASURES, PHOTOGRAPHS, train

OURS = 'distilled'
COMPARED = (OURS, 'scratch', 'resnet18')


def compare(
    *,
    work_dir: str = 'work_dirs/trees_seeds',
    seeds: int = 5,
    seed: int = 0,
    arms: Sequence[
        Literal['distilled', 'scratch', 'resnet18', 'learned', 'rope', 'rope+peg']
    ] = COMPARED,
    workers: Optional[int] = None,
    finished: bool = False,
    cfg_options: Sequence[str] = (),
) -> None:
    """Train what is missing, and print the table.

    Args:
        work_dir: folder of all runs
        seeds: number of seeds
        seed: the first one
        arms: what to train; learned, rope and rope+peg are distilled weights with another position
            encoding than PEGs, for experiments.trees.larger_tiles
        workers: trainings at the same time, of one thread each (default: the number of cores)
        finished: report the runs that are finished, and train no more
        cfg_options: more changes of the config, as those of cpvt train
    """
    check_at_least('--seeds', seeds, 1)
    check_at_least('--seed', seed, 0)
    check_at_least('--workers', workers, 1)
    folder = make_folder(work_dir)
    if not finished:
        for run in finished_runs(folder):
            known = run.get('options', [])
            if known != list(cfg_options):
                raise UserError(
                    f'the runs in {folder} were trained with other changes of the config '
                    f'({" ".join(known) or "none"}); take another --work-dir'
                )

        from experiments.parallel import in_parallel

        jobs = [
            (train, (arm, number, folder, list(cfg_options)))
            for number in range(seed, seed + seeds)
            for arm in arms
        ]
        in_parallel(jobs, workers or usable_cores(), 'trainings')
    runs = finished_runs(folder)
    if not runs:
        raise UserError(f'no finished run in {folder}')
    text = '\n\n'.join(table.markdown() for table in tables(runs))
    write_text(folder / 'trees.md', text + '\n')
    write_text(folder / 'trees.json', json.dumps(runs, indent=1) + '\n')
    print(text)
    print(f'\n{Path(work_dir, "trees.md")}')


def finished_runs(folder: Path) -> list[dict]:
    """The measures of all finished trainings."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob('*/measures.json'))]


def tables(runs: list[dict]) -> list:
    """What each arm finds in each photograph, in %, and what distilled weights gain, in points; the
    p values of a column are adjusted for the number of its rows (Holm)."""
    from experiments.report import Table
    from experiments.statistics import estimate, holm, paired_difference, with_p

    of_arm = {arm: {run['seed']: run for run in runs if run['arm'] == arm} for arm in ARMS}
    of_arm = {arm: of_seeds for arm, of_seeds in of_arm.items() if of_seeds}
    names = [f'{place} {name}' for place in PHOTOGRAPHS for name in MEASURES]
    header = [f'{arm}, {len(of_seeds)} seeds' for arm, of_seeds in of_arm.items()]
    rows = []
    for name in names:
        cells = [estimate([run[name] for run in of.values()]).show() for of in of_arm.values()]
        rows.append([name, *cells])
    gains = {}
    for arm in of_arm:
        both = sorted(of_arm.get(OURS, {}).keys() & of_arm[arm].keys())
        if arm == OURS or len(both) < 2:
            continue
        found = []
        for name in names:
            ours = [of_arm[OURS][seed][name] for seed in both]
            theirs = [of_arm[arm][seed][name] for seed in both]
            found.append(paired_difference(ours, theirs))
        gains[f'{OURS} minus {arm} (p)'] = zip(found, holm([one.p for one in found]))
    for column in gains.values():
        for row, (difference, p) in zip(rows, column):
            row.append(with_p(difference, p))
    return [Table('Trees found, in %, mean and 95 % interval', ['', *header, *gains], rows)]


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(compare, argv, interrupted='run the same command to continue')


if __name__ == '__main__':
    sys.exit(main())
