"""A config for a folder with data: recognizes its layout and adapts a recipe to it."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import compress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from mmengine.config import Config

from ..config.load import load_config
from ..config.parts import kind_of
from ..tooling.command import UserError, one_line
from ..tooling.files import atomic_write, check_file, files_below, scratch_folder
from .coco import COUNTED_IN_AP, Objects, Split, content_of_images, objects_by_class
from .defects import Defects, Problem
from .folder import GENERATED, SPLITS, Files
from .label_maps import LabelMaps, Pair, write_indices
from .readers import read_data
from .recipes import Scales, adapted_recipe, pipeline_of, steps

HERE = '{{ fileDirname }}'
CONFIG_SUFFIXES = '.py', '.yaml', '.yml', '.json'  # that mmengine reads
MASKS = 'labels'  # folder of converted label maps
SEED = 0  # of the validation split
IGNORING = 'MaxIoUAssigner', 'ATSSAssigner', 'ApproxMaxIoUAssigner'  # with `ignore_iof_thr`
IGNORED_FROM = 0.5  # share of an anchor or proposal on objects to be ignored


class Code:
    """A piece of Python in a config, where a value is expected."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Data(NamedTuple):
    """The data sets of a config, and what is known about them."""

    found: Union[Objects, LabelMaps]
    datasets: dict[str, dict]  # of train, val and test, without the settings they share
    lines: list[str]  # what was found, for people
    sizes: np.ndarray  # (N, 2) heights and widths of the training images
    # (M, 3) of objects that are not ignored: root of the area, size of the image
    objects: np.ndarray = np.zeros((0, 3))
    has_ignored: bool = False  # training images have objects that do not count (`iscrowd`)

    @property
    def metainfo(self) -> dict[str, Any]:
        """The classes; and the colours of label maps, which a file may list."""
        metainfo: dict[str, Any] = dict(classes=tuple(self.found.classes))
        if isinstance(self.found, LabelMaps):
            metainfo['palette'] = list(self.found.palette)
        return metainfo


class Generated(NamedTuple):
    """The folder of what is written next to a config."""

    path: Path
    name: str  # in the config

    def write(self, name: str, text: str) -> str:
        """Write a file; returns its path as the config has it."""
        self.path.mkdir(exist_ok=True)
        (self.path / name).write_text(text, encoding='utf-8')
        return f'{self.name}/{name}'


def new_config(
    data: Path,
    base: Path,
    out: Path,
    skip_bad: bool = False,
    overwrite: bool = False,
    assigned: Optional[Mapping[str, str]] = None,
) -> list[str]:
    """Write a config for a folder with data, and the files that it needs to a folder next to it;
    returns lines for people.

    All files are written next to their places and then renamed: on a full disk there are none.

    Args:
        data: folder with images and annotations.
        base: config with the model and the recipe.
        out: the config to write; the folder has its name and ends with `_data`.
        skip_bad: leave out what has errors.
        overwrite: replace files that exist.
        assigned: see `Files`.
    """
    folder = out.with_name(out.stem + GENERATED)
    check_paths(data, base)
    check_output(out, folder, base, overwrite)
    cfg = load_config(base)
    task = task_of(cfg, base)
    with scratch_folder(folder.resolve().parent) as scratch:
        partial = scratch / folder.name
        with reported(Defects(), skip_bad) as defects:
            found = read_data(Files(data, assigned), defects, task)
        described = describe(found, data, Generated(partial, f'{HERE}/{folder.name}'))
        text, lines = config_text(cfg, described, task, data, base, out)
        with atomic_write(out) as config:
            config.write_text(text, encoding='utf-8')
            if partial.exists():
                move_files(partial, folder)
    written = f'{out} and {folder}/' if folder.exists() else str(out)
    if (folder / MASKS).exists():
        lines.append(f'note: {folder / MASKS}/ has the segmentation masks as class indices')
    return [*described.lines, *lines, f'wrote {written}']


def move_files(source: Path, target: Path) -> None:
    """Move the files in a folder to one in the same file system, in which others may be."""
    if not target.exists():
        os.replace(source, target)
        return
    for path in files_below(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)


def check_paths(data: Path, base: Path) -> None:
    if base.is_dir() and data.suffix == '.py':
        raise UserError(f'the data and --base are swapped: {base} is a folder, {data} a config')
    if base.is_dir() or base.is_file() and base.suffix not in CONFIG_SUFFIXES:
        kinds = ', '.join(CONFIG_SUFFIXES)
        raise UserError(f'--base must be a config with the suffix {kinds}, got {base}')
    if data.is_file():
        raise UserError(f'the data must be a folder, got the file {data}')


def check_output(out: Path, folder: Path, base: Path, overwrite: bool) -> None:
    if out.suffix != '.py' or base.exists() and out.exists() and base.samefile(out):
        raise UserError(f'--out must be a .py file other than the base, got {out}')
    if re.search(r"""['"\\{}\n]""", os.path.abspath(out)):
        raise UserError(f'the path of --out must have no quotes, braces and backslashes, got {out}')
    for path in (out, folder):
        if path.exists() and not overwrite:
            raise UserError(f'{path} exists; choose another --out, or replace it with --overwrite')
    check_file(out)


def task_of(cfg: Config, base: Path) -> str:
    """detection, instance or segmentation."""
    parts = [f'{split}_dataloader' for split in SPLITS] + ['val_evaluator', 'test_evaluator']
    for key in ('train_cfg', 'optim_wrapper', *parts):
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


@contextmanager
def reported(defects: Defects, skip_bad: bool) -> Iterator[Defects]:
    """Print what was found, also where reading ends with an error, which it may be the cause of;
    then stop at errors."""
    try:
        yield defects
    finally:
        for problem in defects.problems():
            print(problem)
    defects.stop(skip_bad)


def config_of_folder(
    data: Path, generated: str, assigned: Optional[Mapping[str, str]] = None
) -> tuple[Config, list[Problem]]:
    """A config with the data in a folder, for their check, and what was found wrong so far; writes
    converted annotations to the folder `generated`."""
    with reported(Defects(), skip_bad=True) as defects:
        found = read_data(Files(data, assigned), defects)
        described = describe(found, data, Generated(Path(generated), generated))
    print('\n'.join(described.lines))
    settings = {'default_scope': 'mmdet' if isinstance(found, Objects) else 'mmseg'}
    common = dict(data_root=os.path.abspath(data), metainfo=described.metainfo, pipeline=[])
    for split, dataset in described.datasets.items():
        settings[f'{split}_dataloader'] = dict(dataset={**dataset, **common})
    return Config(settings), defects.problems()


def describe(found: Union[Objects, LabelMaps], data: Path, target: Generated) -> Data:
    """The data sets in a folder; writes to `target` what mm cannot read as it is."""

    def images_of(split: Any) -> list:
        return split.content['images'] if isinstance(split, Split) else split

    splits = {key: split for key, split in found.splits.items() if images_of(split)}
    notes = list(found.notes)
    by_name = splits_by_name(found)
    if 'train' not in splits:
        others = ' and '.join(splits) or 'images with errors'
        shown = f' ({by_name})' if by_name else ''
        raise UserError(
            f'{data} has no training data, only {others}{shown}; if a folder is for training, use '
            '--assign FOLDER=train'
        )
    if by_name:
        notes.append(f'{by_name}, by name; if not, use --assign')
    if 'val' not in splits:
        train = splits.pop('train')
        parts = divided(images_of(train))
        notes.append(
            f'no validation data: {len(parts[1])} training images, chosen at random with seed 0, '
            'are used for it. Divide frames of a video or views of one scene yourself'
        )
        if isinstance(train, Split):
            contents = [content_of_images(train.content, part) for part in parts]
            parts = [Split(content, train.folder) for content in contents]
        splits = {'train': parts[0], 'val': parts[1], **splits}
    if isinstance(found, Objects):
        described = object_data(found, splits, data, target)
    else:
        described = label_map_data(found, splits, data, target)
    names = ', '.join(found.classes[:12]) + (' ...' if len(found.classes) > 12 else '')
    head = f'{data}: {found.layout}, {len(found.classes)} classes: {names}'
    notes = [f'note: {note}' for note in notes]
    return described._replace(lines=[head, *described.lines, *notes])


def splits_by_name(found: Union[Objects, LabelMaps]) -> str:
    """Which folders and files became which split by their names, if they say more than it."""
    listed = [
        f'{name} is {split}'
        for name, split in sorted(found.by_name.items())
        if PurePosixPath(name).name.lower() not in SPLITS[split]
    ]
    return ', '.join(listed[:6]) + (' ...' if len(listed) > 6 else '')


def divided(items: Sequence) -> tuple[list, list]:
    """Training and validation items where there are no validation data: of these a fifth, at most
    2,000."""
    if len(items) < 2:
        raise UserError('there must be at least 2 training images, one of them for validation')
    count = min(max(len(items) // 5, 1), 2000)
    chosen = np.zeros(len(items), bool)
    chosen[np.random.default_rng(SEED).permutation(len(items))[:count]] = True
    return list(compress(items, ~chosen)), list(compress(items, chosen))


def object_data(found: Objects, splits: dict[str, Split], data: Path, target: Generated) -> Data:
    """The data of a detector; writes annotations that are no COCO file of the folder."""
    train = splits['train'].content
    if not train['annotations']:
        raise UserError(f'the training data in {data} have no objects')
    if all(annotation['iscrowd'] for annotation in train['annotations']):
        raise UserError(
            f'all objects in the training data in {data} are crowds or difficult, which training '
            'ignores'
        )
    datasets = {key: coco_dataset(key, split, data, target) for key, split in splits.items()}
    lines = [line for key, split in splits.items() for line in lines_about(key, split.content)]
    sizes = {image['id']: (image['height'], image['width']) for image in train['images']}
    objects = []
    for annotation in train['annotations']:
        if not annotation['iscrowd']:
            area = annotation['bbox'][2] * annotation['bbox'][3]
            objects.append((max(area, 0) ** 0.5, *sizes[annotation['image_id']]))
    return Data(
        found,
        datasets,
        lines,
        np.array([*sizes.values()], float),
        np.array(objects),
        has_ignored=len(objects) < len(train['annotations']),
    )


def coco_dataset(key: str, split: Split, data: Path, target: Generated) -> dict[str, Any]:
    """The config of a data set; writes its annotations, if they are no COCO file of the folder."""
    if split.path:
        file = relative(split.path, data)
    else:
        file = target.write(f'{key}.json', json.dumps(split.content, ensure_ascii=False))
    folder = f'{relative(split.folder, data)}/'.removeprefix('./')
    dataset = dict(type='CocoDataset', ann_file=file, data_prefix=dict(img=folder))
    if key == 'train':
        dataset['filter_cfg'] = dict(filter_empty_gt=False, min_size=1)
    else:
        dataset['test_mode'] = True
    return dataset


def lines_about(key: str, content: dict[str, Any]) -> Iterator[str]:
    """Lines about the images and objects of a split."""
    images = content['images']
    every = content['annotations']
    objects = [annotation for annotation in every if not annotation['iscrowd']]
    common = objects_by_class({**content, 'annotations': objects}).most_common()
    counts = Counter(annotation['image_id'] for annotation in objects)
    line = f'{key}: {len(images)} images ({len(images) - len(counts)} without objects)'
    line += f', {len(objects)} objects'
    if common:
        line += ': ' + ', '.join(f'{name} {count}' for name, count in common[:8])
    if len(common) > 8:
        line += ' ... {} {}'.format(*common[-1])
    if len(objects) < len(every):
        line += f'; {len(every) - len(objects)} more are ignored'
    yield line
    most = max(counts.values(), default=0)
    if key != 'train' and most > COUNTED_IN_AP:
        yield (
            f"note: an image of the {key} data has {most} objects, and COCO's AP counts "
            f'{COUNTED_IN_AP} detections of an image; consider tiles of it'
        )


def label_map_data(
    found: LabelMaps, splits: dict[str, list[Pair]], data: Path, target: Generated
) -> Data:
    """The data of a segmentor; writes lists of images, and label maps where the values of the files
    are no indices or the files are not as BaseSegDataset expects them."""
    datasets = {}
    lines = []
    for key, pairs in splits.items():
        places = [place_of(pair) for pair in pairs]
        names = [name for name, _ in places]
        ends = {end for _, end in places}
        if found.codes or len(ends) > 1:
            names = [pair.image for pair in pairs]
            end = Ends('', '', f'{target.name}/{MASKS}', '.png')
            for image, label in pairs:
                path = target.path / f'{MASKS}/{image}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                write_indices(data / label, path, found)
        else:
            (end,) = ends
        datasets[key] = dict(
            type='BaseSegDataset',
            ann_file=target.write(f'{key}.txt', ''.join(f'{name}\n' for name in names)),
            img_suffix=end.image_suffix,
            seg_map_suffix=end.label_suffix,
            data_prefix=dict(img_path=end.images, seg_map_path=end.labels),
            reduce_zero_label=found.reduce_zero_label,
        )
        lines.append(f'{key}: {len(names)} images')
    counts = Counter(dict(zip(found.classes, found.pixels)))
    total = max(sum(found.pixels), 1)
    shares = [f'{name} {count / total:.1%}' for name, count in counts.most_common(8)]
    line = f'pixels: {", ".join(shares)}' + (' ...' if len(counts) > 8 else '')
    if found.ignored:
        line += f'; {found.ignored:.1%} of all are ignored'
    lines.append(line)
    sizes = np.array([found.sizes[pair.image] for pair in splits['train']], float)
    return Data(found, datasets, lines, sizes)


class Ends(NamedTuple):
    """What BaseSegDataset adds to the name of an image and its label map."""

    images: str  # folder
    image_suffix: str
    labels: str  # folder
    label_suffix: str


def place_of(pair: Pair) -> tuple[str, Ends]:
    """The name that an image and its label map share, with the last folders if they share them, and
    what is added to it."""
    image = PurePosixPath(pair.image)
    label = PurePosixPath(pair.label)
    name = os.path.commonprefix([image.stem, label.stem])
    if name not in (image.stem, label.stem):
        name = re.sub('[ _.-]?[A-Za-z]*$', '', name)
    image_suffix = image.name[len(name) :]
    label_suffix = label.name[len(name) :]
    images = image.parent
    labels = label.parent
    while images.name and images.name == labels.name:
        name = f'{images.name}/{name}'
        images = images.parent
        labels = labels.parent
    return name, Ends(str(images), image_suffix, str(labels), label_suffix)


def relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


# The config


def config_text(
    cfg: Config, data: Data, task: str, root: Path, base: Path, out: Path
) -> tuple[str, list[str]]:
    """The text of the config `out` for the data in `root`, and lines for people about it; `cfg` is
    the config at `base`."""
    here = Path(os.path.abspath(out)).parent
    scaled = Scales.of(cfg, data.sizes, task)
    recipe = adapted_recipe(cfg, len(data.sizes))
    metainfo = data.metainfo
    if 'palette' in metainfo:
        metainfo['palette'] = Code(str(metainfo['palette']))  # mmengine gives each number a line
    settings = {
        '_base_': relative(Path(os.path.abspath(base)), here),
        'data_root': f'{HERE}/{relative(Path(os.path.abspath(root)), here)}',
        'metainfo': metainfo,
    }
    changes = model_changes(cfg.model, len(data.found.classes), scaled, data.has_ignored)
    if changes:
        settings['model'] = changes
    for key, pipeline in (
        ('train_pipeline', pipeline_of(cfg, 'train')),
        ('test_pipeline', pipeline_of(cfg, 'val')),
        ('tta_pipeline', cfg.get('tta_pipeline')),
    ):
        if pipeline:
            reduce_zero_label = data.datasets['train'].get('reduce_zero_label')
            is_test = key == 'test_pipeline'
            settings[key] = scaled.pipeline(pipeline, reduce_zero_label, is_test)
    settings |= data_settings(data, task) | recipe.settings
    comments = dict(recipe.comments)
    if scaled.keeps_resolution:
        comments['train_pipeline'] = 'Images keep their resolution, as with cpvt infer --tile.'
    elif scaled.scale != 1:
        comments['train_pipeline'] = f'The base resizes to {scaled.before}.'
    head = (
        f'# {len(data.found.classes)} classes ({data.found.layout}). Written by cpvt new-config.\n'
        f'#   cpvt check-data {out.name}\n'
        f'#   cpvt train {out.name}\n'
    )
    lines = [scaled.line(data.sizes, data.objects), recipe.line]
    if data.has_ignored and not ignore_objects(deepcopy(cfg.model.to_dict())):
        lines.append(
            'note: the model of the base cannot ignore objects in training: those that are ignored '
            'count as background'
        )
    return head + text_of_settings(settings, comments), lines


def data_settings(data: Data, task: str) -> dict[str, Any]:
    """The settings of the data loaders and metrics."""
    settings = {}
    common = dict(data_root=Code('data_root'), metainfo=Code('metainfo'))
    for split in SPLITS:
        found = data.datasets.get(split) or data.datasets['val']
        pipeline = Code('train_pipeline' if split == 'train' else 'test_pipeline')
        # Without _delete_ mmengine would merge it into the base's.
        dataset = dict(_delete_=True, **found, **common, pipeline=pipeline)
        settings[f'{split}_dataloader'] = dict(dataset=dataset)
        if split == 'train':
            continue
        metric = dict(type='IoUMetric', iou_metrics=['mIoU'])
        if task != 'segmentation':
            file = found['ann_file']
            metric = dict(
                type='CocoMetric',
                ann_file=file if file.startswith(HERE) else Code(f'data_root + {"/" + file!r}'),
                metric=['bbox', 'segm'] if task == 'instance' else 'bbox',
            )
        settings[f'{split}_evaluator'] = dict(_delete_=True, **metric)
    return settings


def model_changes(model: Any, classes: int, scaled: Scales, has_ignored: bool = False) -> dict:
    """What changes in a model for another number of classes and size of crops, and for data with
    objects to be ignored."""
    changed = deepcopy(model.to_dict())
    count = set_classes(changed, classes)
    if not count:
        raise UserError('the model of the base has no num_classes')
    size = changed.get('data_preprocessor', {}).get('size')
    if size and scaled.scale < 1:
        changed['data_preprocessor']['size'] = scaled.crops(size)
    if has_ignored:
        ignore_objects(changed)
    return difference(model.to_dict(), changed)


def ignore_objects(config: Any) -> bool:
    """Let all assigners of a model's config that can leave out anchors and proposals on objects to
    be ignored do so; by default they are background. Returns whether there is such an assigner."""
    if isinstance(config, (list, tuple)):
        return any([ignore_objects(child) for child in config])
    if not isinstance(config, dict):
        return False
    is_able = config.get('type') in IGNORING
    if is_able and config.get('ignore_iof_thr', -1) <= 0:
        config['ignore_iof_thr'] = IGNORED_FROM
    return any([is_able, *map(ignore_objects, config.values())])


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
    changes = {key: value for key, value in after.items() if value != before.get(key)}
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            changes[key] = difference(before[key], value)
    return changes


def text_of_settings(settings: dict[str, Any], comments: Optional[dict[str, str]] = None) -> str:
    """The text of a config, as mmengine writes it, with comments above some settings."""
    lines = []
    for key, value in settings.items():
        check_value(value)
        if comments and key in comments:
            lines.append(f'\n# {comments[key]}')
        lines.append(Config({key: value}).pretty_text.rstrip('\n'))
    return '\n'.join(lines) + '\n'


def check_value(value: Any) -> None:
    """Check that mmengine reads a setting as it is written."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            check_value(item)
    elif isinstance(value, type):
        raise UserError(f'the base must name types with strings, got {one_line(repr(value))}')
    elif isinstance(value, str) and '{{' in value.removeprefix(f'{HERE}/'):
        raise UserError(f'names of classes and folders must not have {{{{, got {value!r}')
