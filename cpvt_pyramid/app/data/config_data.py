"""The data sets of a config: read into the form in memory and checked, before a run.

mm finds most defects in the middle of an epoch, as a traceback of a worker process, and some never:
objects of an unknown category or with NaN coordinates train silently.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from mmengine.config import Config
from mmengine.registry import TRANSFORMS

from ...checkpoints.reading import listed
from ..config.parts import as_list, classes_of, data_of, dataset_class, is_local, kind_of
from ..config.pipelines import loads_annotations, transforms_in
from ..tooling.command import UserError, one_line
from ..tooling.files import make_folder, write_text
from ..training.processes import of_first_process
from .check import checked_split
from .data import UNREAD, DataImage, MaskValues, Split
from .defects import Defects, Problem, stop_message
from .description import IGNORED
from .images import ALL, NAMES, Reading
from .layouts.coco import parse_coco, read_coco


def check_dataset(
    cfg: Config, split: str, dataset: dict, how: Reading = ALL
) -> Optional[list[Problem]]:
    """What is wrong with a data set of a config; None if it is neither a `CocoDataset` nor a
    `BaseSegDataset`, or not in local files.

    Raises:
        UserError: the annotation file is none, or has other classes.
    """
    if not is_known(cfg, dataset):
        return None
    pipeline = dataset.get('pipeline') or []
    steps = {kind_of(step) for step in transforms_in(pipeline)}
    how = how._replace(
        by_opencv=are_read_by_opencv(pipeline),
        masks_by_pillow='LoadTileAnnotations' not in steps,
    )
    found = Defects(masks=needs_masks(cfg, split, pipeline), as_it_is=True)
    classes = list(classes_of(dataset, cfg.default_scope))
    masks = None
    if is_coco(dataset):
        images = coco_split(cfg, split, dataset, found)
        is_empty_allowed = may_be_empty(cfg, split, dataset)
    else:
        images, masks, classes = masks_of_dataset(dataset, cfg.default_scope)
        is_empty_allowed = False
    checked_split(split, images, classes, masks, how, found, is_empty_allowed)
    return found.problems()


def is_known(cfg: Config, dataset: dict) -> bool:
    """Whether a data set is of a class whose files are read here, and in local files."""
    if dataset.get('backend_args') or not is_local(dataset.get('data_root') or ''):
        return False
    return is_coco(dataset) or is_segmentation(dataset, cfg.default_scope)


def is_coco(dataset: dict) -> bool:
    return kind_of(dataset) == 'CocoDataset' and bool(dataset.get('ann_file'))


def is_segmentation(dataset: dict, scope: str) -> bool:
    return 'BaseSegDataset' in {base.__name__ for base in dataset_class(dataset, scope).__mro__}


# What a run asks


def needs_masks(cfg: Config, split: str, pipeline: Sequence) -> bool:
    """Whether the pipeline of a split loads the masks of all objects, or a metric reads them."""
    if any(step.get('with_mask') for step in transforms_in(pipeline)):
        return True
    return any('segm' in as_list(metric.get('metric')) for metric in coco_metrics(cfg, split))


def coco_metrics(cfg: Config, split: str) -> list[dict]:
    metrics = as_list(cfg.get(f'{split}_evaluator'))
    return [metric for metric in metrics if kind_of(metric) == 'CocoMetric']


def may_be_empty(cfg: Config, split: str, dataset: dict) -> bool:
    """Whether a data set needs no objects: unlabelled images for training beside others, or images
    whose results are only written."""
    if split == 'train':
        is_filtered = (dataset.get('filter_cfg') or {}).get('filter_empty_gt', False)
        return len(data_of(cfg, split)) > 1 and not is_filtered
    metrics = coco_metrics(cfg, split)
    return all(metric.get('format_only') for metric in metrics)


def are_read_by_opencv(pipeline: Sequence) -> bool:
    """Whether the first step of a pipeline that loads something, if any, uses OpenCV."""
    loads = [step for step in transforms_in(pipeline) if kind_of(step).startswith('Load')]
    if not loads:
        return True
    backend = loads[0].get('imdecode_backend', 'cv2')
    return kind_of(loads[0]) == 'LoadImageFromFile' and backend == 'cv2'


# Data sets of objects


def coco_split(cfg: Config, split: str, dataset: dict, found: Defects) -> Split:
    """The images and objects of a `CocoDataset`, with those of its classes alone."""
    path = annotation_file(dataset)
    content = read_coco(path)
    classes = [category['name'] for category in content['categories']]
    if cfg.get('check_classes', True):
        classes = list(classes_of(dataset, cfg.default_scope))
        check_order_of_categories(content['categories'], classes, split, path)
    return parse_coco(content, Split([], image_folder(dataset), path, path.name), classes, found)


def annotation_file(dataset: dict) -> Path:
    return Path(dataset.get('data_root') or '', dataset.get('ann_file') or '')


def image_folder(dataset: dict) -> Path:
    """The folder of the images of a `CocoDataset`."""
    return Path(dataset.get('data_root') or '', (dataset.get('data_prefix') or {}).get('img') or '')


def check_order_of_categories(
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


def check_evaluators(cfg: Config, split: str) -> None:
    """Check that the metrics of a split read the annotations of its data set."""
    data = data_of(cfg, split)
    if len(data) != 1 or not is_coco(data[0]):
        return
    path = annotation_file(data[0])
    for metric in coco_metrics(cfg, split):
        read = metric.get('ann_file')
        if read and Path(read).resolve() != path.resolve():
            raise UserError(
                f'{split}_evaluator reads {read}, but the {split} data are {path}; set '
                f'{split}_evaluator.ann_file to the same file'
            )


# Data sets of segmentation masks


def masks_of_dataset(dataset: dict, scope: str) -> tuple[Split, MaskValues, list[str]]:
    """The images and masks of a `BaseSegDataset`, as its class lists them, what their pixels mean,
    and the classes."""
    declared = classes_of(dataset, scope)
    built = built_dataset(dataset, scope)
    images = Path(built.data_prefix.get('img_path') or '')
    infos = built.load_data_list() if images.is_dir() else []
    if not infos:
        others = sorted({p.suffix for p in images.rglob('*') if p.is_file()})[:6]
        found = f'; it has {", ".join(others)}' if others else ''
        raise UserError(f'{images} has no images with the suffix {built.img_suffix}{found}')
    classes = list(built.METAINFO.get('classes') or declared or map(str, range(IGNORED)))
    first = int(bool(built.reduce_zero_label))
    values = list(range(first, first + len(classes)))
    ignored = {built.ignore_index, IGNORED, *range(first)} - {*values}
    entries = []
    for info in infos:
        mask = info.get('seg_map_path')
        is_there = bool(mask) and Path(mask).is_file()
        image = Path(os.path.relpath(info['img_path'], images)).as_posix()
        entries.append(DataImage(image, UNREAD, [], os.path.abspath(mask) if is_there else None))
    masks = MaskValues(values, tuple(sorted(ignored)))
    return Split(entries, images), masks, classes


def built_dataset(dataset: dict, scope: str) -> Any:
    """A data set without its pipeline, whose files are not listed yet."""
    config = {k: v for k, v in dataset.items() if k not in ('type', 'pipeline')}
    config |= {'pipeline': [], 'lazy_init': True, 'serialize_data': False}
    try:
        return dataset_class(dataset, scope)(**config)
    except Exception as error:  # any class of the user
        raise UserError(f'{kind_of(dataset)} cannot be built: {one_line(error)}') from error


def mask_reader(dataset: dict, scope: str) -> tuple[dict[Path, dict], Any]:
    """What a data set lists for each image, and a function that reads a mask for the test."""
    if not is_segmentation(dataset, scope):
        raise UserError(f'the test data must be a BaseSegDataset, got {kind_of(dataset)}')
    built = built_dataset(dataset, scope)
    default = {'type': 'LoadAnnotations', 'reduce_zero_label': built.reduce_zero_label}
    loads = list(filter(loads_annotations, transforms_in(dataset.get('pipeline'))))
    with TRANSFORMS.switch_scope_and_registry(scope) as registry:
        load = registry.build(loads[0] if loads else default)

    def read(info: dict) -> np.ndarray:
        return load({**info, 'seg_fields': []})['gt_seg_map']

    return {Path(info['img_path']).resolve(): info for info in built.load_data_list()}, read


# A whole config


def check_before_run(cfg: Config, *splits: str, folder: Path, leave_out: str = '') -> None:
    """Check the annotations of a run in its first process. Images only have to exist.

    Args:
        cfg: the config.
        splits: names of the splits.
        folder: gets a report.
        leave_out: see `stop_message`.

    Raises:
        UserError: there are errors, which have been printed.
    """

    def check() -> None:
        if check_contents(cfg, *splits, folder=folder, how=NAMES):
            raise UserError(stop_message(leave_out))

    of_first_process(check)


def check_contents(cfg: Config, *splits: str, folder: Path, how: Reading = ALL) -> int:
    """Check the data sets of a config, and print a line for each problem; `folder` gets a report
    with all items of all problems.

    Returns:
        The number of kinds of errors.
    """
    every: list[tuple[str, Problem]] = []
    for split in splits:
        check_evaluators(cfg, split)
    for split, number, dataset in distinct_data(cfg, splits):
        if not is_known(cfg, dataset):
            continue
        name = f'{split}{number or ""} data'
        problems = check_dataset(cfg, split, dataset, how) or []
        for problem in problems:
            print(f'{name}: {problem}')
            every.append((f'{name}: ', problem))
        if not how.pixels:
            print(f'{name}: only annotations were checked; cpvt check-data CONFIG reads all images')
    write_data_report([(name, problem) for name, problem in every], folder)
    return sum(problem.is_error for _, problem in every)


def write_data_report(problems: Sequence[tuple[str, Problem]], folder: Path) -> None:
    """Write all that problems name to a file, and print its path."""
    if not problems:
        return
    path = make_folder(folder) / 'data_report.txt'
    lines = [name + '\n'.join(problem.lines) for name, problem in problems]
    write_text(path, '\n'.join(lines) + '\n')
    print(f'all of them: {path}')


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
