"""A config for a data set: reads and checks what a description declares, and adapts a base."""

import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional

import numpy as np
from mmengine.config import Config

from ..config.load import load_config
from ..config.pipelines import pipeline_of
from ..config.shipped import CONFIG_SUFFIXES, is_config_name, shipped_configs
from ..tooling.command import UserError
from ..tooling.files import (
    atomic_write,
    check_file,
    check_folder,
    check_new,
    files_below,
    scratch_folder,
)
from ..tooling.report import amount
from .about import lines_about_data
from .adapt import (
    HERE,
    Code,
    ignore_objects,
    model_changes,
    relative,
    repetitions,
    task_of,
    text_of_settings,
    wrapped,
)
from .data import DataImage, DataSet, Split, coco_of_split, divided
from .defects import Defects
from .description import SPLITS
from .images import ALL, HEADERS
from .layout import Holds
from .layouts import formats_with
from .listing import GENERATED, WRITTEN
from .mask_values import are_indices, palette_of, write_indices, zero_is_ignored
from .read import checked_source
from .recipes import Scales, adapted_recipe

LABELS = 'labels'  # folder of converted masks
SEED = 0  # of the validation split
HOLDS: dict[str, Holds] = {
    'segmentation': 'masks',
    'detection': 'objects',
    'instance': 'objects',
}


class Generated(NamedTuple):
    """The folder of what is written next to a config."""

    path: Path
    name: str  # in the config

    def write(self, name: str, text: str) -> str:
        """Write a file; returns its path as the config has it."""
        self.path.mkdir(exist_ok=True)
        (self.path / name).write_text(text, encoding='utf-8')
        return f'{self.name}/{name}'


class DataSettings(NamedTuple):
    """The data sets of a config, and what is known about them."""

    datasets: dict[str, dict]  # of train, val and test, without the settings they share
    metainfo: dict[str, Any]
    sizes: np.ndarray  # (N, 2) heights and widths of the training images
    # (M, 3) of objects that are not ignored: root of the area, size of the image
    objects: np.ndarray = np.zeros((0, 3))
    has_ignored: bool = False  # training images have objects that do not count (`iscrowd`)
    lines: Sequence[str] = ()  # what was found, for people
    reduces_zero: bool = False  # masks are read with mmseg's `reduce_zero_label`, in all splits


def new_config(
    source: Path,
    base: Path,
    out: Path,
    skip_bad: bool = False,
    overwrite: bool = False,
    epochs: Optional[int] = None,
) -> list[str]:
    """Write a config for a data set, and the files that it needs to a folder next to it; returns
    lines for people.

    All files are written next to their places and then renamed: on a full disk there are none.

    Args:
        source: a description, or a folder whose layout is recognized.
        base: config with the model and the recipe.
        out: the config to write; the folder has its name and ends with `_data`.
        skip_bad: leave out what has errors.
        overwrite: replace files that exist.
        epochs: length of the training; None chooses it by the number of images.
    """
    folder = out.with_name(out.stem + GENERATED)
    check_paths(source, base)
    check_output(out, folder, base, overwrite)
    cfg = load_config(base)
    task = task_of(cfg, base)
    found = Defects(masks=task == 'instance', skips=skip_bad)
    # The header of a truncated image is complete. What is left out must be found here.
    how = ALL if skip_bad else HEADERS
    formats = formats_with(HOLDS[task])
    data = checked_source(source, formats, how, found, lambda data: check_task(data, task)).data
    found.stop()
    with scratch_folder(folder.resolve().parent) as scratch:
        target = Generated(scratch / folder.name, f'{HERE}/{folder.name}')
        settings = data_settings(data, target)
        text, lines = config_text(cfg, data, settings, task, base, out, epochs)
        with atomic_write(out) as config:
            config.write_text(text, encoding='utf-8')
            if target.path.exists():
                move_files(target.path, folder)
    written = f'{out} and {folder}/' if folder.exists() else str(out)
    if (folder / LABELS).exists():
        lines.append(f'note: {folder / LABELS}/ has the segmentation masks as class indices')
    return [*settings.lines, *lines, f'wrote {written}']


def move_files(source: Path, target: Path) -> None:
    """Move the files in a folder to one in the same file system, in which others may be."""
    if not target.exists():
        os.replace(source, target)
        return
    for path in files_below(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)


def find_base(base: str) -> Path:
    """The config that a path names, or the name of a config of this package, with or without `.py`
    and the folder `configs`.

    Raises:
        UserError: there is none.
    """
    path = Path(base)
    if path.exists():
        return path
    known = shipped_configs()
    if path.stem in known and path.parent.name in ('', 'configs', 'demo'):
        return known[path.stem]
    similar = difflib.get_close_matches(path.stem, known, n=5, cutoff=0.5)
    names = f', such as {", ".join(similar)}' if similar else ''
    raise UserError(
        f'no config at {base}; --base is a config file, or the name of a config of this package'
        f'{names} (cpvt new-config --help lists them)'
    )


def check_paths(source: Path, base: Path) -> None:
    if base.is_dir() and source.suffix.lower() == '.py':
        raise UserError(f'the data and --base are swapped: {base} is a folder, {source} a config')
    if base.is_dir() or base.is_file() and not is_config_name(base):
        kinds = ', '.join(CONFIG_SUFFIXES)
        raise UserError(f'--base must be a config with the suffix {kinds}, got {base}')


def check_output(out: Path, folder: Path, base: Path, overwrite: bool) -> None:
    if out.suffix != '.py' or base.exists() and out.exists() and base.samefile(out):
        raise UserError(f'--out must be a .py file other than the base, got {out}')
    if re.search(r"""['"\\{}\n]""", os.path.abspath(out)):
        raise UserError(f'the path of --out must have no quotes, braces and backslashes, got {out}')
    check_file(out)
    check_folder(folder)
    check_new(out, folder, overwrite=overwrite)


def check_task(data: DataSet, task: str) -> None:
    """Check that a data set of objects has masks if the base trains them."""
    every = [item for split in data.splits.values() for item in split.objects]
    if task == 'instance' and not any(item.has_mask or item.has_bad_mask for item in every):
        source, format = data.description.source, data.description.format
        raise UserError(
            f'the base trains masks, but {source} has boxes only ({format}); choose a base such as '
            'retinanet_cpvt_s.py'
        )


# Data sets


def data_settings(data: DataSet, target: Generated) -> DataSettings:
    """The settings of the data sets; writes to `target` what mm cannot read as it is."""
    source = data.description.source
    splits = {key: split for key, split in data.splits.items() if split.images}
    notes = list(data.notes)
    if 'test' in splits and not splits['test'].is_annotated:
        del splits['test']
        notes.append('the test data have no annotations: cpvt test uses the validation data')
    if 'train' not in splits:
        others = ' and '.join(splits) or 'images with errors'
        raise UserError(f'{source} has no training data without errors, only {others}')
    if 'val' not in splits:
        train, val = without_validation(splits.pop('train'))
        chosen = amount(len(val.images), 'training image')
        notes.append(
            f'no validation data: {chosen}, chosen at random with seed 0, will be used for it. '
            'Divide frames of a video or views of one scene yourself'
        )
        splits = {'train': train, 'val': val, **splits}
    used = data._replace(splits=splits, notes=notes)
    found = settings_of_masks(used, target) if data.masks else settings_of_objects(used, target)
    first, *rest = lines_about_data(used)
    return found._replace(lines=[f'{source}: {data.description.format}, {first}', *rest])


def without_validation(train: Split) -> tuple[Split, Split]:
    """Training and validation data where there are no validation data: of these a fifth, at most
    2,000."""
    images = train.images
    if len(images) < 2:
        raise UserError('there must be at least 2 training images, one of them for validation')
    count = min(max(len(images) // 5, 1), 2000)
    chosen = np.zeros(len(images), bool)
    chosen[np.random.default_rng(SEED).permutation(len(images))[:count]] = True
    first, second = (train._replace(images=part, path=None) for part in divided(images, chosen))
    return first, second


def settings_of_objects(data: DataSet, target: Generated) -> DataSettings:
    """The settings of a detector's data; writes annotations that are no COCO file as they are."""
    root = data.description.root
    classes = data.classes
    datasets = {
        key: coco_dataset(key, split, classes, root, target) for key, split in data.splits.items()
    }
    train = data.splits['train']
    objects = []
    for image in train.images:
        for item in image.objects:
            if not item.is_ignored:
                area = item.box[2] * item.box[3]
                objects.append((max(area, 0) ** 0.5, *image.size))
    return DataSettings(
        datasets,
        dict(classes=tuple(data.classes)),
        sizes_of_images(train),
        np.array(objects).reshape(-1, 3),
        has_ignored=len(objects) < len(train.objects),
    )


def sizes_of_images(split: Split) -> np.ndarray:
    """(N, 2) heights and widths."""
    return np.array([image.size for image in split.images], float)


def coco_dataset(
    key: str, split: Split, classes: Sequence[str], root: Path, target: Generated
) -> dict[str, Any]:
    """The settings of a data set; writes its annotations, unless a COCO file has them."""
    if split.path:
        file = relative(split.path, root)
    else:
        content = coco_of_split(split, classes)
        file = target.write(f'{key}.json', json.dumps(content, ensure_ascii=False))
    folder = f'{relative(split.folder, root)}/'.removeprefix('./')
    dataset: dict[str, Any] = dict(type='CocoDataset', ann_file=file, data_prefix=dict(img=folder))
    if key == 'train':
        dataset['filter_cfg'] = dict(filter_empty_gt=False, min_size=1)
    else:
        dataset['test_mode'] = True
    return dataset


def settings_of_masks(data: DataSet, target: Generated) -> DataSettings:
    """The settings of a segmentor's data; writes lists of images. Writes the masks of all splits as
    indices if mmseg does not read the values of the files, or if the files of a split are not as
    BaseSegDataset expects them: one reading serves all splits, as their pipelines share it."""
    assert data.masks is not None
    places = {
        key: [place_of(image) for image in split.images] for key, split in data.splits.items()
    }
    has_one_end = all(len({end for _, end in of_split}) == 1 for of_split in places.values())
    is_reduced = zero_is_ignored(data.masks)
    converts = not has_one_end or not (is_reduced or are_indices(data.masks))
    reduces_zero = is_reduced and not converts
    palette = palette_of(data)
    datasets = {}
    for key, split in data.splits.items():
        names = [name for name, _ in places[key]]
        end = places[key][0][1]
        if converts:
            names = [image.name for image in split.images]
            end = EndsOfNames('', '', f'{target.name}/{LABELS}', '.png')
            for image in split.images:
                path = target.path / f'{LABELS}/{image.name}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                write_indices(split.folder / str(image.mask), path, data.masks, palette)
        datasets[key] = dict(
            type='BaseSegDataset',
            ann_file=target.write(f'{key}.txt', ''.join(f'{name}\n' for name in names)),
            img_suffix=end.image_suffix,
            seg_map_suffix=end.mask_suffix,
            data_prefix=dict(img_path=end.images, seg_map_path=end.masks),
            reduce_zero_label=reduces_zero,
        )
    metainfo = dict(classes=tuple(data.classes), palette=list(palette))
    sizes = sizes_of_images(data.splits['train'])
    return DataSettings(datasets, metainfo, sizes, reduces_zero=reduces_zero)


class EndsOfNames(NamedTuple):
    """What BaseSegDataset adds to the name of an image and its mask."""

    images: str  # folder
    image_suffix: str
    masks: str  # folder
    mask_suffix: str


def place_of(entry: DataImage) -> tuple[str, EndsOfNames]:
    """The name that an image and its mask share, with the last folders if they share them, and what
    is added to it."""
    image = PurePosixPath(entry.name)
    mask = PurePosixPath(str(entry.mask))
    name = os.path.commonprefix([image.stem, mask.stem])
    if name not in (image.stem, mask.stem):
        name = re.sub('[ _.-]?[A-Za-z]*$', '', name)
    image_suffix = image.name[len(name) :]
    mask_suffix = mask.name[len(name) :]
    images = image.parent
    masks = mask.parent
    while images.name and images.name == masks.name:
        name = f'{images.name}/{name}'
        images = images.parent
        masks = masks.parent
    return name, EndsOfNames(str(images), image_suffix, str(masks), mask_suffix)


# The config


def config_text(
    cfg: Config,
    data: DataSet,
    settings: DataSettings,
    task: str,
    base: Path,
    out: Path,
    epochs: Optional[int] = None,
) -> tuple[str, list[str]]:
    """The text of the config `out`, and lines for people; `cfg` is the config at `base`."""
    here = Path(os.path.abspath(out)).parent
    scaled = Scales.of(cfg, settings.sizes, task)
    images = len(settings.sizes) * repetitions(cfg.train_dataloader.dataset)
    recipe = adapted_recipe(cfg, images, epochs)
    metainfo = dict(settings.metainfo)
    if 'palette' in metainfo:
        metainfo['palette'] = Code(str(metainfo['palette']))  # mmengine gives each number a line
    values: dict[str, Any] = {
        '_base_': relative(Path(os.path.abspath(base)), here),
        'data_root': f'{HERE}/{relative(Path(os.path.abspath(data.description.root)), here)}',
        'metainfo': metainfo,
    }
    changes = model_changes(cfg.model, len(data.classes), scaled, settings.has_ignored)
    if changes:
        values['model'] = changes
    for key, pipeline in (
        ('train_pipeline', pipeline_of(cfg, 'train')),
        ('test_pipeline', pipeline_of(cfg, 'val')),
        ('tta_pipeline', cfg.get('tta_pipeline')),
    ):
        if pipeline:
            is_test = key == 'test_pipeline'
            values[key] = scaled.pipeline(pipeline, settings.reduces_zero, is_test)
    values |= loader_settings(cfg, settings, task, base) | recipe.settings
    comments = dict(recipe.comments)
    if scaled.keeps_resolution:
        comments['train_pipeline'] = 'Images keep their resolution, as with cpvt infer --tile.'
    elif scaled.scale != 1:
        comments['train_pipeline'] = f'The base resizes to {scaled.before}.'
    classes = amount(len(data.classes), 'class', 'classes')
    head = (
        f'# {classes} ({data.description.format}). {WRITTEN}\n'
        f'#   cpvt check-data {out.name}\n'
        f'#   cpvt train {out.name}\n'
    )
    lines = [scaled.line(settings.sizes, settings.objects), recipe.line, recipe.reason]
    if settings.has_ignored and not ignore_objects(cfg.model.to_dict()):
        lines.append(
            'note: the model of the base cannot ignore objects in training: those that are ignored '
            'count as background'
        )
    return head + text_of_settings(values, comments), lines


def loader_settings(cfg: Config, settings: DataSettings, task: str, base: Path) -> dict[str, Any]:
    """The settings of the data loaders and metrics."""
    values: dict[str, Any] = {}
    common = dict(data_root=Code('data_root'), metainfo=Code('metainfo'))
    for split in SPLITS:
        found = settings.datasets.get(split) or settings.datasets['val']
        pipeline = Code('train_pipeline' if split == 'train' else 'test_pipeline')
        dataset = dict(**found, **common, pipeline=pipeline)
        if split == 'train':
            dataset = wrapped(cfg, dataset, base)
        # Without _delete_ mmengine would merge it into the base's.
        values[f'{split}_dataloader'] = dict(dataset=dict(_delete_=True, **dataset))
        if split != 'train':
            values[f'{split}_evaluator'] = dict(_delete_=True, **metric_of(found, task))
    return values


def metric_of(dataset: dict[str, Any], task: str) -> dict[str, Any]:
    """The metric of a data set."""
    if task == 'segmentation':
        return dict(type='IoUMetric', iou_metrics=['mIoU'])
    file = dataset['ann_file']
    return dict(
        type='CocoMetric',
        ann_file=file if file.startswith(HERE) else Code(f'data_root + {"/" + file!r}'),
        metric=['bbox', 'segm'] if task == 'instance' else 'bbox',
    )
