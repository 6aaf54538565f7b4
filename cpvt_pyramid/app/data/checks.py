"""Checks of the contents of the data sets in a config, before a run.

mm finds most of these defects in the middle of an epoch, as a traceback of a worker process, and
some never: objects of an unknown category or with NaN coordinates train silently.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

from mmengine.config import Config

from ...checkpoints.reading import listed
from ..config.parts import (
    as_list,
    classes_of,
    data_of,
    is_local,
    kind_of,
)
from ..tooling.command import UserError
from ..tooling.files import make_folder, write_text
from ..training.processes import of_first_process
from .coco import check_coco, read_coco
from .defects import Checked, Problem, stop_with_errors
from .images import Effort
from .label_maps import check_label_maps, is_segmentation

SECONDS = 20  # for each data set of a run; larger ones are not read completely


def check_dataset(
    cfg: Config,
    split: str,
    dataset: dict,
    seconds: float = math.inf,
) -> Optional[Checked]:
    """Check the contents of a data set of a config; None if it is neither a `CocoDataset` nor a
    `BaseSegDataset`, or not in local files.

    Raises:
        UserError: the annotation file is none, or has other classes.
    """
    if dataset.get('backend_args') or not is_local(dataset.get('data_root') or ''):
        return None
    steps = [step for step in dataset.get('pipeline') or () if isinstance(step, dict)]
    effort = Effort(seconds=seconds, by_opencv=are_read_by_opencv(steps))
    if is_coco(dataset):
        masks = any(step.get('with_mask') for step in steps) or evaluates_masks(cfg, split)
        path = annotation_file(dataset)
        content = read_coco(path)
        problems = []
        if cfg.get('check_classes', True):
            classes = classes_of(dataset, cfg.default_scope)
            check_categories(content['categories'], classes, split, path)
            problems = problems_of_other_classes(content, classes)
        checked = check_coco(path, image_folder(dataset), effort, content, masks)
        return checked._replace(problems=[*checked.problems, *problems])
    if is_segmentation(dataset, cfg.default_scope):
        return check_label_maps(dataset, cfg.default_scope, effort)
    return None


def evaluates_masks(cfg: Config, split: str) -> bool:
    """Whether a metric of a split reads the masks of all objects, as COCO's for `segm` does."""
    for metric in as_list(cfg.get(f'{split}_evaluator')):
        if kind_of(metric) == 'CocoMetric' and 'segm' in as_list(metric.get('metric')):
            return True
    return False


def are_read_by_opencv(steps: Sequence[dict]) -> bool:
    """Whether the first step of a pipeline that loads something, if any, uses OpenCV."""
    loads = [step for step in steps if kind_of(step).startswith('Load')]
    if not loads:
        return True
    backend = loads[0].get('imdecode_backend', 'cv2')
    return kind_of(loads[0]) == 'LoadImageFromFile' and backend == 'cv2'


def check_before_run(cfg: Config, *splits: str, folder: Path) -> None:
    """Check the contents of the data sets of a run, in its first process, for some seconds.

    Args:
        cfg: the config.
        splits: names of the splits.
        folder: gets a report.

    Raises:
        UserError: there are errors, which have been printed.
    """

    def check() -> None:
        if check_contents(cfg, *splits, folder=folder, seconds=SECONDS):
            stop_with_errors()

    of_first_process(check)


def check_contents(
    cfg: Config,
    *splits: str,
    folder: Path,
    seconds: float = math.inf,
    found: Sequence[Problem] = (),
) -> int:
    """Check the contents of the data sets of a config, and print a line for each problem.

    `folder` gets a report with all items of all problems, those included that were `found` and
    printed before; warnings of their kinds are not repeated. After `seconds` of a data set, no
    further images are read completely.

    Returns:
        The number of kinds of errors.
    """
    every = [('', problem) for problem in found]
    known = {problem.kind for problem in found if not problem.is_error}

    def report(name: str, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if not problem.is_error and problem.kind in known:
                continue
            print(f'{name} data: {problem}')
            every.append((f'{name} data: ', problem))

    for split in splits:
        check_evaluators(cfg, split)
    for split, number, dataset in distinct_data(cfg, splits):
        checked = check_dataset(cfg, split, dataset, seconds)
        if checked is None:
            continue
        name = f'{split}{number or ""}'
        if checked.decoded < checked.images:
            print(
                f'{name} data: {checked.decoded} of {checked.images} images were read; '
                'cpvt check-data reads all'
            )
        report(name, checked.problems)
    if every:
        path = make_folder(folder) / 'data_report.txt'
        lines = [name + '\n'.join(problem.lines) for name, problem in every]
        write_text(path, '\n'.join(lines) + '\n')
        print(f'all of them: {path}')
    return sum(problem.is_error for _, problem in every)


def distinct_data(cfg: Config, splits: Sequence[str]) -> Iterator[tuple[str, int, dict]]:
    """The innermost data sets of some splits, with the split and their number in it. One that
    differs only in its pipeline from one before, as test often from val, is left out."""
    seen = []
    for split in splits:
        for number, dataset in enumerate(data_of(cfg, split)):
            contents = {k: v for k, v in dataset.items() if k not in ('pipeline', 'test_mode')}
            if contents not in seen:
                yield split, number, dataset
            seen.append(contents)


def is_coco(dataset: dict) -> bool:
    return kind_of(dataset) == 'CocoDataset' and bool(dataset.get('ann_file'))


def check_categories(
    categories: list[dict], classes: Sequence[str], split: str, path: Path
) -> None:
    """Check that the categories of a COCO file at `path` are the classes, in the same order.

    mmdet skips classes, and their objects, that the file does not name, and numbers the others in
    the order of the file.
    """
    names = [str(category.get('name')) for category in categories]
    if list(classes) != [name for name in names if name in classes]:
        raise UserError(
            f'{path} must have the classes of the {split} data in their order, '
            f'{listed(classes)}; it has {listed(names)}. Set '
            f'{split}_dataloader.dataset.metainfo.classes to its categories'
        )


def problems_of_other_classes(content: dict, classes: Sequence[str]) -> list[Problem]:
    """A warning about objects that mmdet leaves out because their category is not a class: it may
    have been added to the data after the config was written."""
    names = {repr(category.get('id')): category.get('name') for category in content['categories']}
    counts = Counter(names.get(repr(a.get('category_id'))) for a in content['annotations'])
    left_out = [
        f'{name} ({count} objects)'
        for name, count in counts.items()
        if name is not None and name not in classes
    ]
    kind = 'categories that are not among the classes of the config: OpenMMLab leaves them out'
    return [Problem(kind, left_out, is_error=False)] if left_out else []


def check_evaluators(cfg: Config, split: str) -> None:
    """Check that the metrics of a split read the annotations of its data set."""
    data = data_of(cfg, split)
    if len(data) != 1 or not is_coco(data[0]):
        return
    path = annotation_file(data[0])
    for metric in as_list(cfg.get(f'{split}_evaluator')):
        read = metric.get('ann_file')
        if kind_of(metric) == 'CocoMetric' and read and Path(read).resolve() != path.resolve():
            raise UserError(
                f'{split}_evaluator reads {read}, but the {split} data are {path}; set '
                f'{split}_evaluator.ann_file to the same file'
            )


def annotation_file(dataset: dict) -> Path:
    return Path(dataset.get('data_root') or '', dataset.get('ann_file') or '')


def image_folder(dataset: dict) -> Path:
    """The folder of the images of a `CocoDataset`."""
    return Path(dataset.get('data_root') or '', (dataset.get('data_prefix') or {}).get('img') or '')
