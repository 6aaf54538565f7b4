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
from typing import Any, Literal, NamedTuple, Optional

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

    if unknown := set(arms) - set(ARMS):
        raise UserError(f'--arms must be of {", ".join(ARMS)}; got {", ".join(sorted(unknown))}')
    chosen = PRESETS[preset]
    chosen = chosen._replace(arms=tuple(arms) or chosen.arms, seeds=seeds or chosen.seeds)
    folder = Path(work_dir)
    training = Training(chosen, folder / 'runs', seed, workers or usable_cores(), finished)
    tuning = training.tune()
    runs = training.runs(best_rate(chosen, tuning))
    if not runs:
        raise UserError(f'no run of these models is finished in {folder}; leave out --finished')
    tables = report.tables(runs)
    report.draw(runs, folder / 'padding.png')
    data = dict(runs=runs, tuning=tuning)
    title = 'Ports compared by training'
    answer = LabAnswer('training', title, NOTES, tables, ['padding.png'], data)
    used = {run['settings']['seed'] for of_arm in runs.values() for run in of_arm}
    save(answer, {**chosen._asdict(), 'seeds': sorted(used)}, folder)
    for table in tables:
        print(f'\n{table.text()}')
    print(f'\n{folder / "training.json"}; figure: {folder / "padding.png"}')
    if page:
        write_findings(folder, ['training'], Path(page))
        shutil.copyfile(folder / 'training.json', Path(page).with_suffix('.json'))


class Training(NamedTuple):
    """What is trained, and how.

    Runs are `Result` in JSON, with what their settings determine alone.
    """

    preset: Preset
    folder: Path  # of the runs
    seed: int  # the first one
    workers: int  # processes
    finished: bool  # only read what is there

    def tune(self) -> list[dict]:
        """The runs that the learning rate is chosen by; none if there is one rate only."""
        if len(self.preset.rates) == 1:
            return []
        rest = dict(split='tuning', seed=TUNING_SEED + self.seed, scales=(1,))
        todo = [self.settings(TUNED, lr=lr, **rest) for lr in self.preset.rates]
        return self.train(todo, 'tuning')

    def runs(self, lr: float) -> dict[str, list[dict]]:
        """The runs of each arm, by seed."""
        todo = []
        for seed in range(self.seed, self.seed + self.preset.seeds):
            for arm in self.preset.arms:
                todo.append(self.settings(arm, lr=lr, seed=seed, scales=self.preset.scales))
        found = {}
        for run in self.train(todo, 'training'):
            arms = [arm for arm in self.preset.arms if is_of_arm(run, arm)]
            for arm in arms:
                found.setdefault(arm, []).append(run)
        return {arm: found[arm] for arm in self.preset.arms if arm in found}

    def settings(self, arm: str, **options: Any) -> RunSettings:
        preset = self.preset
        rest = dict(
            steps=preset.steps,
            batch=preset.batch,
            pictures=preset.pictures,
        )
        return RunSettings(**{**ARMS[arm], **rest, **options})

    def train(self, todo: Sequence[RunSettings], label: str) -> list[dict]:
        from experiments.parallel import in_parallel

        from .runs import path_of, run

        if self.finished:
            if not any(self.folder.glob('*.json')):
                raise UserError(f'there is no finished run in {self.folder}; leave out --finished')
            todo = [settings for settings in todo if path_of(settings, self.folder).exists()]
        jobs = [(run, (settings, self.folder)) for settings in todo]
        workers = 1 if self.finished else self.workers
        found = []
        for result in in_parallel(jobs, workers, label):
            fields = result._asdict()
            del fields['minutes']
            found.append(fields)
        return found


def is_of_arm(run: dict, arm: str) -> bool:
    settings = run['settings']
    return all(settings[key] == value for key, value in ARMS[arm].items())


def best_rate(preset: Preset, tuning: Sequence[dict]) -> float:
    """The learning rate with the highest sum of the metrics, or the preset's first one."""

    def score(run: dict) -> float:
        return sum(run['metrics'][f'{name}, batch 1, size 1'] for name in METRICS)

    if not tuning:
        return preset.rates[0]
    return max(tuning, key=score)['settings']['lr']


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(compare_ports, argv, interrupted='run the same command to continue')


if __name__ == '__main__':
    sys.exit(main())
