"""Images that are in two data sets, or look alike: recompressed, resized or slightly changed.

Each image is reduced to 64 bits, the perceptual hash pHash (Zauner 2010; that of the imagehash
library): which of the 8 x 8 lowest frequencies of the image, reduced to 32 x 32 pixels, exceed
their median. It is computed while the image is decoded for the check anyway. Hashes are compared by
a matrix product, a block of images at a time: 100,000 with 10,000 take 7 s of a core.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

SIDE, KEPT = 32, 8  # pixels and frequencies
FEW_BITS = 6  # the most in which the hashes of nearly equal images differ
GRAY_LEVELS = 10  # their largest mean difference, of 255
BLOCK = 1024  # images compared at a time
_FREQUENCIES = np.cos(
    np.pi / SIDE * np.outer(np.arange(KEPT), np.arange(SIDE) + 0.5)
)  # the lowest rows of the discrete cosine transform


class ImagePrint(NamedTuple):
    """What tells whether two images are the same."""

    bits: np.ndarray  # (64,) booleans
    thumbnail: np.ndarray  # (16, 16) uint8, gray


def image_print(image: Image.Image) -> ImagePrint:
    gray = image.convert('L')
    small = np.asarray(gray.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    frequencies = _FREQUENCIES @ small @ _FREQUENCIES.T
    bits = (frequencies > np.median(frequencies)).ravel()
    thumbnail = small.reshape(16, 2, 16, 2).mean((1, 3)).astype(np.uint8)
    return ImagePrint(bits, thumbnail)


def shared_images(
    prints: dict[Path, ImagePrint], others: dict[Path, ImagePrint]
) -> list[tuple[Path, Path]]:
    """The images that are, or look like one, in `others`, each with the most similar one there."""
    mine, theirs, shared = list(prints), list(others), []
    signs = np.array([image.bits for image in others.values()], np.float32).reshape(-1, 64) * 2 - 1
    for start in range(0, len(mine), BLOCK):
        block = mine[start : start + BLOCK]
        bits = np.array([prints[path].bits for path in block], np.float32)
        # The product of two hashes of signs is 64 minus twice the bits that differ.
        products = (bits * 2 - 1) @ signs.T
        for path, similar in zip(block, products >= 64 - 2 * FEW_BITS):
            thumbnail = prints[path].thumbnail.astype(int)
            pairs = [
                (np.abs(thumbnail - others[theirs[j]].thumbnail).mean(), theirs[j])
                for j in np.flatnonzero(similar)
            ]
            if pairs and min(pairs)[0] <= GRAY_LEVELS:
                shared.append((path, min(pairs)[1]))
    return shared
