"""Cut boxes out of images, each into a file: those of a data set, or those that cpvt infer found.

    cpvt crop data.yaml --split train --out-dir crops
    cpvt infer trees.onnx photos --out-dir results
    cpvt crop results --score-thr 0.5 --margin 0.1 --out-dir crops

A box becomes OUT_DIR/CLASS/NAME-NUMBER.png. NAME is the path of its image with _ between its parts
and without its ending. A number is added where two images would have the same NAME. OUT_DIR must be
new or empty: it gets all files or, if there is an error, none. A folder for each class is what
torchvision's ImageFolder and others read, for example to train a classifier of what a detector
finds.
"""

# OpenCV and pycocotools, which take a second to import, are imported inside functions.
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Optional

from ..tooling.command import UserError, check_at_least, one_line, run_command
from ..tooling.files import check_folder, distinct_name, is_taken, new_folder, path_from, shortened
from ..tooling.progress import progress
from ..tooling.report import amount

GROUP = 'data'


Box = tuple[float, float, float, float]  # left, top, right and bottom in pixels


class Boxes(NamedTuple):
    """The boxes of an image.

    Attributes:
        image: its file.
        name: begins the names of its crops; several images may have the same.
        boxes: each with the name of its class.
    """

    image: Path
    name: str
    boxes: list[tuple[str, Box]]


def crop(
    source: str,
    *,
    out_dir: str = 'crops',
    split: Optional[Literal['train', 'val', 'test']] = None,
    score_thr: Optional[float] = None,
    margin: float = 0.0,
) -> None:
    """Cut boxes out of images.

    Args:
        source: a data.yaml or a folder with annotated images, as in cpvt test, or a folder with
            results of cpvt infer.
        out_dir: folder for the files.
        split: split of the data; by default all.
        score_thr: lowest score of a box, for results of cpvt infer.
        margin: what is added to a box on each side, as a share of its width or height.
    """
    check_at_least('margin', margin, 0)
    check_folder(out_dir)
    if is_taken(Path(out_dir)):
        raise UserError(f'{out_dir} exists; remove it, or choose another --out-dir')
    from ..predict.result_files import has_results

    if has_results(Path(source)):
        if split is not None:
            raise UserError(f'--split is for annotated images, but {source} has results')
        found = boxes_of_results(Path(source), score_thr or 0.0)
    else:
        if score_thr is not None:
            raise UserError(f'--score-thr needs results of cpvt infer, which {source} has not')
        found = boxes_of_data(Path(source), split)
    if not any(entry.boxes for entry in found):
        raise UserError(f'{source} has no boxes')
    with new_folder(Path(out_dir)) as folder:
        counts = write_crops(found, folder, margin)
    classes = amount(len(counts), 'class', 'classes')
    print(f'{amount(sum(counts.values()), "crop")} of {classes} in {out_dir}')


def boxes_of_results(folder: Path, score_thr: float) -> list[Boxes]:
    """The boxes in a folder of cpvt infer with at least a score."""
    from ..predict.result_files import detections_in

    found = []
    for name, image in detections_in(folder):
        boxes: list[tuple[str, Box]] = []
        for item in image.objects:
            left, top, right, bottom = item['box']
            if item['score'] >= score_thr:
                boxes.append((item['class'], (left, top, right, bottom)))
        found.append(Boxes(image.path, name, boxes))
    return found


def boxes_of_data(source: Path, split: Optional[str]) -> list[Boxes]:
    """The boxes of annotated images, without objects to be ignored, such as crowds."""
    from ..data.defects import Defects
    from ..data.images import HEADERS
    from ..data.layouts import formats_with
    from ..data.read import checked_source

    defects = Defects()
    described, data = checked_source(source, formats_with('objects'), HEADERS, defects)
    defects.stop()
    splits = data.splits
    if split is not None and split not in splits:
        raise UserError(f'{source} has no {split} data, only {" and ".join(splits)}')
    found: list[Boxes] = []
    ignored = 0
    for part in [splits[split]] if split else splits.values():
        for image in part.images:
            path = part.folder / image.name
            boxes: list[tuple[str, Box]] = []
            for item in image.objects:
                left, top, width, height = item.box
                if item.is_ignored:
                    ignored += 1
                else:
                    box = left, top, left + width, top + height
                    boxes.append((data.classes[item.label], box))
            found.append(Boxes(path, name_inside(path, described.root), boxes))
    if ignored:
        print(f'left out: {amount(ignored, "object")} to be ignored')
    return found


def write_crops(found: Sequence[Boxes], folder: Path, margin: float) -> Counter:
    """Write the boxes of images to a folder; returns how many there are of each class."""
    from PIL import Image

    from ..images.rasters import ReadError
    from ..images.reading import picture, read_image

    counts: Counter = Counter()
    outside = 0
    taken: set[str] = set()
    folders = folders_of_classes(name for entry in found for name, _ in entry.boxes)
    with progress(len(found), 'images') as update:
        for path, wanted, boxes in found:
            update(1)
            if not boxes:
                continue
            name = distinct_name(shortened(wanted.replace('/', '_')), taken)
            try:
                pixels = picture(read_image(path))
            except ReadError as error:
                raise UserError(f'{path}: {one_line(error)}') from error
            for number, (label, box) in enumerate(boxes, 1):
                rows, columns = window_of(box, pixels.shape[:2], margin)
                part = pixels[rows, columns]
                if not part.size:
                    outside += 1
                    continue
                file = folder / folders[label] / f'{name}-{number}.png'
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open('xb') as target:  # never an existing one
                    Image.fromarray(part).save(target, 'PNG')
                counts[label] += 1
    if outside:
        print(f'left out: {amount(outside, "box", "boxes")} outside of the image')
    return counts


def window_of(box: Box, size: tuple[int, int], margin: float) -> tuple[slice, slice]:
    """The rows and columns of an image of a (height, width) that a box with a margin touches."""
    left, top, right, bottom = box
    if right <= 0 or bottom <= 0 or left >= size[1] or top >= size[0]:
        return slice(0), slice(0)
    across, down = margin * (right - left), margin * (bottom - top)
    rows = slice(max(math.floor(top - down), 0), math.ceil(bottom + down))
    return rows, slice(max(math.floor(left - across), 0), math.ceil(right + across))


def name_inside(path: Path, folder: Path) -> str:
    """The path of an image in a folder without its ending; of one elsewhere its own name."""
    inside = Path(path_from(folder, path)).with_suffix('').as_posix()
    is_elsewhere = inside.startswith('../') or Path(inside).is_absolute()
    return path.stem if is_elsewhere else inside


def folders_of_classes(names: Iterator[str]) -> dict[str, str]:
    """A folder for each class, whose name may have characters that file systems do not take."""
    taken: set[str] = set()
    folders: dict[str, str] = {}
    for name in sorted(set(names)):
        safe = re.sub(r'[^\w .()+-]', '_', name).strip(' .')[:100] or '_'
        folders[name] = distinct_name(safe, taken)
    return folders


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(crop, argv)
