"""A config for a folder with data: recognizes its layout and adapts a recipe to it."""

import math
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import combinations
from keyword import iskeyword
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from mmengine.config import Config

from .command import UserError, one_line
from .configs import as_list, kind_of, leaves, load_config
from .data_checks import Defects, check_contents
from .drawing import class_palette
from .files import atomic_write, check_file
from .label_maps import LabelMaps, Pair, find_label_maps, write_indices
from .layouts import (
    GENERATED,
    NotRecognized,
    Objects,
    divide,
    find_objects,
    stop_on_errors,
    validation_part,
    write_json,
)

# Length of a training. Steps are those of the recipe, with the images per step of the recipe.
MIN_STEPS = 3000
MAX_EPOCHS = 300  # instead of MIN_STEPS, for small data sets
SEGMENTATION_EPOCHS = 100  # at least, unless the recipe is shorter
# Images are enlarged at most by this factor for detection, as most of COCO are by its recipe.
ENLARGED = 5 / 3
LARGER = 2  # segmentation of large images: at most this factor of the recipe's scale
MEMORY = 16 * 2**30  # bytes of a GPU for the recipe's images per GPU
SMALL = 16  # pixels; objects that are smaller in the network's input are hard to find
WIDTH = 100  # of a line of a config
HERE = '{{ fileDirname }}'


class Code(str):
    """A piece of Python in a config."""


class Data(NamedTuple):
    """The data sets of a config, and what is known about them."""

    layout: str
    classes: list[str]
    palette: list[tuple[int, int, int]]
    datasets: dict[str, list[dict]]  # configs of the data sets of train, val and test
    images: dict[str, int]  # number of images of each of them
    sizes: np.ndarray  # (N, 2) heights and widths of the training images
    objects: np.ndarray  # (M,) sides of squares with the areas of their objects, in pixels
    scales: np.ndarray  # (M,) index into sizes for each object
    lines: list[str]  # what was found
    reduce_zero_label: bool = False


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
        found = data_of_folder(data, task, out, partial, skip_bad)
        text, lines = config_text(cfg, found, task, data, base, out)
        if folder.exists():
            shutil.rmtree(folder)
        if partial.exists():
            partial.rename(folder)
        with atomic_write(out) as file:
            file.write_text(text, encoding='utf-8')
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
    if folder.exists():
        ours = re.compile(r'(train|val|test)\d*\.(json|txt)|labels')
        foreign = [path.name for path in folder.iterdir() if not ours.fullmatch(path.name)]
        if foreign:
            raise UserError(f'{folder} has files of others ({foreign[0]}); choose another --out')
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


def pipeline_of(cfg: Config, split: str) -> list:
    loader = cfg.get(f'{split}_dataloader') or cfg.train_dataloader
    return deepcopy(next(leaves(loader.dataset)).get('pipeline') or [])


def steps(value: Any) -> Iterator[dict]:
    """The transforms of a pipeline, also those inside others."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for child in value:
            yield from steps(child)


# Data


def data_of_folder(data: Path, task: str, out: Path, folder: Path, skip_bad: bool) -> Data:
    """Read a folder with data and write what has to be converted.

    Args:
        data: the folder.
        task: detection, instance or segmentation.
        out: the config that will name the data.
        folder: to write to; it will be renamed to the folder next to the config.
        skip_bad: leave out what has errors.
    """
    defects = Defects()
    if task == 'segmentation':
        maps = find_label_maps(data, defects)
        stop_on_errors(defects, skip_bad)
        return label_map_data(maps, data, out, folder)
    objects = find_objects(data, defects, skip_bad)
    if task == 'instance':
        objects = with_masks(objects, defects)
    stop_on_errors(defects, skip_bad)
    return object_data(objects, data, out, folder)


def check_folder(data: Path, splits: Sequence[str], out_dir: Path) -> int:
    """Check the data in a folder, as `check_contents` does for a config.

    Args:
        data: the folder.
        splits: which data to check.
        out_dir: folder for the report.

    Returns:
        The number of kinds of errors.
    """
    defects = Defects()
    with TemporaryDirectory() as temporary:
        out = Path(temporary, 'folder.py')
        folder = out.with_name(out.stem + GENERATED)
        try:
            found = object_data(find_objects(data, defects, skip_bad=True), data, out, folder)
        except NotRecognized:
            found = label_map_data(find_label_maps(data, defects), data, out, folder)
        print('\n'.join(found.lines))
        is_segmentation = not found.objects.size
        settings = {
            'default_scope': 'mmseg' if is_segmentation else 'mmdet',
            'work_dir': str(out_dir),
            'data_root': os.path.abspath(data),
            'metainfo': dict(classes=tuple(found.classes)),
            'train_pipeline': [],
            'test_pipeline': [],
        }
        for split, datasets in found.datasets.items():
            settings[f'{split}_dataloader'] = dict(dataset=one_of(datasets))
        out.write_text(text_of_settings(settings), encoding='utf-8')
        cfg = Config.fromfile(out)
        return check_contents(cfg, *splits, folder=out_dir, found=defects.problems()).errors


def with_masks(found: Objects, defects: Defects) -> Objects:
    """Report objects that have no mask, and leave them out."""
    splits, masks = {}, 0
    for name, split in found.splits.items():
        good = []
        for annotation in split.content['annotations']:
            if annotation.get('segmentation') or annotation.get('iscrowd'):
                good.append(annotation)
            else:
                at = f'annotation {annotation["id"]} of the {name} data'
                defects.error('objects without a mask', at)
        masks += len(good)
        if len(good) < len(split.content['annotations']):
            split = split._replace(content={**split.content, 'annotations': good}, path=None)
        splits[name] = split
    if not masks:
        raise UserError(
            f'the base trains masks, but the {found.layout} data have boxes only; choose a base '
            'such as retinanet_cpvt_s.py'
        )
    return found._replace(splits=splits)


def object_data(found: Objects, data: Path, out: Path, folder: Path) -> Data:
    """The data of a detector; writes annotations that are no COCO file of the folder."""
    splits, notes = dict(found.splits), list(found.notes)
    require_training_data(splits, data)
    if not splits['train'].content['annotations']:
        raise UserError(f'the training data in {data} have no objects')
    if 'val' not in splits:
        chosen = validation_part(len(splits['train'].content['images']))
        splits['train'], splits['val'] = divide(splits['train'], chosen)
        notes.append(validation_note(splits['val'].content['images']))
    notes += shared_note(
        {
            key: {str(split.folder / image['file_name']) for image in split.content['images']}
            for key, split in splits.items()
        }
    )
    datasets, images, lines = {}, {}, []
    names = {c['id']: c['name'] for s in splits.values() for c in s.content['categories']}
    for name in [key for key in ('train', 'val', 'test') if key in splits]:
        split = splits[name]
        if split.path is None:
            folder.mkdir(exist_ok=True)
            write_json(folder / f'{name}.json', split.content)
            ann_file = f'{HERE}/{out.stem}{GENERATED}/{name}.json'
        else:
            ann_file = relative(split.path, data)
            names = {c['id']: c['name'] for c in split.content['categories']}
        prefix = relative(split.folder, data)
        datasets[name] = [
            dict(
                type='CocoDataset', data_root=Code('data_root'), metainfo=Code('metainfo'),
                ann_file=ann_file, data_prefix=dict(img='' if prefix == '.' else f'{prefix}/'),
                **(dict(filter_cfg=dict(filter_empty_gt=False, min_size=1)) if name == 'train'
                   else dict(test_mode=True)),
                pipeline=Code('train_pipeline' if name == 'train' else 'test_pipeline'))
        ]  # fmt: skip
        images[name] = len(split.content['images'])
        counts = Counter(names.get(a['category_id']) for a in split.content['annotations'])
        annotated = {a['image_id'] for a in split.content['annotations']}
        lines.append(
            f'{name}: {images[name]} images ({images[name] - len(annotated)} without objects), '
            f'{sum(counts.values())} objects: {shown_counts(counts)}'
        )
    rows = {image['id']: row for row, image in enumerate(splits['train'].content['images'])}
    annotations = splits['train'].content['annotations']
    areas = [max(a['bbox'][2] * a['bbox'][3], 0) for a in annotations]
    sizes = [(image['height'], image['width']) for image in splits['train'].content['images']]
    return Data(
        found.layout, found.classes, class_palette(found.classes), datasets, images,
        np.array(sizes, float), np.sqrt(areas),
        np.array([rows[a['image_id']] for a in annotations], int),
        [headline(found.layout, data, found.classes), *lines, *map('note: {}'.format, notes)],
    )  # fmt: skip


def label_map_data(found: LabelMaps, data: Path, out: Path, folder: Path) -> Data:
    """The data of a segmentor; writes lists of images, and label maps of indices where the values
    of the files are others."""
    splits, notes = dict(found.splits), list(found.notes)
    require_training_data(splits, data)
    if 'val' not in splits:
        chosen = validation_part(len(splits['train']))
        both = [[p for p, c in zip(splits['train'], chosen) if c == part] for part in (0, 1)]
        splits['train'], splits['val'] = both
        notes.append(validation_note(splits['val']))
    notes += shared_note({key: {p.image for p in pairs} for key, pairs in splits.items()})
    groups = {name: grouped(pairs) for name, pairs in splits.items()}
    labels = None  # the folder of converted label maps
    if found.codes or max(map(len, groups.values())) > 8:
        labels = f'{HERE}/{out.stem}{GENERATED}/labels'
        for pair in (p for pairs in splits.values() for p in pairs):
            target = folder / 'labels' / PurePosixPath(pair.image).with_suffix('.png')
            if found.codes:
                write_indices(data / pair.label, target, found)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(data / pair.label, target)
        notes.append('label maps were written as class indices next to the config')
        groups = {
            name: grouped([Pair(p.image, str(PurePosixPath(p.image).with_suffix('.png'))) for p in
                           pairs])
            for name, pairs in splits.items()
        }  # fmt: skip
    datasets, lines = {}, []
    for name in [key for key in ('train', 'val', 'test') if key in splits]:
        datasets[name] = []
        for (images, suffix, maps, map_suffix), names in groups[name].items():
            listed = dict(
                data_prefix=dict(
                    img_path=images, seg_map_path=f'{labels}/{maps}'.rstrip('/') if labels else maps
                )
            )
            if names != in_folder(data / images, suffix):
                number = len(datasets[name]) or ''
                folder.mkdir(exist_ok=True)
                text = ''.join(f'{n}\n' for n in names)
                (folder / f'{name}{number}.txt').write_text(text, encoding='utf-8')
                listed['ann_file'] = f'{HERE}/{out.stem}{GENERATED}/{name}{number}.txt'
            datasets[name].append(
                dict(
                    type='BaseSegDataset', data_root=Code('data_root'), metainfo=Code('metainfo'),
                    img_suffix=suffix, seg_map_suffix=map_suffix, **listed,
                    reduce_zero_label=found.reduce_zero_label,
                    pipeline=Code('train_pipeline' if name == 'train' else 'test_pipeline'))
            )  # fmt: skip
        lines.append(f'{name}: {len(splits[name])} images')
    counts = Counter(dict(zip(found.classes, found.pixels)))
    total = max(sum(found.pixels), 1)
    shares = [f'{name} {count / total:.1%}' for name, count in counts.most_common(8)]
    lines.append(f'pixels: {", ".join(shares)}' + (' ...' if len(counts) > 8 else ''))
    return Data(
        found.layout, found.classes, found.palette, datasets,
        {name: len(pairs) for name, pairs in splits.items()},
        np.array([found.sizes[pair.image] for pair in splits['train']], float),
        np.zeros(0), np.zeros(0, int),
        [headline(found.layout, data, found.classes), *lines, *map('note: {}'.format, notes)],
        found.reduce_zero_label,
    )  # fmt: skip


def shared_note(images: dict[str, set[str]]) -> list[str]:
    """Notes about images in two splits."""
    notes = []
    for one, other in combinations(images, 2):
        if shared := images[one] & images[other]:
            notes.append(f'{len(shared)} images are in {one} and in {other}')
    return notes


def require_training_data(splits: dict, data: Path) -> None:
    if not splits.get('train'):
        raise UserError(f'{data} has no training data, only {" and ".join(splits)}')


def validation_note(chosen: Sequence) -> str:
    return (
        f'no validation data: {len(chosen)} training images, chosen at random with seed 0, are '
        'used for it. Divide frames of a video or views of one scene yourself'
    )


def headline(layout: str, data: Path, classes: Sequence[str]) -> str:
    return f'{data}: {layout}, {len(classes)} classes: {shown(classes)}'


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
    recipe = Recipe.of(cfg, data.images['train'])
    settings = {
        '_base_': relative(Path(os.path.abspath(base)), here),
        'data_root': f'{HERE}/{relative(Path(os.path.abspath(root)), here)}',
        'metainfo': dict(classes=tuple(data.classes), palette=list(data.palette)),
        'model': model_changes(cfg.model, len(data.classes), scaled),
        'train_pipeline': scaled.pipeline(pipeline_of(cfg, 'train'), data.reduce_zero_label),
        'test_pipeline': scaled.pipeline(pipeline_of(cfg, 'val'), data.reduce_zero_label),
    }
    if cfg.get('tta_pipeline'):
        settings['tta_pipeline'] = scaled.pipeline(cfg.tta_pipeline, data.reduce_zero_label)
    settings |= loaders(cfg, data, recipe)
    settings |= evaluators(cfg, data, task)
    settings |= recipe.settings(cfg)
    comments = {
        'train_pipeline': scaled.comment,
        'train_cfg': recipe.length_comment,
        'optim_wrapper': recipe.lr_comment,
    }
    name = out.name
    head = (
        f'# {len(data.classes)} classes, {sum(data.images.values())} images ({data.layout}). '
        'Written by tools/new_config.py.\n'
        f'#   python tools/check_data.py {name}\n#   python tools/train.py {name}\n'
    )
    return head + text_of_settings(settings, comments), [scaled.line(data), recipe.line]


def loaders(cfg: Config, data: Data, recipe: 'Recipe') -> dict[str, Any]:
    """The settings of the data loaders."""
    found = {}
    workers = min(cfg.train_dataloader.get('num_workers', 2), os.cpu_count() or 1)
    for split in ('train', 'val', 'test'):
        whole = one_of(data.datasets.get(split) or data.datasets['val'])
        loader = dict(batch_size=recipe.batch) if split == 'train' else {}
        loader['num_workers'] = workers
        loader['dataset'] = instead_of(cfg[f'{split}_dataloader'].dataset, whole)
        found[f'{split}_dataloader'] = loader
    return with_test_as_val(found, 'dataloader')


def one_of(datasets: list[dict]) -> dict:
    """A data set of one or several."""
    several = dict(type='ConcatDataset', datasets=datasets)
    return several if len(datasets) > 1 else datasets[0]


def evaluators(cfg: Config, data: Data, task: str) -> dict[str, Any]:
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
        found[f'{split}_evaluator'] = instead_of(cfg[f'{split}_evaluator'], metric)
    return with_test_as_val(found, 'evaluator')


def instead_of(before: Any, after: dict) -> dict:
    """A setting that replaces the base's completely, though mmengine merges them."""
    return after if overrides(after, before) else dict(_delete_=True, **after)


def overrides(after: Any, before: Any) -> bool:
    """Whether nothing of a setting of the base remains when another is merged into it."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(key in after and overrides(after[key], before[key]) for key in before)
    return isinstance(after, Code) or not isinstance(before, list) or not isinstance(after, dict)


def with_test_as_val(found: dict[str, Any], kind: str) -> dict[str, Any]:
    """Write equal settings of val and test once; not if mmengine is to delete what they replace,
    which it does for the first of them."""
    val, test = found[f'val_{kind}'], found[f'test_{kind}']
    if val == test and '_delete_' not in (val, val.get('dataset') or {})[-1] | val:
        found[f'test_{kind}'] = Code(f'val_{kind}')
    return found


def model_changes(model: Any, classes: int, scaled: 'Scales') -> dict:
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


class Scales(NamedTuple):
    """How the scales of a recipe change for images of other sizes."""

    before: tuple[int, ...]  # scale of the base's test images
    scale: float  # factor on scales
    crop: float  # factor on the crops of segmentation
    is_segmentation: bool

    @classmethod
    def of(cls, cfg: Config, sizes: np.ndarray, task: str) -> 'Scales':
        resizes = [s for s in steps(pipeline_of(cfg, 'val')) if s.get('scale')]
        is_segmentation = task == 'segmentation'
        if not resizes:
            return cls((), 1, 1, is_segmentation)
        before = tuple(resizes[0]['scale'])
        enlarged = np.median(np.minimum(
            max(before) / sizes.max(1), min(before) / sizes.min(1)))  # fmt: skip
        most, limit = (1, LARGER) if is_segmentation else (ENLARGED, 1)
        scale = min(most / enlarged, limit)
        scale = 1 if abs(scale - 1) < 0.05 else scale
        return cls(before, scale, min(scale, 1), is_segmentation)

    @property
    def after(self) -> tuple[int, ...]:
        return self.scaled(self.before)

    @property
    def comment(self) -> str:
        if self.scale == 1:
            return 'The base resizes to the same scale.'
        return f'The base resizes to {self.before}.'

    def line(self, data: Data) -> str:
        heights, widths = data.sizes.T
        line = (
            f'images: {int(np.median(widths))} x {int(np.median(heights))} pixels (median), '
            f'{int(widths.min())} x {int(heights.min())} at least; resized to {self.after}'
        )
        if len(data.objects) and self.after:
            factors = np.minimum(
                max(self.after) / data.sizes.max(1), min(self.after) / data.sizes.min(1)
            )
            sides = data.objects * factors[data.scales]
            tiny = (sides < SMALL).mean()
            line += f'; objects have {np.median(sides):.0f} x {np.median(sides):.0f} pixels then'
            if tiny > 0.2:
                line += f', and {tiny:.0%} are smaller than {SMALL}: consider a larger scale'
        return line

    def scaled(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.scaled, value))
        return value if self.scale == 1 else max(round(value * self.scale), 32)

    def crops(self, size: Sequence[int]) -> tuple[int, ...]:
        if not self.is_segmentation:
            return self.scaled(tuple(size))
        return tuple(math.ceil(side * self.crop / 32) * 32 for side in size)

    def pipeline(self, pipeline: Any, reduce_zero_label: bool) -> Any:
        """A pipeline of the base with other scales."""
        pipeline = deepcopy(pipeline)
        for step in steps(pipeline):
            for key in ('scale', 'scales', 'max_size'):
                if step.get(key):
                    step[key] = self.scaled(step[key])
            if isinstance(step.get('crop_size'), (list, tuple)):
                step['crop_size'] = self.crops(step['crop_size'])
            if self.is_segmentation and kind_of(step) == 'LoadAnnotations':
                step.pop('reduce_zero_label', None)
                if reduce_zero_label:
                    step['reduce_zero_label'] = True
        return pipeline


class Recipe(NamedTuple):
    """Batch size, learning rate and length of a training."""

    batch: int  # images per step
    recipe_batch: int  # of the base
    lr: Optional[float]
    lr_before: Optional[float]
    length: int  # epochs or iterations
    length_before: int
    by_epoch: bool
    iterations: int  # in total
    machine: str

    @classmethod
    def of(cls, cfg: Config, images: int) -> 'Recipe':
        per_gpu = cfg.train_dataloader.get('batch_size') or 1
        recipe_batch = (cfg.get('auto_scale_lr') or {}).get('base_batch_size') or per_gpu
        batch, machine = per_gpu, 'a CPU'
        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory
            times = 2 ** max(int(math.log2(max(memory / MEMORY, 1))), 0)
            batch, machine = min(per_gpu * times, max(recipe_batch, per_gpu)), 'one GPU'
            machine += f' of {memory / 2**30:.0f} GiB'
        lr = cfg.optim_wrapper.get('optimizer', {}).get('lr')
        by_epoch = 'max_epochs' in cfg.train_cfg
        before = cfg.train_cfg.max_epochs if by_epoch else cfg.train_cfg.max_iters
        seen = min(MIN_STEPS * recipe_batch, MAX_EPOCHS * images)
        per_epoch = math.ceil(images / batch)
        if by_epoch:
            length = max(before, math.ceil(seen / images), math.ceil(MIN_STEPS / per_epoch))
            iterations = length * per_epoch
        else:
            seen = min(max(seen, SEGMENTATION_EPOCHS * images), before * recipe_batch)
            hundreds = round(seen / batch / 100)
            length = iterations = max(100 * hundreds, min(before, MIN_STEPS))
        return cls(
            batch, recipe_batch, lr and float(f'{lr * batch / recipe_batch:.3g}'), lr, length,
            before, by_epoch, iterations, machine,
        )  # fmt: skip

    @property
    def unit(self) -> str:
        return 'epochs' if self.by_epoch else 'iterations'

    @property
    def length_comment(self) -> str:
        return f'{self.iterations} iterations; the base has {self.length_before} {self.unit}.'

    @property
    def lr_comment(self) -> str:
        return (
            f'{self.lr_before} for {self.recipe_batch} images per step in the base; here '
            f'{self.batch}, on {self.machine}.\n# On several GPUs: tools/dist_train.sh with '
            '--auto-scale-lr.'
        )

    @property
    def line(self) -> str:
        length = f'{self.length} epochs, ' if self.by_epoch else ''
        return (
            f'training: {length}{self.iterations} iterations of {self.batch} images on '
            f'{self.machine}, learning rate {self.lr}'
        )

    def settings(self, cfg: Config) -> dict[str, Any]:
        key = 'max_epochs' if self.by_epoch else 'max_iters'
        ratio = self.length / self.length_before
        interval = max(round(cfg.train_cfg.get('val_interval', 1) * ratio), 1)
        schedulers = [self.scheduler(s) for s in as_list(cfg.get('param_scheduler'))]
        hooks = dict(checkpoint=dict(interval=interval))
        for name, hook in (cfg.get('default_hooks') or {}).items():
            if kind_of(hook or {}) == 'EMAHook':  # averages over 1 / momentum steps
                momentum = max(hook.get('momentum', 2e-4), 10 / self.iterations)
                hooks[name] = dict(momentum=float(f'{momentum:.2g}'))
        found = {'train_cfg': {key: self.length, 'val_interval': interval}}
        if schedulers:
            found['param_scheduler'] = schedulers
        if self.lr:
            found['optim_wrapper'] = dict(optimizer=dict(lr=self.lr))
        found['auto_scale_lr'] = dict(enable=False, base_batch_size=self.batch)
        found['default_hooks'] = hooks
        return found

    def scheduler(self, before: dict) -> dict:
        """A scheduler of the base for this length; a warm-up stays, if it is a tenth at most."""
        after = deepcopy(dict(before))
        in_epochs = before.get('by_epoch', True)

        def moment(value: int) -> int:
            if not in_epochs and value <= 0.1 * self.length_before or in_epochs != self.by_epoch:
                return min(value, self.iterations // 10)
            return round(value * self.length / self.length_before)

        for key in ('begin', 'end', 'T_max', 'total_steps', 'milestones', 'step_size'):
            value = after.get(key)
            if isinstance(value, list):
                after[key] = [moment(item) for item in value]
            elif isinstance(value, int):
                after[key] = moment(value)
        if after.get('eta_max') and self.lr:
            after['eta_max'] = float(f'{after["eta_max"] * self.lr / self.lr_before:.3g}')
        return after


# Python


def text_of_settings(settings: dict[str, Any], comments: Optional[dict[str, str]] = None) -> str:
    """The text of a config with comments above some settings."""
    lines = []
    for key, value in settings.items():
        if comments and key in comments:
            lines.append(f'\n# {comments[key]}')
        lines.append(f'{key} = {source(value, 0, len(key) + 3)}')
    return '\n'.join(lines) + '\n'


def source(value: Any, indent: int, used: int) -> str:
    """Python source of a setting.

    Args:
        value: dicts, lists, tuples, strings, numbers.
        indent: of the lines after the first.
        used: characters before the value on its first line.
    """
    line = inline(value)
    if used + len(line) + 1 <= WIDTH or not isinstance(value, (dict, list, tuple)) or not value:
        return line
    inner = indent + 4
    space = '\n' + ' ' * inner
    if isinstance(value, dict):
        if all(is_name(key) for key in value):
            items = [f'{k}={source(v, inner, inner + len(k) + 1)}' for k, v in value.items()]
            return f'dict({space}{("," + space).join(items)})'
        items = [f'{k!r}: {source(v, inner, inner + len(repr(k)) + 2)}' for k, v in value.items()]
        return f'{{{space}{("," + space).join(items)}}}'
    left, right = '()' if isinstance(value, tuple) else '[]'
    if any(isinstance(item, (dict, list)) for item in value):
        items = [source(item, inner, inner) for item in value]
        return f'{left}{space}{("," + space).join(items)}{right}'
    lines = ['']
    for item in map(inline, value):  # as many as fit on a line
        if lines[-1] and inner + len(lines[-1]) + len(item) + 2 > WIDTH:
            lines.append('')
        lines[-1] += f'{" " if lines[-1] else ""}{item},'
    return f'{left}{space}{space.join(lines).removesuffix(",")}{right}'


def inline(value: Any) -> str:
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, dict):
        if all(is_name(key) for key in value):
            return f'dict({", ".join(f"{k}={inline(v)}" for k, v in value.items())})'
        return f'{{{", ".join(f"{k!r}: {inline(v)}" for k, v in value.items())}}}'
    if isinstance(value, list):
        return f'[{", ".join(map(inline, value))}]'
    if isinstance(value, tuple):
        return f'({", ".join(map(inline, value))}{"," if len(value) == 1 else ""})'
    if isinstance(value, type):
        raise UserError(f'the base must name types with strings, got {one_line(repr(value))}')
    return repr(value)


def is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier() and not iskeyword(key)
