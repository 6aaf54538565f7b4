"""What is in the data sets of a config: classes, sizes and samples, as an HTML page."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from mmengine.config import Config
from PIL import Image

from ...results.drawing import draw_boxes, draw_segmentation
from ...tooling.files import atomic_write
from ...tooling.pages import (
    bar_chart,
    cards,
    contact_sheet,
    histogram,
    html_page,
    html_section,
    reduced,
    side_by_side,
)
from ..config.load import dataset_class, kind_of
from ..inference.prediction import dataset_meta
from ..inference.raster import ReadError
from .checks import annotation_file, data_of
from .coco import indexed_coco, usable_content
from .images import shown_image
from .label_maps import label_map_reader

LABEL_MAPS = 500  # whose pixels are counted
MOST_CLASSES = 60  # in a chart; the rarest of more are left out
SEED = 0  # of the samples


class Facts(NamedTuple):
    """What the page shows of a data set."""

    cards: dict[str, str]
    counts: dict[str, float]  # by class
    charts: list[str]
    pictures: list[tuple[Image.Image, str]]


def write_data_page(
    cfg: Config, splits: Sequence[str], path: Path, title: str, samples: int
) -> None:
    """Write a page about the data sets of a config.

    Args:
        cfg: the config.
        splits: of train, val and test.
        path: the page.
        title: what was checked.
        samples: number of images of each split to show.
    """
    seen, parts, counts = [], [], {}
    for split in splits:
        meta = dataset_meta(cfg, {}, split) if data_of(cfg, split) else {}
        for number, dataset in enumerate(data_of(cfg, split)):
            contents = {k: v for k, v in dataset.items() if k not in ('pipeline', 'test_mode')}
            if contents in seen:  # test is often the same as val
                continue
            seen.append(contents)
            facts = facts_of(dataset, cfg.default_scope, meta, samples)
            if facts is None:
                continue
            name = f'{split}{number or ""}'
            counts[name] = facts.counts
            parts.append(
                html_section(
                    f'{name} data', '', cards(facts.cards), side_by_side(*facts.charts),
                    contact_sheet(facts.pictures),
                )
            )  # fmt: skip
    if counts:
        parts.insert(0, class_section(counts))
    with atomic_write(path) as file:
        page = html_page(f'Data of {title}', 'Written by tools/check_data.py.', parts)
        file.write_text(page, encoding='utf-8', errors='replace')
    print(f'classes, sizes and samples: {path}')


def class_section(counts: dict[str, dict[str, float]]) -> str:
    """The classes of all data sets next to each other."""
    charts = []
    for name, values in counts.items():
        common = dict(sorted(values.items(), key=lambda item: -item[1])[:MOST_CLASSES])
        charts.append(bar_chart(common, name, '{:,g}'.format))
    some = next(iter(counts.values()))
    absent = [name for name in some if not some[name]]
    note = 'Objects, or for label maps percent of the pixels.'
    if absent:
        note += f' Without any in the first: {", ".join(absent[:12])}.'
    return html_section('Classes', note, side_by_side(*charts))


def facts_of(dataset: dict, scope: str, meta: dict, samples: int) -> Optional[Facts]:
    """The facts about a data set; None for one of a kind that is not checked."""
    kinds = {base.__name__ for base in dataset_class(dataset, scope).__mro__}
    if kind_of(dataset) == 'CocoDataset' and dataset.get('ann_file'):
        return facts_of_objects(dataset, meta, samples)
    if 'BaseSegDataset' in kinds:
        return facts_of_label_maps(dataset, scope, meta, samples)
    return None


def facts_of_objects(dataset: dict, meta: dict, samples: int) -> Facts:
    truth = indexed_coco(usable_content(annotation_file(dataset))[0])
    names = {key: category['name'] for key, category in truth.cats.items()}
    objects = list(truth.anns.values())
    counts = Counter(names[annotation['category_id']] for annotation in objects)
    sides = np.reshape([annotation['bbox'][2:] for annotation in objects], (-1, 2)).astype(float)
    sides = sides[(sides > 0).all(1)]
    by_image = Counter(annotation['image_id'] for annotation in objects)
    images = list(truth.imgs.values())
    long = [max(image['height'], image['width']) for image in images]
    root = Path(dataset.get('data_root') or '', (dataset.get('data_prefix') or {}).get('img') or '')
    chosen = sample_of(images, samples)
    shown = {
        'images': f'{len(images):,}',
        'objects': f'{len(objects):,}',
        'without objects': f'{len(images) - len(by_image):,}',
        'crowds': f'{sum(bool(annotation["iscrowd"]) for annotation in objects):,}',
    }
    charts = [
        histogram(np.sqrt(sides.prod(1)), 'size of objects, pixels (root of the area)'),
        histogram(sides[:, 0] / sides[:, 1], 'aspect ratio of objects (width / height)'),
        histogram(np.array(long), 'longer side of images, pixels'),
        bar_chart(objects_in_images(by_image, len(images)), 'objects in an image: images'),
    ]
    pictures = [picture_of_objects(root, truth, image, meta) for image in chosen]
    return Facts(shown, {name: counts[name] for name in names.values()}, charts, pictures)


def objects_in_images(by_image: Counter, images: int) -> dict[str, int]:
    """The number of images with 0, 1, 2 to 3, 4 to 7 objects and so on."""
    counts = {'0': images - len(by_image)}
    for number in sorted(by_image.values()):
        low = 2 ** int(np.log2(number))
        name = str(low) if low == 1 else f'{low} to {2 * low - 1}'
        counts[name] = counts.get(name, 0) + 1
    return counts


def picture_of_objects(root: Path, truth: Any, image: dict, meta: dict) -> tuple[Image.Image, str]:
    """An image with its annotations, and a caption."""
    name = image['file_name']
    try:
        small, factor = reduced(shown_image(root / name))
    except ReadError as error:
        return Image.new('RGB', (400, 60), 'gray'), f'{name}: {error}'
    classes = [category['name'] for category in truth.cats.values()]
    colors = dict(zip(meta['classes'], meta['palette']))
    labels = {key: label for label, key in enumerate(truth.cats)}
    found = truth.imgToAnns[image['id']]
    boxes = np.reshape([annotation['bbox'] for annotation in found], (-1, 4)).astype(float)
    boxes[:, 2:] += boxes[:, :2]
    drawn = draw_boxes(
        small,
        boxes * factor,
        [labels[annotation['category_id']] for annotation in found],
        None,
        classes,
        [colors.get(name, (128, 128, 128)) for name in classes],
        masks=masks_of_objects(found, truth, image, small.shape[:2]),
    )
    return drawn, f'{name}: {len(found)} objects'


def masks_of_objects(
    objects: Sequence[dict], truth: Any, image: dict, size: tuple[int, int]
) -> Optional[np.ndarray]:
    """The masks (N, h, w) of objects in an image that was resized; None if one has none."""
    if not objects or not all(annotation.get('segmentation') for annotation in objects):
        return None
    rows = np.arange(size[0]) * image['height'] // size[0]
    columns = np.arange(size[1]) * image['width'] // size[1]
    try:
        masks = [truth.annToMask(annotation) for annotation in objects]
        return np.stack([mask[rows][:, columns].astype(bool) for mask in masks])
    except Exception:  # pycocotools raises many kinds on a damaged mask
        return None


def facts_of_label_maps(dataset: dict, scope: str, meta: dict, samples: int) -> Facts:
    infos, load = label_map_reader(dataset, scope)
    classes, palette = meta['classes'], meta['palette']
    pixels, sides, read = np.zeros(256, np.int64), [], 0
    for info in sample_of(list(infos.values()), LABEL_MAPS):
        labels = label_map_or_none(load, info)
        if labels is not None:
            pixels += np.bincount(labels.ravel().clip(0, 255), minlength=256)
            sides.append(max(labels.shape))
            read += 1
    total = max(pixels[: len(classes)].sum(), 1)
    shares = {name: round(100 * pixels[i] / total, 2) for i, name in enumerate(classes)}
    pictures = []
    for info in sample_of(list(infos.values()), samples):
        name, labels = Path(info['img_path']).name, label_map_or_none(load, info)
        try:
            small, _ = reduced(shown_image(Path(info['img_path'])))
        except ReadError as error:
            pictures.append((Image.new('RGB', (400, 60), 'gray'), f'{name}: {error}'))
            continue
        if labels is None:
            pictures.append((Image.fromarray(small), f'{name}: no readable label map'))
            continue
        rows = np.arange(small.shape[0]) * labels.shape[0] // small.shape[0]
        columns = np.arange(small.shape[1]) * labels.shape[1] // small.shape[1]
        drawn = draw_segmentation(small, labels[rows][:, columns], classes, palette)
        pictures.append((drawn, name))
    ignored = pixels[len(classes) :].sum() / max(pixels.sum(), 1)
    shown = {'images': f'{len(infos):,}', 'maps counted': f'{read:,}', 'ignored': f'{ignored:.1%}'}
    charts = [histogram(np.array(sides), 'longer side of images, pixels')]
    return Facts(shown, shares, charts, pictures)


def label_map_or_none(load: Any, info: dict) -> Optional[np.ndarray]:
    try:
        labels = load(info)
    except Exception:  # reported by the check
        return None
    return labels if labels.ndim == 2 else None


def sample_of(items: list, count: int) -> list:
    """Items at random, in their order; the same each time."""
    if len(items) <= count:
        return items
    chosen = np.random.default_rng(SEED).choice(len(items), count, replace=False)
    return [items[i] for i in sorted(chosen)]
