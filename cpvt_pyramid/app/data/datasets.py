"""A data set as OpenMMLab's data sets read it: settings, and the files that these need."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from ..tooling.command import UserError
from ..tooling.report import amount
from .adapt import relative
from .data import DataImage, DataSet, Split, coco_of_split, divided
from .mask_values import are_indices, palette_of, write_indices, zero_is_ignored

LABELS = 'labels'  # folder of converted masks
SEED = 0  # of the validation split


class Generated(NamedTuple):
    """The folder of what is written next to a config."""

    path: Path
    name: str  # in the config

    def write(self, name: str, text: str) -> str:
        """Write a file; returns its path as the config has it."""
        self.path.mkdir(exist_ok=True)
        (self.path / name).write_text(text, encoding='utf-8')
        return f'{self.name}/{name}'


def with_validation(data: DataSet) -> DataSet:
    """A data set for a training: without test images that nobody has annotated, and with validation
    data, for which some of the training images are taken if there are none."""
    splits = {key: split for key, split in data.splits.items() if split.images}
    notes = list(data.notes)
    if 'test' in splits and not splits['test'].is_annotated:
        del splits['test']
        notes.append('the test data have no annotations: cpvt test uses the validation data')
    if 'train' not in splits:
        others = ' and '.join(splits) or 'images with errors'
        source = data.description.source
        raise UserError(f'{source} has no training data without errors, only {others}')
    if 'val' not in splits:
        train, val = without_validation(splits.pop('train'))
        chosen = amount(len(val.images), 'training image')
        notes.append(
            f'no validation data: {chosen}, chosen at random with seed 0, will be used for it. '
            'Divide frames of a video or views of one scene yourself'
        )
        splits = {'train': train, 'val': val, **splits}
    return data._replace(splits=splits, notes=notes)


def without_validation(train: Split) -> tuple[Split, Split]:
    """Training and validation data where there are no validation data: of these a fifth, at most
    2,000; as large a part of the images without annotations as of all."""
    images = train.images
    is_annotated = np.array([has_annotations(image) for image in images], bool)
    annotated = np.flatnonzero(is_annotated)
    others = np.flatnonzero(~is_annotated)
    if len(annotated) < 2:
        raise UserError(
            'there must be at least 2 training images with annotations that count, one of them for '
            'validation'
        )
    count = min(max(len(images) // 5, 1), 2000)
    count_of_others = count * len(others) // len(images)
    generator = np.random.default_rng(SEED)
    chosen = np.zeros(len(images), bool)
    chosen[generator.permutation(annotated)[: count - count_of_others]] = True
    chosen[generator.permutation(others)[:count_of_others]] = True
    first, second = (train._replace(images=part, path=None) for part in divided(images, chosen))
    return first, second


def has_annotations(image: DataImage) -> bool:
    """Whether an image has a mask, or an object that counts."""
    return bool(image.mask) or not all(item.is_ignored for item in image.objects)


def datasets_of(data: DataSet, target: Generated) -> dict[str, dict[str, Any]]:
    """The settings of the data set of each split, without those that they share; writes to `target`
    what OpenMMLab cannot read as it is."""
    if data.masks:
        return mask_datasets(data, target)
    root = data.description.root
    return {
        key: coco_dataset(key, split, data.classes, root, target)
        for key, split in data.splits.items()
    }


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


def mask_datasets(data: DataSet, target: Generated) -> dict[str, dict[str, Any]]:
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
            reduce_zero_label=is_reduced and not converts,
        )
    return datasets


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
