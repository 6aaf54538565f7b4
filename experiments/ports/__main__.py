"""Compare ports of PCPVT by training: is a detector or segmentor better for the valid region?

    python -m experiments.ports --preset small                            # 20 minutes of one core
    python -m experiments.ports --preset full --page experiments/ports/findings/training.md

Prints the tables and writes WORK_DIR/training.json, with every run, and a figure. Runs are kept in
WORK_DIR/runs: an interrupted command continues where it was, with the same results.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

from cpvt_pyramid.tooling.command import UserError, prepare_for_torch, run_command
from cpvt_pyramid.tooling.threads import usable_cores

from .settings import ARMS, METRICS, PRESETS, TUNED, Preset, RunSettings

prepare_for_torch()  # before torch is imported

TUNING_SEED = 500_000  # plus the first seed of the tables
NOTES = (
    'One model has a detector (RetinaNet, box AP as in COCO) and a segmentor (Semantic FPN, mIoU). '
    'Weights and pictures change with the seed and are the same for all models. ± is the 95 % '
    "interval of Student's t over seeds; p values are adjusted for the comparisons of their table "
    '(Holm). Failed runs are counted and stay in the means.',
)


def compare_ports(
    *,
    preset: Literal['smoke', 'small', 'full'] = 'small',
    work_dir: str = 'work_dirs/ports',
    seed: int = 0,
    seeds: Optional[int] = None,
    arms: Sequence[str] = (),
    workers: Optional[int] = None,
    finished: bool = False,
    page: Optional[str] = None,
) -> None:
    """Train what is missing, and write the report.

    Args:
        preset: amount of work: small takes 20 minutes of one core, full 100; smoke takes seconds,
            and shows nothing
        work_dir: folder of all results
        seed: first seed of the tables
        seeds: number of seeds (default: the preset's)
        arms: what to train, by its name in the tables (default: the preset's)
        workers: processes that train, of one thread each (default: the number of cores)
        finished: report the runs that are finished, and train no more
        page: Markdown page that takes the tables and the figure between <!-- findings --> and
            <!-- /findings -->; the JSON file is copied next to it
    """
    from experiments.report import LabAnswer, save, write_findings

    from . import report

    chosen, folder = PRESETS[preset], Path(work_dir)
    if unknown := set(arms) - set(ARMS):
        raise UserError(f'--arms must be of {", ".join(ARMS)}; got {", ".join(sorted(unknown))}')
    chosen = chosen._replace(arms=tuple(arms) or chosen.arms, seeds=seeds or chosen.seeds)
    workers = 0 if finished else workers or usable_cores()
    runs, tuning = train_all(chosen, folder / 'runs', seed, workers)
    tables = report.tables(runs)
    report.draw(runs, folder / 'padding.png')
    answer = LabAnswer(
        'training', 'Ports compared by training', NOTES, tables, ['padding.png'],
        dict(runs=runs, tuning=tuning),
    )  # fmt: skip
    used = {run['settings']['seed'] for of_arm in runs.values() for run in of_arm}
    save(answer, {**chosen._asdict(), 'seeds': sorted(used)}, folder)
    for table in tables:
        print(f'\n{table.text()}')
    print(f'\n{folder / "training.json"}; figure: {folder / "padding.png"}')
    if page:
        write_findings(folder, ['training'], Path(page))
        shutil.copyfile(folder / 'training.json', Path(page).with_suffix('.json'))


def train_all(
    preset: Preset, folder: Path, seed: int, workers: int
) -> tuple[dict[str, list[dict]], list[dict]]:
    """The runs of each arm, by seed, and those that the learning rate was chosen by.

    Args:
        preset: what to train.
        folder: of the runs.
        seed: the first one.
        workers: processes; 0: only read what is finished.
    """
    from experiments.parallel import in_parallel

    from . import runs

    def train(todo: Sequence[RunSettings], label: str) -> list[dict]:
        todo = [one for one in todo if workers or runs.path_of(one, folder).exists()]
        found = in_parallel([(runs.run, (one, folder)) for one in todo], workers, label)
        # Only what the settings determine.
        return [{k: v for k, v in one._asdict().items() if k != 'minutes'} for one in found]

    def settings(arm: str, **options: object) -> RunSettings:
        rest = dict(steps=preset.steps, batch=preset.batch, pictures=preset.pictures)
        return RunSettings(**{**ARMS[arm], **rest, **options})

    if not workers and not any(folder.glob('*.json')):
        raise UserError(f'there is no finished run in {folder}; leave out --finished')
    lr, tuning = preset.rates[0], []
    if len(preset.rates) > 1:
        other = dict(split='tuning', seed=TUNING_SEED + seed, scales=(1,))
        tuning = train([settings(TUNED, lr=lr, **other) for lr in preset.rates], 'tuning')
        best = max(tuning, key=lambda run: sum(run['metrics'][f'{name}, batch 1, size 1']
                                               for name in METRICS))  # fmt: skip
        lr = best['settings']['lr']
    done = train(
        [settings(arm, lr=lr, seed=seed + i, scales=preset.scales)
         for i in range(preset.seeds) for arm in preset.arms], 'training',
    )  # fmt: skip
    found = {
        arm: [run for run in done if {**run['settings'], **ARMS[arm]} == run['settings']]
        for arm in preset.arms
    }
    return {arm: of_arm for arm, of_arm in found.items() if of_arm}, tuning


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(compare_ports, argv, interrupted='run the same command to continue')


if __name__ == '__main__':
    sys.exit(main())
