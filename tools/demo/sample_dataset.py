"""Makes a small data set for detection and segmentation out of images that ship inside packages.

Handwritten digits (scikit-learn's scans) are enlarged, coloured and blended into crops of
photographs (scikit-image's, public domain or CC0). Boxes, instance masks and semantic maps are
exact, because the tool knows what it painted. The same images are written in two layouts:

    ROOT/coco/annotations/instances_{train,val}2017.json, ROOT/coco/{train,val}2017/*.jpg
    ROOT/ade/ADEChallengeData2016/{images,annotations}/{training,validation}/*, objectInfo150.txt
    ROOT/SOURCES.md     what it is made of, by whom, under which licence
    ROOT/sample.json    the arguments it was made with

COCO categories 1..10 are zero..nine. A pixel of the semantic maps is 1 (background) or 2..11
(zero..nine); 0 means unlabelled in ADE20K and does not occur, so `reduce_zero_label=True` gives
11 classes. Training and validation share neither a scan nor a photograph. The same arguments give
the same files, and a smaller set is the beginning of a larger one with the same seed.

    python tools/demo/sample_dataset.py                      # 1200 + 100 images in data/sample
    python tools/demo/sample_dataset.py FOLDER --train 50 --val 10 --seed 1
"""

import argparse
import colorsys
import contextlib
import fcntl
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

import numpy as np
import skimage.data
from PIL import Image
from pycocotools import mask as coco_mask
from skimage.color import rgb2lab
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

TOOL = 'make_sample_dataset'
DEFAULT_ROOT = Path(__file__).resolve().parents[2] / 'data' / 'sample'
NAMES = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
SPLITS = ('train', 'val')
ADE_SPLITS = {'train': 'training', 'val': 'validation'}
BACKGROUND = 1  # in the semantic maps; digit d is BACKGROUND + 1 + d

SHORT_SIDE = (128, 224)  # pixels, at scale 1
LONG_SIDE = 320  # pixels at most, at scale 1
ASPECT_RATIO = 1.9  # long side over short side at most
CROP = (0.5, 1.0)  # of the largest crop of that shape which the photograph holds
DIGIT_HEIGHT = (28, 96)  # pixels, at scale 1
DIGIT_STRETCH = 1.15  # width over height, at most and (inverted) at least
DIGIT_ANGLE = 12  # degrees to either side
OPACITY = (0.88, 1.0)
TOUCHING = 0.25  # share of the digits that are put over an earlier one
HIDDEN = (0.05, 0.5)  # share of an instance that an overlap hides: less is none, more is retried
CONTRAST = 50  # distance in CIELAB (colour counting half) of a digit from what is under it
MAX_DIGITS = 12
SCALES = (0.5, 8)
VAL_SCANS = 0.2
JPEG_QUALITY = 92
ADE = 'ade/ADEChallengeData2016'
OBJECT_INFO = f'{ADE}/objectInfo150.txt'
MARKER = 'sample.json'
FORMAT = 1  # goes up when the same arguments give other files

Window = tuple[slice, slice]  # rows and columns of an image


@dataclass(frozen=True)
class Photograph:
    """A photograph of skimage.data and what scikit-image's documentation says about it."""

    split: str
    title: str
    author: str
    licence: str


PHOTOGRAPHS = {
    'astronaut': Photograph('train', 'Eileen Collins', 'NASA', 'public domain'),
    'coffee': Photograph(
        'train', 'Coffee cup, courtesy of Pikolo Espresso Bar', 'Rachel Michetti', 'CC0 1.0'
    ),
    'rocket': Photograph('train', 'Launch of DSCOVR on Falcon 9', 'SpaceX', 'public domain'),
    'chelsea': Photograph('val', 'Chelsea the cat', 'Stefan van der Walt', 'CC0 1.0'),
    'retina': Photograph(
        'val', 'Fundus photograph of a normal left eye', 'Mikael Häggström', 'CC0 1.0'
    ),
}


@dataclass
class Instance:
    """A digit in an image.

    Args:
        scan: index into scikit-learn's digits.
        label: the digit, 0 to 9.
        visible: (H, W), what later digits have left of it.
        area: pixels it had before anything hid it.
        colour: (3,) from 0 to 255.
    """

    scan: int
    label: int
    visible: np.ndarray
    area: int
    colour: np.ndarray


@dataclass
class Picture:
    """One image of the data set: (H, W, 3) uint8 pixels, whose photograph, and its digits."""

    pixels: np.ndarray
    photograph: str
    instances: list[Instance]


@dataclass
class Tally:
    """What was written for one split, counted for SOURCES.md and objectInfo150.txt."""

    images: int = 0
    instances: int = 0
    overlapped: int = 0
    pixels: np.ndarray = field(default_factory=lambda: np.zeros(2 + len(NAMES), np.int64))
    images_with: np.ndarray = field(default_factory=lambda: np.zeros(2 + len(NAMES), np.int64))


# ---- one digit ----------------------------------------------------------------------------------


def ink_of_scan(scan: np.ndarray, height: float, stretch: float, angle: float) -> np.ndarray:
    """Enlarges an 8x8 scan to a smooth stroke, cut to its ink.

    Args:
        scan: (8, 8), 0 to 16.
        height: of the scan before it is turned, in pixels.
        stretch: width over height.
        angle: in degrees, counter-clockwise.

    Returns:
        (h, w) float32 coverage from 0 to 1.
    """
    cell = height / 8
    # A rim of one empty cell, so that strokes at the edge of the scan are rounded, not cut.
    paper = Image.fromarray(np.pad(scan / 16, 1).astype(np.float32))
    paper = paper.resize((round(10 * cell * stretch), round(10 * cell)), Image.Resampling.BICUBIC)
    paper = paper.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    # The enlarged scan falls off over about a cell; a stroke's edge is sharp within two pixels.
    ink = np.clip((np.asarray(paper) - 0.42) * max(1.5, 0.7 * cell) + 0.5, 0, 1)
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def readable_colour(
    rng: np.random.Generator, under: np.ndarray, others: list[np.ndarray]
) -> np.ndarray:
    """A random saturated colour that stands out from nearly all of `under` and all of `others`.

    Args:
        under: (h, w, 3) pixels that the digit will lie on, 0 to 255.
        others: colours of the digits beside it, each (3,) from 0 to 255.

    Returns:
        (3,) from 0 to 255.
    """
    step = max(1, max(under.shape[:2]) // 16)  # 16 x 16 pixels say enough about the ground
    ground = under[::step, ::step].reshape(-1, 3)
    # Drawn in HSV for even hues, compared in CIELAB, where distances are those that the eye sees.
    candidates = np.array(
        [
            colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.7, 1), value)
            for value in rng.uniform(0.25, 1, 24)
        ]
    )
    weights = (1, 0.5, 0.5)  # strokes are told from the ground by lightness more than by colour
    around = rgb2lab(np.concatenate([ground, *(other[None] for other in others)]) / 255)
    distance = np.linalg.norm((rgb2lab(candidates)[:, None] - around) * weights, axis=-1)
    contrast = np.percentile(distance[:, : len(ground)], 10, axis=1)
    contrast = np.minimum(contrast, distance[:, len(ground) :].min(axis=1, initial=np.inf))
    enough = np.flatnonzero(contrast >= CONTRAST)
    return 255 * candidates[enough[0] if len(enough) else contrast.argmax()]


def random_window(
    rng: np.random.Generator, shape: tuple[int, int], room: tuple[int, int], over: Instance | None
) -> Window | None:
    """A place for a digit of `shape` in an image of `room`, at `over` where one is given.

    None means that it does not fit there.
    """
    if over is None:
        low, high = (0, 0), (room[0] - shape[0], room[1] - shape[1])
    else:
        rows, columns = np.flatnonzero(over.visible.any(1)), np.flatnonzero(over.visible.any(0))
        low = (max(0, rows[0] - shape[0]), max(0, columns[0] - shape[1]))
        high = (min(rows[-1], room[0] - shape[0]), min(columns[-1], room[1] - shape[1]))
    if high[0] < low[0] or high[1] < low[1]:
        return None
    top, left = rng.integers(low, np.add(high, 1)).tolist()
    return slice(top, top + shape[0]), slice(left, left + shape[1])


def place(
    rng: np.random.Generator,
    scan: np.ndarray,
    instances: list[Instance],
    room: tuple[int, int],
    scale: float,
) -> tuple[np.ndarray, Window] | None:
    """Finds a size and a place for a scan among the digits that are there.

    Returns:
        Its ink and where to put it, or None where no room was found.
    """
    touching = rng.random() < TOUCHING and len(instances) > 0
    over = instances[rng.integers(len(instances))] if touching else None
    smallest, largest = DIGIT_HEIGHT
    stretch = np.exp(rng.uniform(-1, 1) * np.log(DIGIT_STRETCH))
    angle = rng.uniform(-DIGIT_ANGLE, DIGIT_ANGLE)
    for _ in range(60):
        height = rng.uniform(smallest, largest)
        ink = ink_of_scan(scan, height * scale, stretch, angle)
        window = random_window(rng, ink.shape, room, over)
        if window is not None:
            hidden = most_hidden(instances, ink >= 0.5, window)
            if HIDDEN[0] <= hidden <= HIDDEN[1] if touching else hidden == 0:
                return ink, window
        largest = max(smallest, largest - 2)  # in a crowd, smaller ones find room
    return None


def most_hidden(instances: list[Instance], mask: np.ndarray, window: Window) -> float:
    """The largest share of an instance that would be hidden once `mask` lies on `window`.

    What was hidden before counts, but only for an instance that the mask touches.
    """
    hidden = [0.0]
    for instance in instances:
        lost = np.count_nonzero(instance.visible[window] & mask)
        if lost:
            hidden.append(1 - (np.count_nonzero(instance.visible) - lost) / instance.area)
    return max(hidden)


# ---- one image ----------------------------------------------------------------------------------


def random_size(rng: np.random.Generator, scale: float) -> tuple[int, int]:
    """Width and height of an image, upright or lying."""
    short = rng.uniform(*SHORT_SIDE)
    long = min(short * ASPECT_RATIO ** rng.random(), LONG_SIDE)
    size = round(short * scale), round(long * scale)
    return size if rng.random() < 0.5 else size[::-1]


def random_crop(
    rng: np.random.Generator, photograph: Image.Image, size: tuple[int, int]
) -> np.ndarray:
    """A crop of the photograph at a random place and zoom, brought to `size`, perhaps mirrored.

    Returns:
        (H, W, 3) float32, 0 to 255.
    """
    zoom = min(photograph.width / size[0], photograph.height / size[1]) * rng.uniform(*CROP)
    width, height = size[0] * zoom, size[1] * zoom
    left = rng.uniform(0, photograph.width - width)
    top = rng.uniform(0, photograph.height - height)
    crop = photograph.resize(
        size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height)
    )
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(crop, np.float32)


def draw_picture(
    rng: np.random.Generator,
    photographs: dict[str, Image.Image],
    scans: np.ndarray,
    images: np.ndarray,
    labels: np.ndarray,
    digits: tuple[int, int],
    scale: float,
) -> Picture:
    """Draws one image of the data set.

    Args:
        photographs: those of the split, by name.
        scans: (n,) indices of the split's scans.
        images, labels: all scans, (1797, 8, 8) and (1797,).
        digits: fewest and most digits in the image.
        scale: factor on all sizes.
    """
    while True:
        name = sorted(photographs)[rng.integers(len(photographs))]
        canvas = random_crop(rng, photographs[name], random_size(rng, scale))
        instances: list[Instance] = []
        wanted = rng.integers(digits[0], digits[1] + 1)
        for scan in rng.choice(scans, wanted, replace=False).tolist():
            placed = place(rng, images[scan], instances, canvas.shape[:2], scale)
            if placed is None:
                continue
            ink, window = placed
            colour = paint(
                rng,
                canvas[window],
                ink,
                [earlier.colour for earlier in instances if earlier.visible[window].any()],
            )
            mask = np.zeros(canvas.shape[:2], bool)
            mask[window] = ink >= 0.5
            for earlier in instances:
                earlier.visible &= ~mask
            instances.append(
                Instance(scan, int(labels[scan]), mask, np.count_nonzero(mask), colour)
            )
        if len(instances) >= digits[0]:  # else the image was too small for the crowd: another
            return Picture(np.rint(canvas).astype(np.uint8), name, instances)


def paint(
    rng: np.random.Generator, ground: np.ndarray, ink: np.ndarray, others: list[np.ndarray]
) -> np.ndarray:
    """Blends a digit into `ground`, in place, and returns its colour.

    Args:
        ground: (h, w, 3) part of the image, 0 to 255.
        ink: (h, w) coverage, 0 to 1.
        others: colours of the digits beside it.
    """
    colour = readable_colour(rng, ground, others)
    alpha = rng.uniform(*OPACITY) * ink[..., None]
    ground += alpha * (colour - ground)
    return colour


# ---- annotations --------------------------------------------------------------------------------


def coco_annotation(instance: Instance, image_id: int, annotation_id: int) -> dict:
    """The COCO record of an instance: tight box, area and mask of what is visible of it."""
    rle = coco_mask.encode(np.asfortranarray(instance.visible, np.uint8))
    rows = np.flatnonzero(instance.visible.any(1))
    columns = np.flatnonzero(instance.visible.any(0))
    return dict(
        id=annotation_id,
        image_id=image_id,
        category_id=instance.label + 1,
        iscrowd=0,
        bbox=[
            int(columns[0]),
            int(rows[0]),
            int(columns[-1] - columns[0] + 1),
            int(rows[-1] - rows[0] + 1),
        ],
        area=int(np.count_nonzero(instance.visible)),
        segmentation=dict(size=list(rle['size']), counts=rle['counts'].decode('ascii')),
        scan=instance.scan,
    )


def semantic_map(picture: Picture) -> np.ndarray:
    """(H, W) uint8: 1 for background, 2 to 11 for zero to nine."""
    classes = np.full(picture.pixels.shape[:2], BACKGROUND, np.uint8)
    for instance in picture.instances:
        classes[instance.visible] = BACKGROUND + 1 + instance.label
    return classes


def coco_file(images: list[dict], annotations: list[dict]) -> str:
    """The text of an instances_*2017.json."""
    categories = [dict(id=i, name=name, supercategory='digit') for i, name in enumerate(NAMES, 1)]
    return json.dumps(
        dict(
            info=dict(description='Handwritten digits on photographs; see SOURCES.md'),
            images=images,
            annotations=annotations,
            categories=categories,
        )
    )


def object_info(tallies: dict[str, Tally]) -> str:
    """The class table, in the form of ADE20K's objectInfo150.txt."""
    pixels = sum(tally.pixels for tally in tallies.values())
    lines = ['Idx\tRatio\tTrain\tVal\tStuff\tName']
    for index, name in enumerate(('background', *NAMES), BACKGROUND):
        counts = '\t'.join(str(tallies[split].images_with[index]) for split in SPLITS)
        stuff = int(index == BACKGROUND)
        lines.append(f'{index}\t{pixels[index] / pixels.sum():.4f}\t{counts}\t{stuff}\t{name}')
    return '\n'.join(lines) + '\n'


def sources(arguments: dict, tallies: dict[str, Tally], scans: dict[str, np.ndarray]) -> str:
    """The text of SOURCES.md."""
    photographs = '\n'.join(
        f'| `skimage.data.{name}` | {photo.title} | {photo.author} | {photo.licence} '
        f'| {photo.split} |'
        for name, photo in PHOTOGRAPHS.items()
    )
    counts = '\n'.join(
        f'| {split} | {tally.images} | {tally.instances} | {tally.overlapped} '
        f'| {len(scans[split])} |'
        for split, tally in tallies.items()
    )
    return f"""\
# Sources

Made by `{command_of(arguments)}`
from images that ship inside two Python packages. The generated images may be used under the terms
of their sources, listed here.

## Photographs: scikit-image, https://scikit-image.org/docs/stable/api/skimage.data.html

Changed here: cropped, scaled, some mirrored. No photograph is in both splits.

| image | title | author | licence | used in |
|---|---|---|---|---|
{photographs}

## Digits: scikit-learn, `sklearn.datasets.load_digits`

1,797 scans of 8x8 pixels, the test part of "Optical Recognition of Handwritten Digits", E. Alpaydin
and C. Kaynak, 1998, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licence
CC BY 4.0. Changed here: enlarged, turned, stretched, coloured, blended into the photographs. No
scan is in both splits. Which of the 13 writers wrote a scan is not recorded, so one writer's digits
may be in both.

## Contents

| split | images | digits | of them partly hidden | scans to draw from |
|---|---|---|---|---|
{counts}
"""


def command_of(arguments: dict) -> str:
    """The command line that gives these arguments."""
    options = ' '.join(
        f'--{name} ' + (' '.join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in arguments.items()
        if name != 'format'
    )
    return f'python tools/demo/sample_dataset.py {options}'


# ---- the data set -------------------------------------------------------------------------------


def load_photograph(name: str) -> Image.Image:
    """A photograph from inside scikit-image's wheel."""
    return Image.fromarray(getattr(skimage.data, name)()).convert('RGB')


def split_scans(labels: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Indices of the scans of each split, every class in the same proportion."""
    train, val = train_test_split(
        np.arange(len(labels)), test_size=VAL_SCANS, random_state=seed, stratify=labels
    )
    return dict(train=train, val=val)


def image_paths(split: str, index: int) -> tuple[str, str, str]:
    """COCO image, ADE image and ADE map number `index` (from 1), relative to the root."""
    name = f'ADE_{split}_{index:08d}'
    return (
        f'coco/{split}2017/{index:012d}.jpg',
        f'{ADE}/images/{ADE_SPLITS[split]}/{name}.jpg',
        f'{ADE}/annotations/{ADE_SPLITS[split]}/{name}.png',
    )


def annotation_path(split: str) -> str:
    """COCO annotation file, relative to the root."""
    return f'coco/annotations/instances_{split}2017.json'


def all_paths(arguments: dict) -> set[str]:
    """Every file of a data set, relative to its root."""
    paths = {MARKER, 'SOURCES.md', OBJECT_INFO}
    for split in SPLITS:
        paths.add(annotation_path(split))
        for index in range(1, arguments[split] + 1):
            paths.update(image_paths(split, index))
    return paths


def write_picture(folder: Path, split: str, index: int, picture: Picture) -> np.ndarray:
    """Writes an image and its semantic map in both layouts and returns the map."""
    classes = semantic_map(picture)
    jpeg, png = io.BytesIO(), io.BytesIO()
    Image.fromarray(picture.pixels).save(jpeg, 'JPEG', quality=JPEG_QUALITY)
    Image.fromarray(classes).save(png, 'PNG')
    for path, data in zip(image_paths(split, index), (jpeg, jpeg, png), strict=True):
        (folder / path).write_bytes(data.getvalue())
    return classes


def write_split(folder: Path, split: str, pictures: Iterable[Picture]) -> Tally:
    """Writes the images, maps and annotations of one split, and counts what they hold."""
    for path in (annotation_path(split), *image_paths(split, 1)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
    images: list[dict] = []
    annotations: list[dict] = []
    tally = Tally()
    for index, picture in enumerate(pictures, 1):
        classes = write_picture(folder, split, index, picture)
        height, width = classes.shape
        images.append(
            dict(
                id=index,
                file_name=Path(image_paths(split, index)[0]).name,
                height=height,
                width=width,
                photograph=picture.photograph,
            )
        )
        for instance in picture.instances:
            annotations.append(coco_annotation(instance, index, len(annotations) + 1))
            tally.overlapped += np.count_nonzero(instance.visible) < instance.area
        pixels = np.bincount(classes.ravel(), minlength=len(tally.pixels))
        tally.pixels += pixels
        tally.images_with += pixels > 0
    tally.images, tally.instances = len(images), len(annotations)
    (folder / annotation_path(split)).write_text(coco_file(images, annotations))
    return tally


def draw_pictures(split: str, arguments: dict, scans: np.ndarray) -> Iterator[Picture]:
    """Draws the images of a split, one after another, from the scans with these indices."""
    digits = load_digits()
    photographs = {
        name: load_photograph(name)
        for name, photograph in PHOTOGRAPHS.items()
        if photograph.split == split
    }
    for index in range(arguments[split]):
        # A generator of its own for each image: what one draws does not move the next.
        rng = np.random.default_rng((arguments['seed'], SPLITS.index(split), index))
        yield draw_picture(
            rng,
            photographs,
            scans,
            digits.images,
            digits.target,
            arguments['digits'],
            arguments['scale'],
        )


def write_dataset(folder: Path, arguments: dict) -> None:
    """Writes a whole data set into an empty folder, with a progress bar on stderr."""
    scans = split_scans(load_digits().target, arguments['seed'])
    tallies = {}
    for split in SPLITS:
        pictures = tqdm(
            draw_pictures(split, arguments, scans[split]),
            f'{split:5}',
            arguments[split],
            unit='image',
            file=sys.stderr,
        )
        tallies[split] = write_split(folder, split, pictures)
    (folder / OBJECT_INFO).write_text(object_info(tallies))
    (folder / 'SOURCES.md').write_text(sources(arguments, tallies, scans), encoding='utf-8')
    (folder / MARKER).write_text(json.dumps(arguments) + '\n')


# ---- the folder ---------------------------------------------------------------------------------


def arguments_of(root: Path) -> dict | None:
    """The arguments of the data set at `root`, or None where this tool made none there."""
    try:
        arguments = json.loads((root / MARKER).read_text())
        counts = [arguments[name] for name in ('format', *SPLITS)]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return arguments if all(isinstance(count, int) for count in counts) else None


def is_there(root: Path, arguments: dict, force: bool) -> bool:
    """Whether the wanted data set is at `root` already and need not be made.

    Raises FileExistsError where what is there must not be replaced.
    """
    if not root.exists():
        return False
    if not root.is_dir():
        raise FileExistsError(f'{root} is a file; name a folder')
    if not any(root.iterdir()):
        return False
    made_with = arguments_of(root)
    if made_with is None:
        raise FileExistsError(
            f'{root} holds files that this tool did not make; name another folder'
        )
    present = {
        path.relative_to(root).as_posix()
        for path in root.rglob('*')
        if path.is_symlink() or not path.is_dir()
    }
    missing, foreign = all_paths(made_with) - present, sorted(present - all_paths(made_with))
    if force and foreign:
        raise FileExistsError(
            f'{root} holds files that this tool did not make ({foreign[0]}); '
            'move them away or name another folder'
        )
    if force:
        return False
    if made_with != arguments or missing:
        what = (
            f'lacks {len(missing)} files of its data set'
            if made_with == arguments
            else 'holds a data set of other arguments or of another version'
        )
        raise FileExistsError(f'{root} {what}; name another folder, or replace it with --force')
    return True


def locked(folder: Path) -> IO[str]:
    """Makes `folder` where it is not there, and takes the lock in it; closing it gives it back."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = (folder / 'lock').open('a')
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f'{TOOL}: waiting for another run to finish', file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_nlink:
                return lock
            lock.close()  # the run that was waited for has removed it: take a new one


@contextlib.contextmanager
def workshop(root: Path) -> Iterator[Path]:
    """A folder beside `root` that one run at a time has, and that is gone afterwards."""
    folder = root.with_name(f'.{root.name}.partial')

    def sweep() -> None:
        for name in ('new', 'old'):
            if (folder / name).exists():
                shutil.rmtree(folder / name)

    with locked(folder):
        try:
            sweep()  # what a run left that was killed
            yield folder
        finally:
            sweep()
            # The lock goes last: from here on the next run may have the folder.
            (folder / 'lock').unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()


def check_arguments(train: int, val: int, scale: float, digits: tuple[int, int], seed: int) -> None:
    """Raises ValueError for what no data set can be made with."""
    if min(train, val) < 1:
        raise ValueError(f'train and val need an image each at least; got {train} and {val}')
    if not SCALES[0] <= scale <= SCALES[1]:
        raise ValueError(f'scale is from {SCALES[0]} to {SCALES[1]}; got {scale}')
    if not 1 <= digits[0] <= digits[1] <= MAX_DIGITS:
        raise ValueError(
            f'digits is two numbers from 1 to {MAX_DIGITS}, the smaller one first; '
            f'got {digits[0]} {digits[1]}'
        )
    if not 0 <= seed < 2**32:
        raise ValueError(f'seed is from 0 to {2**32 - 1}; got {seed}')


def make_sample_dataset(
    root: str | Path,
    train: int = 1200,
    val: int = 100,
    scale: float = 1.0,
    digits: tuple[int, int] = (1, 6),
    seed: int = 0,
    force: bool = False,
) -> bool:
    """Makes the data set at `root`, whole or not at all.

    Args:
        root: folder to make; it may be there if it is empty or holds this very data set.
        train, val: images of each split, 1 or more.
        scale: factor on all sizes in pixels, 0.5 to 8. At 1 images are 128 to 224 pixels on the
            short side and 320 at most on the long one, digits 28 to 96 high.
        digits: fewest and most digits in an image, 1 to 12.
        seed: 0 to 2**32 - 1.
        force: replace what is there, if this tool made it.

    Returns:
        Whether it was made; False where it was there already.
    """
    check_arguments(train, val, scale, digits, seed)
    root = Path(root).expanduser().resolve()
    arguments = dict(
        format=FORMAT, train=train, val=val, scale=float(scale), digits=list(digits), seed=seed
    )
    if is_there(root, arguments, force):
        return False
    with workshop(root) as folder:
        # Again, because another run may have made it while this one waited.
        if is_there(root, arguments, force):
            return False
        (folder / 'new').mkdir()
        write_dataset(folder / 'new', arguments)
        if root.exists() and any(root.iterdir()):
            root.rename(folder / 'old')
        (folder / 'new').rename(root)
    return True


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f'{message} (see --help)')


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = Parser(
        prog=TOOL,
        description='Makes a small data set, in the layouts of COCO and of '
        'ADE20K, of handwritten digits on photographs. Needs no network.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        'root', nargs='?', type=Path, default=DEFAULT_ROOT, metavar='ROOT', help='folder to make'
    )
    parser.add_argument('--train', type=int, default=1200, metavar='N', help='training images')
    parser.add_argument('--val', type=int, default=100, metavar='N', help='validation images')
    parser.add_argument('--scale', type=float, default=1.0, help='factor on all sizes')
    parser.add_argument(
        '--digits',
        type=int,
        nargs=2,
        default=(1, 6),
        metavar=('MIN', 'MAX'),
        help=f'digits in an image, {MAX_DIGITS} at most',
    )
    parser.add_argument('--seed', type=int, default=0, help='another seed, another data set')
    parser.add_argument(
        '--force', action='store_true', help='replace a data set that this tool made'
    )
    try:
        arguments = parser.parse_args(argv)
        made = make_sample_dataset(**vars(arguments))
    except OSError as error:
        reason = f'{error.filename}: {error.strerror}' if error.filename else error
        print(f'{TOOL}: {reason}', file=sys.stderr)
        return 2
    except ValueError as error:
        print(f'{TOOL}: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f'\n{TOOL}: interrupted; nothing was written', file=sys.stderr)
        return 130
    print(
        f'{arguments.root}: '
        + (
            f'{arguments.train} + {arguments.val} images, made now'
            if made
            else 'there already, made with the same arguments'
        )
    )
    return 0


if __name__ == '__main__':
    sys.exit(main())
