"""A config for a folder with data: recognizes its layout and adapts a recipe to it."""

import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import combinations
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Union

import numpy as np
from mmengine.config import Config

from ...results.drawing import class_palette
from ...tooling.command import UserError
from ...tooling.files import check_file, write_text
from ..config.load import kind_of, load_config
from .coco import read_coco_files
from .config_source import Code, text_of_settings
from .defects import Defects, Problem
from .folder import GENERATED, SPLITS, Files, NotRecognized
from .label_maps import LabelMaps, Pair, find_label_maps, write_indices
from .objects import Objects, divide, validation_part, with_masks
from .recipes import Scales, adapted_recipe, pipeline_of, steps
from .voc import read_voc
from .yolo import read_yolo

HERE = '{{ fileDirname }}'


class Data(NamedTuple):
    """The data sets of a config, and what is known about them."""

    layout: str
    classes: list[str]
    palette: list[tuple[int, int, int]]
    datasets: dict[str, list[dict]]  # configs of the data sets of train, val and test
    images: dict[str, int]  # number of images of each of them
    sizes: np.ndarray  # (N, 2) heights and widths of the training images
    lines: list[str]  # what was found
    objects: np.ndarray = np.zeros(0)  # (M,) sides of squares with the areas of their objects
    image_of: np.ndarray = np.zeros(0, int)  # (M,) index into sizes for each object
    reduce_zero_label: bool = False


class Generated(NamedTuple):
    """The folder of what is written next to a config."""

    path: Path  # renamed when all is written
    name: str  # after that

    def write(self, name: str, text: str) -> str:
        """Write a file; returns its path as the config has it."""
        self.path.mkdir(exist_ok=True)
        (self.path / name).write_text(text, encoding='utf-8')
        return f'{HERE}/{self.name}/{name}'


def new_config(data: Path, base: Path, out: Path, skip_bad: bool, overwrite: bool) -> list[str]:
    """Write a config for a folder with data, and the files that it needs next to it.

    Args:
        data: the folder.
        base: config with the model and the recipe.
        out: the config to write. Converted annotations go to a folder next to it, OUT_data.
        skip_bad: leave out what has errors.
        overwrite: replace files that exist.

    Returns:
        Lines for people: what was found and written.
    """
    folder = out.with_name(out.stem + GENERATED)
    check_output(out, folder, base, overwrite)
    cfg = load_config(base)
    task = task_of(cfg, base)
    partial = folder.with_name(f'.{folder.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)
    try:
        found = data_of_folder(data, task, Generated(partial, folder.name), skip_bad)
        text, lines = config_text(cfg, found, task, data, base, out)
        if partial.exists():
            shutil.copytree(partial, folder, dirs_exist_ok=True)
        write_text(out, text)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    written = f'{out} and {folder}/' if folder.exists() else str(out)
    return [*found.lines, *lines, f'wrote {written}']


def check_output(out: Path, folder: Path, base: Path, overwrite: bool) -> None:
    if out.suffix != '.py':
        raise UserError(f'--out must be a .py file, got {out}')
    if re.search(r"""['"\\{}\n]""", os.path.abspath(out)):
        raise UserError(f'the path of --out must have no quotes, braces and backslashes, got {out}')
    if base.exists() and out.exists() and base.samefile(out):
        raise UserError(f'--out must not be the base, got {out} for both')
    for path in (out, folder):
        if path.exists() and not overwrite:
            raise UserError(f'{path} exists; choose another --out, or replace it with --overwrite')
    check_file(out)


def task_of(cfg: Config, base: Path) -> str:
    """detection, instance or segmentation."""
    loaders = [f'{split}_dataloader' for split in ('train', 'val', 'test')]
    evaluators = ['val_evaluator', 'test_evaluator']
    for key in ('train_cfg', 'optim_wrapper', *loaders, *evaluators):
        if not cfg.get(key):
            raise UserError(f'{base} must be the config of a training; it has no {key}')
    if cfg.default_scope == 'mmseg':
        return 'segmentation'
    pipeline = pipeline_of(cfg, 'train')
    loads = [step for step in steps(pipeline) if kind_of(step).startswith('LoadAnn')]
    if any(step.get('with_seg') for step in loads) or 'Panoptic' in kind_of(cfg.model):
        raise UserError(f'{base} is panoptic; the base must detect objects or segment images')
    return 'instance' if any(step.get('with_mask') for step in loads) else 'detection'


# Data


def data_of_folder(data: Path, task: str, target: Generated, skip_bad: bool) -> Data:
    """Read a folder with data and write what has to be converted.

    Args:
        data: the folder.
        task: detection, instance or segmentation.
        target: the folder to write to.
        skip_bad: leave out what has errors.
    """
    with reported(Defects(), skip_bad) as defects:
        if task == 'segmentation':
            maps = find_label_maps(data, defects)
        else:
            objects = find_objects(data, defects, skip_bad)
            objects = with_masks(objects, defects) if task == 'instance' else objects
    if task == 'segmentation':
        return label_map_data(maps, data, target)
    return object_data(objects, data, target)


@contextmanager
def reported(defects: Defects, skip_bad: bool) -> Iterator[Defects]:
    """Print what was found, also where reading ends with an error, which it may be the cause of;
    then stop at errors."""
    try:
        yield defects
    finally:
        defects.report()
    defects.stop(skip_bad)


def find_objects(root: Path, defects: Defects, skip_bad: bool = False) -> Objects:
    """Read the boxes and polygons in a folder.

    Args:
        root: the folder.
        defects: collects what is wrong with files; what is returned is without it.
        skip_bad: read COCO files without what has errors.

    Raises:
        NotRecognized: no layout is recognized.
        UserError: a file is broken as a whole.
    """
    files = Files(root)
    found = (
        read_coco_files(files, defects, skip_bad, torn=False)
        or read_yolo(files, defects)
        or read_voc(files, defects)
        or read_coco_files(files, defects, skip_bad, torn=True)
    )
    if found:
        return found
    suffixes = Counter(PurePosixPath(name).suffix for name in files.names).most_common(6)
    listed = ', '.join(f'{count} {suffix or "other"}' for suffix, count in suffixes)
    raise NotRecognized(
        f'{root} has none of the layouts COCO (a JSON file), YOLO (data.yaml or labels/*.txt) and '
        f'Pascal VOC (*.xml); it has {listed} files. Label maps need a segmentor as base, such as '
        'configs/semantic_fpn_cpvt_s.py'
    )


@contextmanager
def config_of_folder(data: Path, out_dir: Path) -> Iterator[tuple[Config, list[Problem]]]:
    """A config with the data in a folder, for their check, and what was found wrong so far.

    Args:
        data: the folder.
        out_dir: folder for the report.
    """
    defects = Defects()
    with TemporaryDirectory() as temporary:
        target = Generated(Path(temporary, 'folder'), 'folder')
        with reported(defects, skip_bad=True):
            try:
                objects = find_objects(data, defects, skip_bad=True)
            except NotRecognized as error:
                try:
                    maps = find_label_maps(data, defects)
                except NotRecognized as other:
                    raise UserError(f'{error}. {other}') from other
                found = label_map_data(maps, data, target)
            else:
                found = object_data(objects, data, target)
        print('\n'.join(found.lines))
        settings = {
            'default_scope': 'mmdet' if found.objects.size else 'mmseg',
            'work_dir': str(out_dir),
            'data_root': os.path.abspath(data),
            'metainfo': dict(classes=tuple(found.classes), palette=list(found.palette)),
            'train_pipeline': [],
            'test_pipeline': [],
        }
        for split, datasets in found.datasets.items():
            settings[f'{split}_dataloader'] = dict(dataset=one_of(datasets))
        out = Path(temporary, 'folder.py')
        out.write_text(text_of_settings(settings), encoding='utf-8')
        # Warnings about a COCO file come again when the file is checked with its images.
        is_known = found.layout == 'COCO'
        yield Config.fromfile(out), [p for p in defects.problems() if p.is_error or not is_known]


def object_data(found: Objects, data: Path, target: Generated) -> Data:
    """The data of a detector; writes annotations that are no COCO file of the folder."""
    splits = dict(found.splits)
    require_training_data(splits, data)
    if not splits['train'].content['annotations']:
        raise UserError(f'the training data in {data} have no objects')
    notes = list(found.notes)
    if 'val' not in splits:
        chosen = validation_part(len(splits['train'].content['images']))
        splits['train'], splits['val'] = divide(splits['train'], chosen)
        notes.append(validation_note(splits['val'].content['images']))
    names = {
        key: {str(split.folder / image['file_name']) for image in split.content['images']}
        for key, split in splits.items()
    }
    datasets, images, lines = {}, {}, []
    for key, (content, folder, path) in in_order(splits):
        if path:
            ann_file = relative(path, data)
        else:
            ann_file = target.write(f'{key}.json', json.dumps(content, ensure_ascii=False))
        prefix = relative(folder, data)
        options = dict(
            ann_file=ann_file, data_prefix=dict(img='' if prefix == '.' else f'{prefix}/')
        )
        if key == 'train':
            options['filter_cfg'] = dict(filter_empty_gt=False, min_size=1)
        else:
            options['test_mode'] = True
        datasets[key] = [dataset_config('CocoDataset', key, options)]
        images[key] = len(content['images'])
        classes = {category['id']: category['name'] for category in content['categories']}
        counts = Counter(classes.get(a['category_id']) for a in content['annotations'])
        empty = images[key] - len({a['image_id'] for a in content['annotations']})
        lines.append(
            f'{key}: {images[key]} images ({empty} without objects), {sum(counts.values())} '
            f'objects: {shown_counts(counts)}'
        )
    content = splits['train'].content
    rows = {image['id']: row for row, image in enumerate(content['images'])}
    areas = [max(a['bbox'][2] * a['bbox'][3], 0) for a in content['annotations']]
    return Data(
        found.layout, found.classes, class_palette(found.classes), datasets, images,
        sizes=np.array([(image['height'], image['width']) for image in content['images']], float),
        lines=lines_about(found, data, lines, [*notes, *shared_notes(names)]),
        objects=np.sqrt(areas),
        image_of=np.array([rows[a['image_id']] for a in content['annotations']], int),
    )  # fmt: skip


def label_map_data(found: LabelMaps, data: Path, target: Generated) -> Data:
    """The data of a segmentor; writes lists of images, and label maps of indices where the values
    of the files are others."""
    splits, notes = dict(found.splits), list(found.notes)
    require_training_data(splits, data)
    if 'val' not in splits:
        chosen = validation_part(len(splits['train']))
        both = [[p for p, c in zip(splits['train'], chosen) if c == part] for part in (0, 1)]
        splits['train'], splits['val'] = both
        notes.append(validation_note(splits['val']))
    groups = {key: grouped(pairs) for key, pairs in splits.items()}
    labels = ''  # the folder of converted label maps
    if found.codes or max(map(len, groups.values())) > 8:
        labels = f'{HERE}/{target.name}/labels'
        notes.append('label maps were written as class indices next to the config')
        for key, pairs in splits.items():
            written = [
                Pair(p.image, str(PurePosixPath(p.image).with_suffix('.png'))) for p in pairs
            ]
            groups[key] = grouped(written)
            for (_, before), (_, after) in zip(pairs, written):
                path = target.path / 'labels' / after
                path.parent.mkdir(parents=True, exist_ok=True)
                if found.codes:
                    write_indices(data / before, path, found)
                else:
                    shutil.copyfile(data / before, path)
    datasets, lines = {}, []
    for key, pairs in in_order(splits):
        datasets[key] = []
        for (images, suffix, maps, map_suffix), names in groups[key].items():
            folders = dict(img_path=images, seg_map_path=joined(labels, maps))
            options = dict(img_suffix=suffix, seg_map_suffix=map_suffix, data_prefix=folders)
            if names != in_folder(data / images, suffix):
                file = f'{key}{len(datasets[key]) or ""}.txt'
                options['ann_file'] = target.write(file, ''.join(f'{name}\n' for name in names))
            options['reduce_zero_label'] = found.reduce_zero_label
            datasets[key].append(dataset_config('BaseSegDataset', key, options))
        lines.append(f'{key}: {len(pairs)} images')
    counts = Counter(dict(zip(found.classes, found.pixels)))
    total = max(sum(found.pixels), 1)
    shares = [f'{name} {count / total:.1%}' for name, count in counts.most_common(8)]
    lines.append(f'pixels: {", ".join(shares)}' + (' ...' if len(counts) > 8 else ''))
    notes += shared_notes({key: {p.image for p in pairs} for key, pairs in splits.items()})
    return Data(
        found.layout, found.classes, found.palette, datasets,
        {key: len(pairs) for key, pairs in splits.items()},
        sizes=np.array([found.sizes[pair.image] for pair in splits['train']], float),
        lines=lines_about(found, data, lines, notes),
        reduce_zero_label=found.reduce_zero_label,
    )  # fmt: skip


def in_order(splits: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, splits[key]) for key in SPLITS if key in splits]


def dataset_config(kind: str, split: str, options: dict) -> dict:
    common = dict(type=kind, data_root=Code('data_root'), metainfo=Code('metainfo'))
    pipeline = Code('train_pipeline' if split == 'train' else 'test_pipeline')
    return dict(**common, **options, pipeline=pipeline)


def shared_notes(images: dict[str, set[str]]) -> list[str]:
    """Notes about images in two splits."""
    pairs = ((a, b, len(images[a] & images[b])) for a, b in combinations(images, 2))
    return [
        f'{shared} images are in {one} and in {other}' for one, other, shared in pairs if shared
    ]


def require_training_data(splits: dict, data: Path) -> None:
    if not splits.get('train'):
        raise UserError(f'{data} has no training data, only {" and ".join(splits)}')


def validation_note(chosen: Sequence) -> str:
    return (
        f'no validation data: {len(chosen)} training images, chosen at random with seed 0, are '
        'used for it. Divide frames of a video or views of one scene yourself'
    )


def lines_about(
    found: Union[Objects, LabelMaps], data: Path, lines: list[str], notes: list[str]
) -> list[str]:
    """What was found, in lines for people."""
    head = f'{data}: {found.layout}, {len(found.classes)} classes: {shown(found.classes)}'
    return [head, *lines, *(f'note: {note}' for note in notes)]


def shown(names: Sequence[str]) -> str:
    return ', '.join(names[:12]) + (' ...' if len(names) > 12 else '')


def shown_counts(counts: Counter) -> str:
    rare = f' ... {counts.most_common()[-1][0]} {min(counts.values())}' if len(counts) > 8 else ''
    return ', '.join(f'{name} {count}' for name, count in counts.most_common(8)) + rare


def relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


def grouped(pairs: Sequence[Pair]) -> dict[tuple[str, str, str, str], list[str]]:
    """Names of images by what BaseSegDataset adds to them: folder and suffix of images and label
    maps."""
    by_ends = defaultdict(list)
    for pair in pairs:
        image, label = PurePosixPath(pair.image), PurePosixPath(pair.label)
        name = os.path.commonprefix([image.stem, label.stem])
        if name not in (image.stem, label.stem):
            name = re.sub('[ _.-]?[A-Za-z]*$', '', name)
        folders = [list(path.parts[:-1]) for path in (image, label)]
        inner = []
        while all(folders) and folders[0][-1] == folders[1][-1]:
            inner.insert(0, folders[0].pop())
            folders[1].pop()
        ends = image.name[len(name) :], label.name[len(name) :]
        key = '/'.join(folders[0]), ends[0], '/'.join(folders[1]), ends[1]
        by_ends[key].append('/'.join([*inner, name]))
    found = {}
    for (images, suffix, maps, map_suffix), names in by_ends.items():
        parts = os.path.commonprefix([name.split('/')[:-1] for name in names])
        prefix = '/'.join(parts)
        key = joined(images, prefix), suffix, joined(maps, prefix), map_suffix
        found[key] = sorted(name[len(prefix) :].lstrip('/') for name in names)
    return found


def joined(*parts: str) -> str:
    return '/'.join(filter(None, parts))


def in_folder(folder: Path, suffix: str) -> list[str]:
    """The names that BaseSegDataset finds in a folder of images."""
    found = [p.relative_to(folder).as_posix() for p in folder.rglob(f'*{suffix}') if p.is_file()]
    return sorted(name.removesuffix(suffix) for name in found)


# The config


def config_text(
    cfg: Config, data: Data, task: str, root: Path, base: Path, out: Path
) -> tuple[str, list[str]]:
    """The text of a config, and lines for people about it.

    Args:
        cfg: the base.
        data: the data sets.
        task: detection, instance or segmentation.
        root: the folder with the data.
        base: the path of the base.
        out: the path of the config.
    """
    here = Path(os.path.abspath(out)).parent
    scaled = Scales.of(cfg, data.sizes, task)
    recipe = adapted_recipe(cfg, data.images['train'])
    settings = {
        '_base_': relative(Path(os.path.abspath(base)), here),
        'data_root': f'{HERE}/{relative(Path(os.path.abspath(root)), here)}',
        'metainfo': dict(classes=tuple(data.classes), palette=list(data.palette)),
    }
    if changes := model_changes(cfg.model, len(data.classes), scaled):
        settings['model'] = changes
    for key, pipeline in (
        ('train_pipeline', pipeline_of(cfg, 'train')),
        ('test_pipeline', pipeline_of(cfg, 'val')),
        ('tta_pipeline', cfg.get('tta_pipeline')),
    ):
        if pipeline:
            settings[key] = scaled.pipeline(pipeline, data.reduce_zero_label)
    settings |= loaders(cfg, data, recipe.batch) | evaluators(data, task) | recipe.settings
    comments = {'train_pipeline': scaled.comment, **recipe.comments}
    head = (
        f'# {len(data.classes)} classes, {sum(data.images.values())} images ({data.layout}). '
        'Written by tools/new_config.py.\n'
        f'#   python tools/check_data.py {out.name}\n#   python tools/train.py {out.name}\n'
    )
    lines = [scaled.line(data.sizes, data.objects, data.image_of), recipe.line]
    return head + text_of_settings(settings, comments), lines


def loaders(cfg: Config, data: Data, batch_size: int) -> dict[str, Any]:
    """The settings of the data loaders."""
    found = {}
    workers = min(cfg.train_dataloader.get('num_workers', 2), os.cpu_count() or 1)
    for split in ('train', 'val', 'test'):
        # mmengine would merge it into the base's.
        whole = dict(_delete_=True, **one_of(data.datasets.get(split) or data.datasets['val']))
        batch = dict(batch_size=batch_size) if split == 'train' else {}
        found[f'{split}_dataloader'] = dict(**batch, num_workers=workers, dataset=whole)
    return found


def one_of(datasets: list[dict]) -> dict:
    """A data set of one or several."""
    several = dict(type='ConcatDataset', datasets=datasets)
    return several if len(datasets) > 1 else datasets[0]


def evaluators(data: Data, task: str) -> dict[str, Any]:
    """The settings of the metrics."""
    found = {}
    for split in ('val', 'test'):
        if task == 'segmentation':
            metric = dict(type='IoUMetric', iou_metrics=['mIoU'])
        else:
            (dataset,) = data.datasets.get(split) or data.datasets['val']
            file = dataset['ann_file']
            metric = dict(
                type='CocoMetric',
                ann_file=file if file.startswith(HERE) else Code(f'data_root + {"/" + file!r}'),
                metric=['bbox', 'segm'] if task == 'instance' else 'bbox',
            )
        found[f'{split}_evaluator'] = dict(_delete_=True, **metric)
    return found


def model_changes(model: Any, classes: int, scaled: Scales) -> dict:
    """What changes in a model for another number of classes and size of crops."""
    changed = deepcopy(model.to_dict())
    count = set_classes(changed, classes)
    if not count:
        raise UserError('the model of the base has no num_classes')
    size = changed.get('data_preprocessor', {}).get('size')
    if size and scaled.crop != 1:
        changed['data_preprocessor']['size'] = scaled.crops(size)
    return difference(model.to_dict(), changed)


def set_classes(config: Any, classes: int) -> int:
    """Set the number of classes in all heads of a model's config; returns how many there were."""
    if isinstance(config, list):
        return sum(set_classes(child, classes) for child in config)
    if not isinstance(config, dict):
        return 0
    before = config.get('num_classes')
    if 'num_things_classes' in config:
        before = config['num_things_classes'] + config.get('num_stuff_classes', 0)
        config.update(num_things_classes=classes, num_stuff_classes=0)
    elif isinstance(before, int):
        config['num_classes'] = classes
    if before is not None:
        for loss in config.values():
            weights = loss.get('class_weight') if isinstance(loss, dict) else None
            if isinstance(weights, list) and len(weights) == before + 1:  # the last: no object
                loss['class_weight'] = Code(f'[{weights[0]}] * {classes} + [{weights[-1]}]')
            elif isinstance(weights, list):  # those of the base's classes
                loss['class_weight'] = None
    others = ('rpn_head', 'backbone', 'neck', 'data_preprocessor')
    return (before is not None) + sum(
        set_classes(value, classes) for key, value in config.items() if key not in others
    )


def difference(before: dict, after: dict) -> dict:
    """The settings that turn one config into another."""
    changes = {}
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            if inner := difference(before[key], value):
                changes[key] = inner
        elif key not in before or value != before[key]:
            changes[key] = value
    return changes
