"""Pictures of handwritten digits on photographs, with exact boxes and masks.

Scans from scikit-learn (UCI) are enlarged, colored and blended into crops of photographs from
scikit-image (public domain or CC0). Training and evaluation share no scan, and the test shares no
photograph with them.
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Optional

import numpy as np
import torch
from PIL import Image
from skimage.color import rgb2lab
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from cpvt_pyramid.app.demo.photographs import load_photograph, random_crop

from .arms import SHARES, SIZES

load_digits = cache(load_digits)
KEPT = (0, 1, 4, 7)  # digits; all ten would take several times as many steps
PHOTOGRAPHS = {'train': ('astronaut', 'coffee', 'rocket'), 'test': ('chelsea', 'retina')}
DIGITS = (1, 6)  # in an image
DIGIT_HEIGHT = (28, 96)  # pixels
DIGIT_STRETCH = 1.15  # width over height, at most and (inverted) at least
DIGIT_ANGLE = 12  # degrees to either side
OPACITY = (0.88, 1.0)
TOUCHING = 0.25  # share of the digits that overlap an earlier one
HIDDEN = (0.05, 0.5)  # share of an instance that an overlap may hide
CONTRAST = 50  # distance in CIELAB, with half weight on color, of a digit from its background
VAL_SCANS = 0.2

Window = tuple[slice, slice]  # rows and columns of an image


class Sample(NamedTuple):
    """A picture with its digits."""

    image: Tensor  # (3, H, W), BGR, 0 to 255
    boxes: Tensor  # (n, 4), left, top, right, bottom
    labels: Tensor  # (n,), indices of KEPT
    areas: list[int]  # visible pixels
    masks: np.ndarray  # (n, H, W), those pixels
    classes: Tensor  # (H, W), 0 is background, 1 + c class c


@dataclass
class Instance:
    """A digit in a picture."""

    label: int  # 0 to 9
    visible: np.ndarray  # (H, W), True where no later digit hides it
    area: int  # pixels, hidden ones included
    color: np.ndarray  # (3,) from 0 to 255


def draw(
    seed: int, split: str, stream: int, index: int, landscape: bool, size: tuple[int, int]
) -> Sample:
    """A picture; the same arguments give the same picture.

    Args:
        seed: of all random choices.
        split: 'train', 'tuning' or 'test'.
        stream: counts the batches or folders.
        index: in the batch or folder.
        landscape: whether it is as wide and high as `size` says, or turned.
        size: width and height.
    """
    in_training = split == 'train'
    rng = np.random.default_rng((seed, in_training, stream, index))
    drawn = size if landscape else size[::-1]
    photographs = photographs_of('test' if split == 'test' else 'train')
    training_scans, other_scans = scans_of(seed)
    scans = training_scans if in_training else other_scans
    pixels, instances = draw_picture(rng, photographs, scans, drawn)
    boxes = []
    labels = []
    areas = []
    classes = np.zeros(pixels.shape[:2], int)
    for instance in instances:
        label = KEPT.index(instance.label)
        classes[instance.visible] = 1 + label
        rows = np.flatnonzero(instance.visible.any(axis=1))
        columns = np.flatnonzero(instance.visible.any(axis=0))
        boxes.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        labels.append(label)
        areas.append(int(instance.visible.sum()))
    bgr = pixels[..., ::-1].copy()
    return Sample(
        image=torch.from_numpy(bgr).permute(2, 0, 1),
        boxes=torch.tensor(boxes, dtype=torch.float32),
        labels=torch.tensor(labels),
        areas=areas,
        masks=np.stack([instance.visible for instance in instances]),
        classes=torch.from_numpy(classes),
    )


def random_size(
    rng: np.random.Generator,
    sizes: Sequence[tuple[int, int]] = SIZES,
    shares: Sequence[float] = SHARES,
) -> tuple[int, int]:
    """Width and height of a landscape picture."""
    return sizes[rng.choice(len(sizes), p=shares)]


@cache
def scans_of(seed: int) -> list[np.ndarray]:
    """The digits of the training and of the evaluation."""
    labels = load_digits().target
    kept = np.flatnonzero(np.isin(labels, KEPT))
    return train_test_split(kept, test_size=VAL_SCANS, random_state=seed, stratify=labels[kept])


@cache
def photographs_of(split: str) -> dict[str, Image.Image]:
    """The photographs of a split, by name."""
    return {name: load_photograph(name) for name in PHOTOGRAPHS[split]}


def ink_of_scan(scan: np.ndarray, height: float, stretch: float, angle: float) -> np.ndarray:
    """Enlarge an 8x8 scan, 0 to 16, to a smooth stroke, cropped to its ink: (h, w) coverage from
    0 to 1. It is `height` pixels high before the rotation by `angle` degrees."""
    cell = height / 8
    # A margin of one empty cell, so that strokes at the edge of the scan end round.
    paper = Image.fromarray(np.pad(scan / 16, 1).astype(np.float32))
    paper = paper.resize((round(10 * cell * stretch), round(10 * cell)), Image.Resampling.BICUBIC)
    paper = paper.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    # The enlarged scan falls off over about one cell; make a stroke's edge two pixels wide.
    ink = np.clip((np.asarray(paper) - 0.42) * max(1.5, 0.7 * cell) + 0.5, 0, 1)
    rows = np.flatnonzero(ink.any(1))
    columns = np.flatnonzero(ink.any(0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def readable_color(
    rng: np.random.Generator, under: np.ndarray, others: list[np.ndarray]
) -> np.ndarray:
    """A random saturated color (3,) that contrasts with most of the pixels `under` a digit
    (h, w, 3) and with all of the colors of `others`, 0 to 255."""
    step = max(1, max(under.shape[:2]) // 16)  # about 16 x 16 pixels are enough
    ground = under[::step, ::step].reshape(-1, 3)
    # Drawn in HSV for uniform hues, compared in CIELAB, where distances are perceptual.
    values = rng.uniform(0.25, 1, 24)
    candidates = np.array(
        [colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.7, 1), value) for value in values]
    )
    weights = (1, 0.5, 0.5)  # lightness separates strokes from the ground better than color
    around = rgb2lab(np.concatenate([ground, *(other[None] for other in others)]) / 255)
    distance = np.linalg.norm((rgb2lab(candidates)[:, None] - around) * weights, axis=-1)
    contrast = np.percentile(distance[:, : len(ground)], 10, axis=1)
    contrast = np.minimum(contrast, distance[:, len(ground) :].min(axis=1, initial=np.inf))
    enough = np.flatnonzero(contrast >= CONTRAST)
    return 255 * candidates[enough[0] if len(enough) else contrast.argmax()]


def random_window(
    rng: np.random.Generator,
    shape: tuple[int, int],
    room: tuple[int, int],
    over: Optional[Instance],
) -> Optional[Window]:
    """A random window of `shape` in an image of size `room`, touching `over` if given; None if it
    does not fit."""
    if over is None:
        low = (0, 0)
        high = (room[0] - shape[0], room[1] - shape[1])
    else:
        rows = np.flatnonzero(over.visible.any(1))
        columns = np.flatnonzero(over.visible.any(0))
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
) -> Optional[tuple[np.ndarray, Window]]:
    """A size and a place for a scan among the digits in the image: its ink and its window; None if
    there is no room."""
    touching = rng.random() < TOUCHING and len(instances) > 0
    over = instances[rng.integers(len(instances))] if touching else None
    smallest, largest = DIGIT_HEIGHT
    stretch = np.exp(rng.uniform(-1, 1) * np.log(DIGIT_STRETCH))
    angle = rng.uniform(-DIGIT_ANGLE, DIGIT_ANGLE)
    for _ in range(60):
        height = rng.uniform(smallest, largest)
        ink = ink_of_scan(scan, height, stretch, angle)
        window = random_window(rng, ink.shape, room, over)
        if window is not None:
            hidden = most_hidden(instances, ink >= 0.5, window)
            least, most = HIDDEN if touching else (0, 0)
            if least <= hidden <= most:
                return ink, window
        largest = max(smallest, largest - 2)  # a smaller digit is more likely to fit
    return None


def most_hidden(instances: list[Instance], mask: np.ndarray, window: Window) -> float:
    """The largest hidden share of an instance that `mask`, painted on `window`, would overlap."""
    hidden = [0.0]
    for instance in instances:
        lost = np.count_nonzero(instance.visible[window] & mask)
        if lost:
            hidden.append(1 - (np.count_nonzero(instance.visible) - lost) / instance.area)
    return max(hidden)


def draw_picture(
    rng: np.random.Generator,
    photographs: dict[str, Image.Image],
    scans: np.ndarray,
    size: tuple[int, int],
) -> tuple[np.ndarray, list[Instance]]:
    """The pixels (H, W, 3), uint8, of a picture, and its digits.

    Args:
        photographs: of the split, by name.
        scans: (n,) indices of the split's scans in scikit-learn's digits.
        size: width and height.
    """
    data = load_digits()
    while True:
        name = sorted(photographs)[rng.integers(len(photographs))]
        canvas = random_crop(rng, photographs[name], size)
        instances: list[Instance] = []
        wanted = rng.integers(DIGITS[0], DIGITS[1] + 1)
        for scan in rng.choice(scans, wanted, replace=False).tolist():
            placed = place(rng, data.images[scan], instances, canvas.shape[:2])
            if placed is None:
                continue
            ink, window = placed
            others = [earlier.color for earlier in instances if earlier.visible[window].any()]
            color = readable_color(rng, canvas[window], others)
            alpha = rng.uniform(*OPACITY) * ink[..., None]
            canvas[window] += alpha * (color - canvas[window])
            mask = np.zeros(canvas.shape[:2], bool)
            mask[window] = ink >= 0.5
            for earlier in instances:
                earlier.visible &= ~mask
            instances.append(
                Instance(int(data.target[scan]), mask, int(np.count_nonzero(mask)), color)
            )
        if len(instances) >= DIGITS[0]:  # else too small for them: draw another
            return np.rint(canvas).astype(np.uint8), instances
