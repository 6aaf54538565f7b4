"""Pictures of detections and of segmentations, drawn with Pillow.

Shapes: images are (H, W, 3) RGB uint8; boxes (K, 4) as x1, y1, x2, y2 in pixels of the image;
label maps (H, W) of class indices. Colours are RGB triples from 0 to 255.
"""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .records import bounding_box

Color = tuple[int, int, int]
INK = (33, 37, 41)  # text on white
WHITE = (255, 255, 255)
JPEG_QUALITY = 90
JPEG_SIDE = 65_500  # pixels; libjpeg writes no larger picture
NAMES = 0.1  # share of a picture that the names of its boxes may take
READABLE = 384  # images with a shorter longer side are enlarged before drawing
# Families with Chinese, Japanese and Korean letters, as Linux, Windows and macOS have them.
WIDE_FONTS = {
    'Noto Sans CJK JP',
    'Noto Sans CJK SC',
    'Noto Sans SC',
    'Droid Sans Fallback',
    'WenQuanYi Zen Hei',
    'WenQuanYi Micro Hei',
    'Microsoft YaHei',
    'Yu Gothic',
    'Malgun Gothic',
    'PingFang SC',
    'Hiragino Sans GB',
    'Arial Unicode MS',
}
# Colours of medium lightness and chroma, a hexadecimal digit per channel. Each is the farthest in
# OKLab (Ottosson 2020) from all before it.
DISTINCT = """
    d44 0ef 06d 190 fb0 f9f 93a 0ab 5d6 861 97f f88 a90 9bf d6b 075 945 39f 76a 7b8 d71 bd8 079
    64c 596 b48 3b4 b10 a8c c78 bb0 1eb 0cc c8f da6 fac 1bf b50 18c dd0 66e a5c 570 b15 fc8 f69
    f64 e8c 99f a72 9e6 78d caf f80 d58 790 a69 b56 fa8 fbf 0c8 46a 6ce 8b0 953 59c 6dc d86 948
    9c7 7ae 85d 084 883 087 c64 d90 8a5 099 0b9 c6d dc5 47d c8b 0a5 a27 ba4 b6b 95a 8ec b84 e56
    87b 681 c35 45c c30 c9d 7e9 65a fa5 a7d 57b 68f b7a d89 9c3 6ca b4a 18a a64 76c e9a cb5 4d9
    e97 1ad 07b 5bd eae ea0 e77 7df 095 e52 0a9 771 08e
"""


def draw_boxes(
    image: np.ndarray,
    boxes: np.ndarray,
    labels: np.ndarray,
    scores: np.ndarray | None,
    classes: Sequence[str],
    palette: Sequence[Color] | None = None,
    masks: np.ndarray | None = None,
    names: Sequence[str] | None = None,
) -> Image.Image:
    """The image with boxes, each with its class name and, where scores are given, its score; small
    images are enlarged. Names that would hide too much are replaced by a legend.

    labels: indices into `classes`. palette: a colour per class; None takes `class_palette`.
    masks: (K, H, W) boolean, tinted and outlined in the colours of the boxes.
    names: of the boxes, instead of those of their classes.
    """
    boxes = np.asarray(boxes, dtype=float).reshape(-1, 4)
    labels = np.asarray(labels, dtype=int).reshape(-1)
    palette = class_palette(classes, palette)
    picture = _enlarged(image)
    factor = picture.width // image.shape[1]
    line = max(3, round(max(picture.size) / 320))

    # The highest score on top, and all names above all frames. The highest score also chooses the
    # place of its name first.
    order = list(range(len(boxes)))
    if scores is not None:
        order = np.argsort(np.asarray(scores), kind='stable').tolist()
    frames = [_inside(box * factor, picture.size) for box in boxes]
    colors = [palette[label % len(palette)] for label in labels]
    if masks is not None and len(masks):
        picture = _with_masks(picture, masks, order, colors)
    draw = ImageDraw.Draw(picture)
    if names is None:
        names = [classes[label] if label < len(classes) else str(label) for label in labels]
    if scores is not None:
        names = [f'{name} {float(score):.2f}' for name, score in zip(names, scores)]
    letters = font(max(14.0, max(picture.size) / 36), ''.join(names))
    sizes = [(letters.getlength(name) + 8, letters.size * 1.25) for name in names]
    if sum(width * height for width, height in sizes) > NAMES * math.prod(picture.size):
        thin = [frames[i] for i in order]
        return _with_thin_frames(picture, thin, labels[order], classes, palette)
    chips: dict[int, tuple[float, ...]] = {}
    for i in order[::-1]:
        chips[i] = _free_place(frames[i], sizes[i], picture.size, list(chips.values()))

    for i in order:
        # A dark rim keeps the frame visible on a background of its own colour.
        x1, y1, x2, y2 = frames[i]
        draw.rectangle([x1 - 1, y1 - 1, x2 + 1, y2 + 1], None, INK, line + 2)
        draw.rectangle(frames[i], None, colors[i], line)
    for i in order:
        x1, y1, _, y2 = chips[i]
        draw.rectangle(chips[i], colors[i])
        bright = np.dot(colors[i], (0.299, 0.587, 0.114)) > 140
        ink = INK if bright else WHITE  # whichever has more contrast
        draw.text((x1 + 4, (y1 + y2) / 2), names[i], ink, letters, anchor='lm')
    return picture


def draw_frames(
    image: np.ndarray,
    boxes: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    palette: Sequence[Color] | None = None,
) -> Image.Image:
    """The image with thin frames and a legend below: for too many boxes to name each.

    The arguments are those of `draw_boxes`; the first box has the highest score, and is on top.
    """
    palette = class_palette(classes, palette)
    picture = Image.fromarray(image)
    frames = [_inside(box, picture.size) for box in boxes[::-1]]
    return _with_thin_frames(picture, frames, labels[::-1], classes, palette)


def draw_segmentation(
    image: np.ndarray,
    label_map: np.ndarray,
    classes: Sequence[str],
    palette: Sequence[Color] | None = None,
    legend: bool = True,
    scale: int | None = None,
) -> Image.Image:
    """The image with its segments tinted and outlined, above a legend of the classes in it.

    label_map: indices into `classes`. A class called background and indices beyond `classes`, such
    as 255 for ignored pixels, get no tint.
    palette: as for `draw_boxes`.
    scale: integer factor by which the image is enlarged first; None makes small ones readable.
    """
    label_map = np.asarray(label_map)
    palette = class_palette(classes, palette)
    present = painted_classes(label_map, classes) if legend else []
    picture = _enlarged(image, scale)
    factor = picture.height // image.shape[0]
    if factor > 1:
        label_map = label_map.repeat(factor, 0).repeat(factor, 1)  # (h, w)
    painted = (label_map >= 0) & (label_map < len(classes))
    for index, name in enumerate(classes):
        if name == 'background':
            painted &= label_map != index
    colors = _colored(label_map, palette)
    # Tint a grey image, so that the colour matches the legend whatever the colour of the object,
    # and fade the surroundings, so that it stands out.
    grey = picture.convert('L').convert('RGB')
    mixed = Image.blend(grey, colors, 0.7)
    if not painted.all():
        surroundings = Image.blend(grey, picture, 0.4)
        mixed.paste(surroundings, mask=Image.fromarray(~painted))
    mixed.paste(colors, mask=Image.fromarray(_edges(label_map) & painted))
    return _with_legend(mixed, present, classes, palette, 36)


def draw_legend(
    names: Sequence[str], colors: Sequence[Color], width: int, text_size: float
) -> Image.Image:
    """A white strip `width` pixels wide with a swatch for each name, in as many rows as needed."""
    letters = font(text_size, ''.join(names))
    swatch, gap = text_size, text_size * 0.5
    places, x, y = [], gap, gap
    for name in names:
        length = swatch + gap * 0.7 + letters.getlength(name)
        if x + length + gap > width and x > gap:
            x, y = gap, y + text_size * 1.6
        places.append((x, y))
        x += length + gap * 2
    strip = Image.new('RGB', (width, math.ceil(y + text_size + gap)), WHITE)
    draw = ImageDraw.Draw(strip)
    for name, color, (x, y) in zip(names, colors, places):
        draw.rounded_rectangle([x, y, x + swatch, y + swatch], swatch / 5, tuple(color))
        draw.text((x + swatch + gap * 0.7, y + swatch / 2), name, INK, letters, anchor='lm')
    return strip


def jpeg_of(picture: Image.Image) -> bytes:
    """The JPEG file of a picture; one that is too large for JPEG is reduced.

    It takes a fifth of the time of a PNG file that is compressed as little as possible, and a third
    of its bytes. Colours have the full resolution, so that frames and names stay sharp.
    """
    if max(picture.size) > JPEG_SIDE:
        picture = picture.copy()
        picture.thumbnail((JPEG_SIDE, JPEG_SIDE))
    file = io.BytesIO()
    picture.save(file, 'JPEG', quality=JPEG_QUALITY, subsampling='4:4:4')
    return file.getvalue()


def painted_classes(label_map: np.ndarray, classes: Sequence[str]) -> list[int]:
    """The indices of the classes in a label map that `draw_segmentation` gives a colour."""
    present, _ = label_counts(np.asarray(label_map))
    return [int(i) for i in present if 0 <= i < len(classes) and classes[i] != 'background']


def label_counts(label_map: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The labels in a map, in ascending order, and the number of pixels of each."""
    if label_map.dtype != np.uint8:
        return np.unique(label_map, return_counts=True)
    counts = np.array(Image.fromarray(label_map).histogram())  # a tenth of the time of np.unique
    labels = np.flatnonzero(counts)
    return labels, counts[labels]


def class_palette(classes: Sequence[str], palette: object = None) -> list[Color]:
    """The palette if it has a colour for each class, or else distinct colours, which repeat after
    128.

    A class called background is black and takes none of the distinct colours, so that detection and
    segmentation of the same objects agree. Data sets of mm may declare 'random' or the palette of
    other classes; both are ignored.
    """
    if isinstance(palette, (list, tuple)) and len(palette) == len(classes):
        return [(int(r), int(g), int(b)) for r, g, b in palette]
    colors = []
    for digits in DISTINCT.split():
        red, green, blue = (17 * int(digit, 16) for digit in digits)
        colors.append((red, green, blue))
    fresh = itertools.cycle(colors)
    return [(0, 0, 0) if name == 'background' else next(fresh) for name in classes]


def font(size: float, text: str = '') -> Any:
    """A font of a size in pixels that has the letters of a text: DejaVu Sans, which matplotlib
    ships, or else one of `WIDE_FONTS` that is installed; without matplotlib, Pillow's own. A
    warning tells of letters that none has."""
    file = _font_file(frozenset(text))
    return ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)


@lru_cache
def _font_file(letters: frozenset[str]) -> Path | None:
    """The file of a font, see `font`; None without matplotlib."""
    try:
        import matplotlib
        from matplotlib import font_manager
    except ImportError:
        return None
    plain = Path(matplotlib.get_data_path(), 'fonts/ttf/DejaVuSans.ttf')
    if _has_letters(plain, letters):
        return plain
    for entry in font_manager.fontManager.ttflist:
        if entry.name in WIDE_FONTS and _has_letters(entry.fname, letters):
            return Path(entry.fname)
    warnings.warn(
        'names in pictures have letters that no installed font has; install Noto Sans CJK',
        stacklevel=3,
    )
    return plain


def _has_letters(file: str | Path, letters: frozenset[str]) -> bool:
    from matplotlib.ft2font import FT2Font

    return {ord(letter) for letter in letters} <= FT2Font(str(file)).get_charmap().keys()


def _enlarged(image: np.ndarray, scale: int | None = None) -> Image.Image:
    height, width = image.shape[:2]
    scale = scale or max(1, min(16, math.ceil(READABLE / max(height, width))))
    picture = Image.fromarray(image)
    return picture.resize((width * scale, height * scale), Image.Resampling.BICUBIC)


def _with_thin_frames(
    picture: Image.Image,
    frames: Sequence[Sequence[float]],
    labels: np.ndarray,
    classes: Sequence[str],
    palette: Sequence[Color],
) -> Image.Image:
    """The picture with thin frames, the last one on top, above a legend of their classes."""
    draw = ImageDraw.Draw(picture)
    width = max(2, round(max(picture.size) / 1000))
    for frame, label in zip(frames, labels):
        draw.rectangle(frame, None, palette[label % len(palette)], width)
    present = [int(i) for i in np.unique(labels) if i < len(classes)]
    return _with_legend(picture, present, classes, palette, 72)


def _with_masks(
    picture: Image.Image, masks: np.ndarray, order: Sequence[int], colors: Sequence[Color]
) -> Image.Image:
    """The picture with masks (K, H, W), enlarged to its size, the last in `order` on top."""
    instances = np.zeros(masks.shape[1:], np.int32)  # from 1 on; 0 outside the masks
    for i in order:
        if masks[i].any():
            x1, y1, x2, y2 = bounding_box(masks[i])
            instances[y1:y2, x1:x2][masks[i, y1:y2, x1:x2]] = i + 1
    factor = picture.height // len(instances)
    instances = instances.repeat(factor, 0).repeat(factor, 1)
    grey = picture.convert('L').convert('RGB')
    tinted = Image.blend(grey, _colored(instances, [(0, 0, 0), *colors]), 0.6)
    picture.paste(tinted, mask=Image.fromarray(instances > 0))
    picture.paste(INK, mask=Image.fromarray(_edges(instances)))
    return picture


def _colored(indices: np.ndarray, palette: Sequence[Color]) -> Image.Image:
    """A map (h, w) of indices into a palette in its colours; other values in any colour."""
    colors = np.array(palette, np.uint8)
    if len(colors) > 256:
        return Image.fromarray(np.take(colors, indices, axis=0, mode='clip'))
    picture = Image.fromarray(indices.astype(np.uint8)).convert('P')
    picture.putpalette(colors.tobytes())
    return picture.convert('RGB')


def _edges(segments: np.ndarray) -> np.ndarray:
    """Where a map (h, w) of segment ids changes, as booleans; wider in a larger picture."""
    edge = np.zeros(segments.shape, dtype=bool)
    width = max(1, round(max(segments.shape) / 500))
    for ids, near in ((segments, edge), (segments.T, edge.T)):
        changes = ids[1:] != ids[:-1]
        for distance in range(min(width, len(changes))):
            count = len(changes) - distance
            near[distance + 1 :] |= changes[:count]
            near[:count] |= changes[distance:]
    return edge


def _with_legend(
    picture: Image.Image,
    present: Sequence[int],
    classes: Sequence[str],
    palette: Sequence[Color],
    lines: int,
) -> Image.Image:
    """The picture above a legend of the classes in it, if any; `lines` of it fit along a side."""
    if not present:
        return picture
    names = [classes[i] for i in present]
    colors = [palette[i] for i in present]
    legend = draw_legend(names, colors, picture.width, max(14.0, max(picture.size) / lines))
    both = Image.new('RGB', (picture.width, picture.height + legend.height), WHITE)
    both.paste(picture, (0, 0))
    both.paste(legend, (0, picture.height))
    return both


def _inside(box: np.ndarray, size: tuple[int, int]) -> list[float]:
    """The box clipped to the picture, at least one pixel wide and high."""
    x1, y1, x2, y2 = map(float, box)
    x1, x2 = _clip(x1, size[0] - 1), _clip(x2, size[0] - 1)
    y1, y2 = _clip(y1, size[1] - 1), _clip(y2, size[1] - 1)
    return [x1, y1, max(x1, x2), max(y1, y2)]


def _clip(value: float, most: float) -> float:
    """The value in [0, most]; `np.clip` takes ten times as long for a number."""
    return max(0.0, min(value, most))


def _free_place(
    frame: Sequence[float],
    size: tuple[float, float],
    picture: tuple[int, int],
    taken: Sequence[tuple[float, ...]],
) -> tuple[float, ...]:
    """The place of a name: the first corner of its frame, outside first, where it hides no other
    name, or else the first."""
    x1, y1, x2, y2 = frame
    w, h = size
    corners = [(x1, y1 - h), (x1, y2), (x2 - w, y1 - h), (x2 - w, y2)]  # above, below: outside
    corners += [(x1, y1), (x1, y2 - h), (x2 - w, y1), (x2 - w, y2 - h)]  # inside
    places = []
    for x, y in corners:
        left = _clip(x, max(picture[0] - w, 0))
        top = _clip(y, max(picture[1] - h, 0))
        place = left, top, left + w, top + h
        if not any(_overlap(place, other) for other in taken):
            return place
        places.append(place)
    return places[0]


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
