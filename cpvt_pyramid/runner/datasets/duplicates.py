"""Images that two data sets share, exactly or nearly.

Each image is reduced to 64 bits, the perceptual hash pHash (Zauner 2010; that of the imagehash
library): which of the 8 x 8 lowest frequencies of the image, reduced to 32 x 32 pixels, exceed
their median. It is computed while the image is decoded for the check anyway. Hashes are compared by
a matrix product, a block of images at a time: 100,000 with 10,000 take 7 s of a core.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
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


class Shared(NamedTuple):
    """Pairs of an image of one set and the most similar one of another."""

    exact: list[tuple[Path, Path]]  # the same file content
    near: list[tuple[Path, Path]]  # recompressed, resized or slightly changed


def shared_images(prints: dict[Path, ImagePrint], others: dict[Path, ImagePrint]) -> Shared:
    """The images that are in `others`, too."""
    by_digest = {image.digest: path for path, image in others.items()}
    exact = [(p, by_digest[i.digest]) for p, i in prints.items() if i.digest in by_digest]
    same = {path for path, _ in exact}
    rest = [path for path in prints if path not in same]
    return Shared(exact, near_pairs({path: prints[path] for path in rest}, others))


def near_pairs(
    prints: dict[Path, ImagePrint], others: dict[Path, ImagePrint]
) -> list[tuple[Path, Path]]:
    """The images that look like one in `others`, each with the most similar."""
    if not prints or not others:
        return []
    paths, candidates = list(others), defaultdict(list)
    signs = signs_of(list(others.values()))
    names = list(prints)
    for start in range(0, len(names), BLOCK):
        block = names[start : start + BLOCK]
        # The product of two hashes of signs is 64 minus twice the bits that differ.
        products = signs_of([prints[name] for name in block]) @ signs.T
        for i, j in zip(*np.nonzero(products >= 64 - 2 * FEW_BITS)):
            candidates[block[i]].append(paths[j])
    found = []
    for name, similar in candidates.items():
        mine = prints[name].thumbnail.astype(int)
        differences = [np.abs(mine - others[path].thumbnail).mean() for path in similar]
        if min(differences) <= GRAY_LEVELS:
            found.append((name, similar[int(np.argmin(differences))]))
    return found


def signs_of(prints: Sequence[ImagePrint]) -> np.ndarray:
    """(N, 64) hashes as 1 and -1."""
    return np.stack([image.bits for image in prints]).astype(np.float32) * 2 - 1
