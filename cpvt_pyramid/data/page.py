"""What is in the data sets of a config: classes, sizes and samples, as an HTML page."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from mmengine.config import Config
from PIL import Image

from ..config.parts import dataset_meta
from ..predict.drawing import draw_boxes, draw_segmentation
from ..tooling.charts import bar_chart, histogram
from ..tooling.files import write_text
from ..tooling.pages import Markup, contact_sheet, html_page, html_section, reduced, side_by_side
from ..tooling.rasters import ReadError
from .checks import annotation_file, distinct_data, image_folder, is_coco
from .coco import indexed_coco, usable_content
from .images import shown_image
from .label_maps import is_segmentation, label_map_reader

LABEL_MAPS = 500  # whose pixels are counted
MOST_CLASSES = 60  # in a chart; the rarest of more are left out
SEED = 0  # of the samples


def write_data_page(
    cfg: Config, splits: Sequence[str], path: Path, title: str, samples: int
) -> None:
    """Write a page about the data sets of a config, with a number of samples of each split."""
    parts, classes = [], []
    for split, number, dataset in distinct_data(cfg, splits):
        name = f'{split}{number or ""}'
        if is_coco(dataset):
            counts, *shown = facts_of_objects(dataset, samples)
        elif is_segmentation(dataset, cfg.default_scope):
            meta = dataset_meta(cfg, {}, split)
            counts, *shown = facts_of_label_maps(dataset, cfg.default_scope, meta, samples)
        else:
            continue
        common = sorted(counts.items(), key=lambda item: -item[1])[:MOST_CLASSES]
        classes.append(bar_chart(dict(common), name, '{:,g}'.format))
        parts.append(html_section(f'{name} data', '', *shown))
    if classes:
        note = 'Objects, or for segmentation masks percent of the pixels.'
        parts.insert(0, html_section('Classes', note, side_by_side(*classes)))
    page = html_page(f'Data of {title}', 'Written by cpvt check-data.', parts)
    write_text(path, page)
    print(f'classes, sizes and samples: {path}')


def facts_of_objects(dataset: dict, samples: int) -> tuple[dict, Markup, Markup]:
    """The number of objects by class, and what the page shows."""
    truth = indexed_coco(usable_content(annotation_file(dataset))[0])
    names = {key: category['name'] for key, category in truth.cats.items()}
    images = list(truth.imgs.values())
    objects = list(truth.anns.values())
    counts = Counter(names[annotation['category_id']] for annotation in objects)
    sides = np.reshape([annotation['bbox'][2:] for annotation in objects], (-1, 2)).astype(float)
    sides = sides[(sides > 0).all(1)]
    long = np.array([max(image['height'], image['width']) for image in images])
    charts = (
        histogram(np.sqrt(sides.prod(1)), 'size of objects, pixels (root of the area)'),
        histogram(sides[:, 0] / sides[:, 1], 'aspect ratio of objects (width / height)'),
        histogram(long, 'longer side of images, pixels'),
    )
    labels = {key: label for label, key in enumerate(names)}
    classes = list(names.values())

    def draw(index: int, small: np.ndarray, factor: float) -> tuple[Image.Image, str]:
        found = truth.imgToAnns[images[index]['id']]
        boxes = np.reshape([annotation['bbox'] for annotation in found], (-1, 4)).astype(float)
        boxes[:, 2:] += boxes[:, :2]
        numbers = np.array([labels[annotation['category_id']] for annotation in found], int)
        masks = masks_of_objects(found, truth, small.shape[:2])
        drawn = draw_boxes(small, boxes * factor, numbers, None, classes, masks=masks)
        return drawn, f'{images[index]["file_name"]}: {len(found)} objects'

    paths = [image_folder(dataset) / image['file_name'] for image in images]
    pictures = drawn_samples(paths, samples, draw)
    return {name: counts[name] for name in classes}, side_by_side(*charts), pictures


def drawn_samples(
    paths: Sequence[Path],
    samples: int,
    draw: Callable[[int, np.ndarray, float], tuple[Image.Image, str]],
) -> Markup:
    """Pictures of some images; `draw` gets the index of an image, the image reduced, and the
    factor, and returns the picture and its caption."""
    found = []
    for index in sample_of(range(len(paths)), samples):
        try:
            found.append(draw(index, *reduced(shown_image(paths[index]))))
        except ReadError as error:
            picture = Image.new('RGB', (400, 60), 'gray')
            found.append((picture, f'{paths[index].name}: {error}'))
    return contact_sheet(found)


def masks_of_objects(
    objects: Sequence[dict], truth: Any, size: tuple[int, int]
) -> Optional[np.ndarray]:
    """The masks (N, h, w) of objects in an image that was resized; None if one has none."""
    if not objects or not all(annotation.get('segmentation') for annotation in objects):
        return None
    try:
        masks = [at_size(truth.annToMask(annotation), size) for annotation in objects]
        return np.stack(masks).astype(bool)
    except Exception:  # pycocotools raises many kinds on a damaged mask
        return None


def at_size(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A label map or mask at another (height, width)."""
    rows, columns = (np.arange(new) * old // new for new, old in zip(size, labels.shape))
    return labels[rows][:, columns]


def facts_of_label_maps(
    dataset: dict, scope: str, meta: dict, samples: int
) -> tuple[dict, Markup, Markup]:
    """The percentage of pixels by class, and what the page shows."""
    by_path, load = label_map_reader(dataset, scope)
    infos = list(by_path.values())
    classes = meta['classes']
    palette = meta['palette']
    pixels = np.zeros(256, np.int64)
    sides = []
    for info in sample_of(infos, LABEL_MAPS):
        labels = label_map_or_none(load, info)
        if labels is None:
            continue
        pixels += np.bincount(labels.ravel().clip(0, 255), minlength=256)
        sides.append(max(labels.shape))
    total = max(pixels[: len(classes)].sum(), 1)
    shares = {name: round(100 * pixels[i] / total, 2) for i, name in enumerate(classes)}

    def draw(index: int, small: np.ndarray, factor: float) -> tuple[Image.Image, str]:
        name = paths[index].name
        labels = label_map_or_none(load, infos[index])
        if labels is None:
            return Image.fromarray(small), f'{name}: no readable segmentation mask'
        return draw_segmentation(small, at_size(labels, small.shape), classes, palette), name

    paths = [Path(info['img_path']) for info in infos]
    chart = histogram(np.array(sides), 'longer side of images, pixels')
    return shares, side_by_side(chart), drawn_samples(paths, samples, draw)


def label_map_or_none(load: Any, info: dict) -> Optional[np.ndarray]:
    try:
        labels = load(info)
    except Exception:  # reported by the check
        return None
    return labels if labels.ndim == 2 else None


def sample_of(items: Sequence, count: int) -> Sequence:
    """Items at random, in their order; the same each time."""
    if len(items) <= count:
        return items
    chosen = np.random.default_rng(SEED).choice(len(items), count, replace=False)
    return [items[i] for i in sorted(chosen)]
