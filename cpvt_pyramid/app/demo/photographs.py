"""Photographs of scikit-image, which need no network."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import skimage.data
from PIL import Image

CROP = (0.5, 1.0)  # of the largest crop of that shape which the photograph holds


@dataclass(frozen=True)
class Photograph:
    """A photograph in skimage.data, described as in scikit-image's documentation."""

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


def random_crop(
    rng: np.random.Generator, photograph: Image.Image, size: tuple[int, int]
) -> np.ndarray:
    """A random crop of the photograph, resized to `size` and mirrored half of the time: (H, W, 3)
    float32, 0 to 255."""
    zoom = min(photograph.width / size[0], photograph.height / size[1]) * rng.uniform(*CROP)
    width = size[0] * zoom
    height = size[1] * zoom
    left = rng.uniform(0, photograph.width - width)
    top = rng.uniform(0, photograph.height - height)
    crop = photograph.resize(
        size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height)
    )
    if rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(crop, np.float32)


def load_photograph(name: str) -> Image.Image:
    """A photograph from scikit-image's wheel."""
    return Image.fromarray(getattr(skimage.data, name)()).convert('RGB')


@cache
def photographs_of(split: str) -> dict[str, Image.Image]:
    """The photographs of a split, by name."""
    names = [name for name, photograph in PHOTOGRAPHS.items() if photograph.split == split]
    return {name: load_photograph(name) for name in names}


def photographs_section() -> str:
    """The section of a SOURCES.md about the photographs."""
    rows = '\n'.join(
        f'| `skimage.data.{name}` | {p.title} | {p.author} | {p.licence} | {p.split} |'
        for name, p in PHOTOGRAPHS.items()
    )
    return f"""\
## Photographs: scikit-image, https://scikit-image.org/docs/stable/api/skimage.data.html

Changes: cropped, scaled, some mirrored. No photograph is in both splits.

| image | title | author | licence | used in |
|---|---|---|---|---|
{rows}
"""
