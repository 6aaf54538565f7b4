"""Images that two data sets share, exactly or nearly.

Each image is reduced to 64 bits, the perceptual hash pHash (Zauner 2010; that of the imagehash
library): which of the 8 x 8 lowest frequencies of the image, reduced to 32 x 32 pixels, exceed
their median. It is computed while the image is decoded for the check anyway. Hashes are compared by
a matrix product, a block of images at a time: 100,000 with 10,000 take 7 s of a core.
"""

import hashlib
import math
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

    digest: bytes  # of the file
    bits: np.ndarray  # (64,) booleans
    thumbnail: np.ndarray  # (16, 16) uint8, gray


def image_print(data: bytes, image: Image.Image) -> ImagePrint:
    """The print of an image and the file it comes from."""
    gray = image.convert('L')
    small = np.asarray(gray.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    frequencies = _FREQUENCIES @ small @ _FREQUENCIES.T
    bits = (frequencies > np.median(frequencies)).ravel()
    thumbnail = small.reshape(16, 2, 16, 2).mean((1, 3)).astype(np.uint8)
    return ImagePrint(hashlib.blake2b(data, digest_size=16).digest(), bits, thumbnail)


def shared_images(
    prints: dict[Path, ImagePrint], others: dict[Path, ImagePrint]
) -> tuple[list[tuple[Path, Path]], list[tuple[Path, Path]]]:
    """The images that are in `others`, too, each with the most similar one: of the same content,
    and recompressed, resized or slightly changed."""
    by_digest = {image.digest: path for path, image in others.items()}
    exact = [(p, by_digest[i.digest]) for p, i in prints.items() if i.digest in by_digest]
    rest = [path for path, image in prints.items() if image.digest not in by_digest]
    paths, near = list(others), []
    signs = np.array([image.bits for image in others.values()], np.float32).reshape(-1, 64) * 2 - 1
    for start in range(0, len(rest), BLOCK):
        block = rest[start : start + BLOCK]
        bits = np.array([prints[path].bits for path in block], np.float32)
        # The product of two hashes of signs is 64 minus twice the bits that differ.
        products = (bits * 2 - 1) @ signs.T
        for path, similar in zip(block, products >= 64 - 2 * FEW_BITS):
            mine = prints[path].thumbnail.astype(int)
            pairs = [
                (np.abs(mine - others[paths[j]].thumbnail).mean(), paths[j])
                for j in np.flatnonzero(similar)
            ]
            difference, other = min(pairs, default=(math.inf, path), key=lambda pair: pair[0])
            if difference <= GRAY_LEVELS:
                near.append((path, other))
    return exact, near
