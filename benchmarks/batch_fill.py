"""Measures how full batches are in which no image is padded by another.

    python -m benchmarks.batch_fill                      sizes as in COCO and ADE20K
    python -m benchmarks.batch_fill --images FOLDER      sizes of photographs

Detectors resize images to a shorter side of 800 pixels and a longer one of up to 1333, and pad them
to multiples of 32; segmentors resize them to a shorter side of 512 and do not pad them. Images
come in random order. Without --images, sizes are drawn from distributions like those of COCO
val2017 (5,000 images) and of ADE20K's validation set (2,000 images), see `coco` and `ade20k`.

    sorted     images in a mean batch, as a share of a full one, of images that are sorted by the
               size of the file: `infer.py`
    queue      the same of images in their order, of which some wait: `Predictor`, `cpvt run`
    divided    the same of batches that are divided by size: `test.py`
    padded     pixels in batches that are padded to their largest image, as mm's, as a share of
               those of batches of one padded size
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cpvt_pyramid.padding.batching import WAITING, map_in_batches, padded_size
from cpvt_pyramid.tooling.command import UserError, imports_of, run_command
from cpvt_pyramid.tooling.report import text_table

with imports_of('batch_fill'):
    import numpy as np

    from cpvt_pyramid.predict.images import rescaled_size, size_of
    from cpvt_pyramid.tooling.inputs import find_inputs, is_video

Size = tuple[int, int]  # height and width in pixels
DETECTOR = (800, 1333, 32)  # shorter and longer side, and the multiple of the padded size
SEGMENTOR = (512, 2048, 1)
HEAD = ('sizes', 'batch', 'sorted', 'queue', 'divided', 'padded')


def batch_fill(
    *,
    images: str | None = None,
    batch_sizes: Sequence[int] = (8, 16),
    waiting: int = WAITING,
    seed: int = 0,
) -> None:
    """Print how full batches are.

    Args:
        images: folder of images whose sizes are taken.
        batch_sizes: images in a full batch.
        waiting: images that wait for others of their size at most.
        seed: of the sizes and their order.
    """
    random = np.random.default_rng(seed)
    if images:
        paths = [path for path in find_inputs([images]) if not is_video(path)]
        sizes = [size for size in map(size_of, paths) if size]
        if not sizes:
            raise UserError(f'no images in {images}')
        sets = {'detector': (sizes, DETECTOR), 'segmentor': (sizes, SEGMENTOR)}
    else:
        sets = {
            'COCO val2017, detector': (coco(5000, random), DETECTOR),
            'ADE20K, segmentor': (ade20k(2000, random), SEGMENTOR),
        }
    rows = []
    for name, (sizes, settings) in sets.items():
        shuffled = [sizes[i] for i in random.permutation(len(sizes))]
        canvases = [canvas(size, *settings) for size in shuffled]
        in_order = [canvas(size, *settings) for size in sorted(shuffled)]
        for count in batch_sizes:
            shares = [
                fill(in_order, count, waiting),
                fill(canvases, count, waiting),
                divided(canvases, count),
            ]
            cells = [f'{share:.0%}' for share in shares]
            rows.append([name, str(count), *cells, f'{padded(canvases, count):.2f}'])
    print(text_table(HEAD, rows))


def canvas(size: Size, short: int, long: int, multiple: int) -> Size:
    """The size of an image that is resized and padded."""
    return padded_size(rescaled_size(size, short, long), multiple)


def fill(canvases: Sequence[Size], batch_size: int, waiting: int) -> float:
    """The mean number of images in a batch of one size, as a share of a full one."""
    counts: list[int] = []

    def run(batch: list[Size]) -> list[Size]:
        counts.append(len(batch))
        return batch

    for _ in map_in_batches(run, canvases, lambda size: size, batch_size, waiting):
        pass
    return len(canvases) / (len(counts) * batch_size)


def divided(canvases: Sequence[Size], batch_size: int) -> float:
    """As `fill`, of batches in order that are divided by size."""
    count = sum(len(set(batch)) for batch in batches(canvases, batch_size))
    return len(canvases) / (count * batch_size)


def padded(canvases: Sequence[Size], batch_size: int) -> float:
    """The pixels of batches in order, padded to the largest height and width, as a share of those
    of the images."""
    total = 0
    for batch in batches(canvases, batch_size):
        height, width = np.max(batch, axis=0)
        total += len(batch) * int(height) * int(width)
    return total / sum(height * width for height, width in canvases)


def batches(canvases: Sequence[Size], batch_size: int) -> list[Sequence[Size]]:
    starts = range(0, len(canvases), batch_size)
    return [canvases[start : start + batch_size] for start in starts]


def coco(count: int, random: np.random.Generator) -> list[Size]:
    """Sizes like those of COCO val2017: a longer side of 640 pixels, of which a quarter is the
    height. The shorter side is 480 for four in ten, 424 to 428 for three in ten, and from 300 to
    640 for the others."""
    sizes = []
    for _ in range(count):
        sides = [480, random.integers(424, 429), random.integers(300, 641)]
        shorter = random.choice(sides, p=[0.4, 0.3, 0.3])
        upright = random.random() < 0.25
        sizes.append((640, int(shorter)) if upright else (int(shorter), 640))
    return sizes


def ade20k(count: int, random: np.random.Generator) -> list[Size]:
    """Sizes like those of ADE20K's validation set: a shorter side of 512 pixels. Of the longer
    side, four in ten are 683 (4 : 3), two in ten 768 (3 : 2), one in ten 512, and the others from
    512 to 1024. A fifth is upright."""
    sizes = []
    for _ in range(count):
        longer = random.choice([683, 768, 512, random.integers(512, 1025)], p=[0.4, 0.2, 0.1, 0.3])
        upright = random.random() < 0.2
        sizes.append((int(longer), 512) if upright else (512, int(longer)))
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(batch_fill, argv)


if __name__ == '__main__':
    sys.exit(main())
