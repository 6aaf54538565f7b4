"""Checks of the contents of the data sets in a config, before a run.

mm finds most of these defects in the middle of an epoch, as a traceback of a worker process, and
some never: objects of an unknown category or with NaN coordinates train silently.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from mmengine.config import Config

from ...tooling.command import UserError
from ...tooling.files import atomic_write, make_folder
from ..config.load import as_list, dataset_class, is_local, kind_of, leaves
from ..distributed import of_first_process
from .coco import check_coco
from .defects import Checked, Problem, report_lines, stop_with_errors
from .duplicates import shared_images
from .images import Prints
from .label_maps import check_label_maps

SECONDS = 20  # for each data set of a run; larger ones are not read completely


def check_dataset(
    dataset: dict, scope: str, seconds: float = math.inf, prints: Optional[Prints] = None
) -> Optional[Checked]:
    """Check the contents of one data set.

    Args:
        dataset: its config.
        scope: mmdet or mmseg.
        seconds: after which no further images are read completely.
        prints: to fill, to find images that are in another data set, too.

    Returns:
        None for a kind of data set that is not checked: one that is neither a `CocoDataset` nor a
        `BaseSegDataset`, or not in local files.

    Raises:
        UserError: the annotation file is none.
    """
    root = dataset.get('data_root') or ''
    if dataset.get('backend_args') or not is_local(root):
        return None
    steps = [step for step in dataset.get('pipeline') or () if isinstance(step, dict)]
    loads = [step for step in steps if kind_of(step).startswith('Load')]
    by_opencv = kind_of(loads[0]) == 'LoadImageFromFile' if loads else True
    by_opencv &= all(step.get('imdecode_backend', 'cv2') == 'cv2' for step in loads[:1])
    kinds = {base.__name__ for base in dataset_class(dataset, scope).__mro__}
    if kind_of(dataset) == 'CocoDataset' and dataset.get('ann_file'):
        folder = Path(root, (dataset.get('data_prefix') or {}).get('img') or '')
        masks = any(step.get('with_mask') for step in steps)
        path = annotation_file(dataset)
        return check_coco(path, folder, seconds, None, masks, prints, by_opencv)
    if 'BaseSegDataset' in kinds:
        return check_label_maps(dataset, scope, seconds, prints, by_opencv)
    return None


def check_before_run(cfg: Config, *splits: str, skip_bad: bool = False) -> None:
    """Check the contents of the data sets of a run, in its first process.

    Args:
        cfg: the config; with `skip_bad` its data sets are replaced by their good parts.
        *splits: of train, val and test.
        skip_bad: read all images, and continue without what has errors.

    Raises:
        UserError: there are errors, which have been printed.
    """
    errors, good_parts = of_first_process(
        lambda: check_contents(
            cfg,
            *splits,
            folder=Path(cfg.work_dir),
            seconds=math.inf if skip_bad else SECONDS,
            write_good=skip_bad,
        )
    )
    if errors and not skip_bad:
        stop_with_errors()
    use_good_parts(cfg, good_parts)


class Contents(NamedTuple):
    """What the check of the data sets of a config found."""

    errors: int  # kinds of errors
    good_parts: dict[tuple[str, int], str]  # by split and number of a data set, a list of the rest


def check_contents(
    cfg: Config,
    *splits: str,
    folder: Path,
    seconds: float = math.inf,
    write_good: bool = False,
    found: Sequence[Problem] = (),
    compare: bool = False,
) -> Contents:
    """Check the contents of the data sets of a config, and print a line for each problem.

    Args:
        cfg: the config.
        *splits: of train, val and test.
        folder: for the report with all items of all problems, and for the lists of what is good.
        seconds: for each data set, after which no further images are read completely.
        write_good: write lists of what is good, for `use_good_parts`.
        found: problems that are known, and printed, before.
        compare: look for training images in the other splits.
    """
    errors, good, seen = sum(problem.is_error for problem in found), {}, []
    prints = {split: {} for split in splits} if compare else {}
    lines = ['classes, sizes and samples: data.html'] if compare else []
    lines += report_lines(found)
    for split in splits:
        check_evaluators(cfg, split)
        for number, dataset in enumerate(data_of(cfg, split)):
            contents = {k: v for k, v in dataset.items() if k != 'pipeline'}
            if contents in seen and not write_good:  # test is often the same as val
                continue
            seen.append(contents)
            checked = check_dataset(dataset, cfg.default_scope, seconds, prints.get(split))
            if checked is None:
                continue
            name = f'{split}{number or ""}'
            if checked.decoded < checked.images:
                print(
                    f'{name} data: {checked.decoded} of {checked.images} images were read; '
                    'tools/check_data.py reads all'
                )
            for problem in checked.problems:
                print(f'{name} data: {problem}')
            lines.append(f'{name} data: {checked.images} images, {checked.decoded} read completely')
            lines += report_lines(checked.problems)
            bad = sum(problem.is_error for problem in checked.problems)
            errors += bad
            if bad and write_good:
                suffix = 'json' if kind_of(dataset) == 'CocoDataset' else 'txt'
                path = make_folder(folder).absolute() / f'good_{name}.{suffix}'
                if not checked.write_clean(path):
                    raise UserError(f'none of the images of the {split} data is without error')
                good[split, number] = str(path)
    for other in [split for split in prints if split != 'train' and 'train' in prints]:
        problems = shared_problems(prints['train'], prints[other], other)
        for problem in problems:
            print(f'{other} data: {problem}')
        lines += [f'{other} data and train data', *report_lines(problems)] if problems else []
    if any(line.startswith('  ') for line in lines):
        path = make_folder(folder) / 'data_report.txt'
        with atomic_write(path) as file:
            file.write_text('\n'.join(lines) + '\n')
        print(f'all of them: {path}')
    return Contents(errors, good)


def shared_problems(train: Prints, other: Prints, split: str) -> list[Problem]:
    """Warnings about images of a split that are in the training data, too."""
    shared = shared_images(other, train)
    kinds = {
        f'{split} images that are training images, too': shared.exact,
        f'{split} images that look like training images': shared.near,
    }
    return [
        Problem(kind, [f'{path.name} ({same})' for path, same in pairs], False)
        for kind, pairs in kinds.items()
        if pairs
    ]


def use_good_parts(cfg: Config, good_parts: dict[tuple[str, int], str]) -> None:
    """Let the data sets of a config, and the metrics on them, read lists of what is good."""
    for (split, number), path in good_parts.items():
        dataset = data_of(cfg, split)[number]
        before = annotation_file(dataset).resolve()
        dataset.ann_file = path
        for metric in as_list(cfg.get(f'{split}_evaluator')):
            if metric.get('ann_file') and Path(metric['ann_file']).resolve() == before:
                metric['ann_file'] = path


def data_of(cfg: Config, split: str) -> list[dict]:
    """The innermost data sets of a split."""
    loader = cfg.get(f'{split}_dataloader')
    return list(leaves(loader.dataset)) if loader else []


def check_evaluators(cfg: Config, split: str) -> None:
    """Check that the metrics of a split read the annotations of its data set."""
    data = data_of(cfg, split)
    if len(data) != 1 or kind_of(data[0]) != 'CocoDataset' or not data[0].get('ann_file'):
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
