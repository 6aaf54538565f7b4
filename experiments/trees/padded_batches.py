"""Test the detectors of trees, which were trained without padding, in padded batches.

    cpvt demo-data trees
    python -m experiments.trees --arms distilled resnet18
    python -m experiments.trees.padded_batches

All crops of a batch have one size in that training. Here each photograph is tested in a batch with
a larger one, so that a share of its padded image is padding. Prints and writes tables with the AP50
and with the boxes that are not there when the photograph is alone, and a figure.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from cpvt_pyramid.tooling.command import check_at_least, prepare_for_torch, run_command
from cpvt_pyramid.tooling.files import make_folder, write_text
from cpvt_pyramid.tooling.threads import usable_cores

from .runs import runs_of

prepare_for_torch()  # before torch is imported

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)  # of the padded image that is padding; 0: alone
PLACES = {'Yellowstone': 'val', 'Florida and California': 'test'}  # and their splits
NEIGHBOR = 'whole/2019_YELL_2_528000_4978000_image_crop2.png'  # a corner of it, of any size


# What `measure` returns for each run of a setting.
Results = dict[str, list[dict[str, list[float]]]]


class Setting(NamedTuple):
    """How a detector is tested.

    Attributes:
        arm: of its training.
        preprocessor: the type of its data preprocessor.
        by_size: batches are divided by the sizes of their images, as in cpvt test.
    """

    arm: str
    preprocessor: str
    by_size: bool = False


SETTINGS = {
    'ours, cpvt test': Setting('distilled', 'ValidRegionDetDataPreprocessor', by_size=True),
    'ours, valid region': Setting('distilled', 'ValidRegionDetDataPreprocessor'),
    'ours, without': Setting('distilled', 'DetDataPreprocessor'),
    'ResNet-18': Setting('resnet18', 'DetDataPreprocessor'),
}


def padded_batches(
    *, work_dir: str = 'work_dirs/trees_seeds', workers: Optional[int] = None
) -> None:
    """Test all that is trained, and print the tables.

    Args:
        work_dir: folder of the trainings, and of the results
        workers: tests at the same time, of one thread each (default: the number of cores)
    """
    check_at_least('--workers', workers, 1)
    folder = make_folder(work_dir)
    jobs = {}
    for name, setting in SETTINGS.items():
        jobs[name] = [(measure, (run, setting)) for run in runs_of(setting.arm, folder)]

    from experiments.parallel import groups_in_parallel

    results = groups_in_parallel(jobs, workers or usable_cores(), 'tests')
    text = '\n\n'.join(table.markdown() for table in tables(results))
    draw(results, folder / 'padded_batches.png')
    write_text(folder / 'padded_batches.md', text + '\n')
    write_text(folder / 'padded_batches.json', json.dumps(results, indent=1) + '\n')
    print(text)
    print(f'\n{folder / "padded_batches.md"}; figure: {folder / "padded_batches.png"}')


def measure(run: Path, setting: Setting) -> dict[str, list[float]]:
    """AP50 in each place, and the share of boxes that differ in all of them: a number for each of
    `SHARES`."""
    import torch
    from mmdet.apis import init_detector
    from mmengine.config import Config

    from benchmarks.models.detections import detect, found_alone
    from cpvt_pyramid.predict.images import load_image
    from cpvt_pyramid.predict.openmmlab.grouping import divide_batches

    from .runs import SCORE, files_of, load_truth, precision

    torch.set_num_threads(1)
    config, checkpoint = files_of(run)
    cfg = Config.fromfile(str(config))
    cfg.model.data_preprocessor.type = setting.preprocessor
    model = init_detector(cfg, checkpoint, device='cpu')
    if setting.by_size:
        divide_batches(model)
    root = Path(cfg.data_root)
    neighbor = load_image(root / NEIGHBOR)
    measures: dict[str, list[float]] = {place: [] for place in PLACES}
    counts = [0] * len(SHARES)
    changes = [0] * len(SHARES)
    for place, split in PLACES.items():
        truth = load_truth(root, split)
        found: list[dict[int, Any]] = [{} for _ in SHARES]
        for image_id, image in truth.imgs.items():
            photograph = load_image(root / split / image['file_name'])
            for i, share in enumerate(SHARES):
                height, width = larger(*photograph.shape[:2], share)
                others = [neighbor[:height, :width]] if share else []
                boxes, scores = detect(model, photograph, *others)
                found[i][image_id] = boxes, scores
                same = found_alone(boxes, scores, *found[0][image_id])
                counts[i] += int((scores > SCORE).sum())
                changes[i] += int((scores > SCORE)[~same].sum())
        measures[place] = [precision(truth, of_share)['AP50'] for of_share in found]
    measures['changed'] = [change / max(count, 1) for change, count in zip(changes, counts)]
    return measures


def larger(height: int, width: int, share: float) -> tuple[int, int]:
    """The size of an image next to which this share of the padded smaller one is padding."""
    factor = 1 / math.sqrt(1 - share)
    return round(height * factor), round(width * factor)


def tables(results: Results) -> list:
    return [*(precision_table(results, place) for place in PLACES), changes_table(results)]


def precision_table(results: Results, place: str):
    """The AP50 alone, and how much it changes with padding, paired by seed and with p values that
    are adjusted for the number of differences (Holm)."""
    from experiments.report import Table
    from experiments.statistics import estimate, holm, paired_difference, with_p

    differences = {}
    for name, runs in results.items():
        alone, *padded = zip(*(run[place] for run in runs))
        differences[name] = [paired_difference(values, alone) for values in padded]
    p_values = [difference.p for of_name in differences.values() for difference in of_name]
    adjusted = iter(holm(p_values))
    rows = []
    for name, runs in results.items():
        alone = estimate([run[place][0] for run in runs]).show()
        changes = [with_p(difference, next(adjusted)) for difference in differences[name]]
        rows.append([f'{name}, {len(runs)} seeds', alone, *changes])
    title = f'{place}: AP50 alone, in %, and its change in a batch, in points (p)'
    return Table(title, ['', 'alone', *share_names()], rows)


def changes_table(results: Results):
    from experiments.report import Table
    from experiments.statistics import estimate

    rows = []
    for name, runs in results.items():
        _, *padded = zip(*(run['changed'] for run in runs))
        rows.append([name, *(estimate(values).show() for values in padded)])
    return Table('Boxes that are not there alone, in %', ['', *share_names()], rows)


def share_names() -> list[str]:
    return [f'{share:.0%} padding' for share in SHARES[1:]]


def draw(results: Results, path: Path) -> None:
    """A panel for each place and one for the boxes: means over the seeds and their intervals."""
    import numpy as np

    from experiments import figures

    colors = dict(zip(SETTINGS, (figures.BLUE, '#7fb3d5', figures.ACCENT, figures.GREY)))
    titles = {place: f'{place}: AP50' for place in PLACES}
    titles['changed'] = 'Boxes that are not there alone, %'
    x = [100 * share for share in SHARES]
    with figures.figure(path, 1, len(titles), (3.2 * len(titles), 3.2)) as (fig, axes):
        for axis, (key, title) in zip(axes.flat, titles.items()):
            for name, runs in results.items():
                values = 100 * np.array([run[key] for run in runs])
                figures.curve(axis, x, values, color=colors[name], marker='o', label=name)
            axis.set_title(title)
            axis.set_xlabel('padding, % of the padded image')
            axis.set_ylim(bottom=0)
        figures.legend_below(fig, axes.flat[0].get_legend_handles_labels()[0])


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(padded_batches, argv)


if __name__ == '__main__':
    sys.exit(main())
