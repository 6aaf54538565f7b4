"""Pictures in which the place of things matters: handwritten digits on photographs.

A picture is a grid of cells. Every cell shows its own random crop of a photograph, and three cells
show a digit each: A in red, B in green, C in blue ink. What a cell shows is drawn independently of
where the cell is, so a model that sees the cells as a bag can know which digits there are and
nothing about where. The three digits differ, and so do their rows and their columns.

The digits are scikit-learn's scans (UCI), the photographs scikit-image's (public domain or CC0).
Training, tuning and test share no scan and no photograph.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SCANS = {'train': slice(0, 1000), 'tuning': slice(1000, 1297), 'test': slice(1297, 1797)}
INKS = ((0.95, 0.15, 0.15), (0.15, 0.9, 0.2), (0.2, 0.35, 1.0))  # of A, B and C
PHOTOGRAPHS = {  # of scikit-image
    'train': ('astronaut', 'coffee', 'rocket', 'brick'),
    'tuning': ('chelsea', 'gravel'),
    'test': ('camera', 'hubble_deep_field', 'grass'),
}
TILES = 2048  # crops of photographs in each split
NOTHING, LEFTMOST, OTHER = range(3)  # classes of a pixel


class Scenes(NamedTuple):
    """A batch of pictures and what they show.

    Shapes: B pictures of G x G' cells; the axis of 3 is that of the digits A, B and C.
    """

    image: Tensor  # (B, 3, H, W), about -1 to 1
    rows: Tensor  # (B, 3), in cells
    columns: Tensor  # (B, 3), in cells
    digits: Tensor  # (B, 3), 0 to 9
    pixels: Tensor  # (B, H, W), NOTHING, LEFTMOST (ink of the leftmost digit) or OTHER (ink)
    boxes: Tensor  # (B, 3, 4), x1 y1 x2 y2 of the ink, in pixels
    grid: tuple[int, int]  # height and width in cells


def draw_scenes(
    split: str,
    count: int,
    seed: int,
    grid: tuple[int, int] = (6, 6),
    cell: int = 8,
) -> Scenes:
    """Draw random pictures; the same arguments give the same pictures.

    Args:
        split: 'train', 'tuning' or 'test'.
        count: number of pictures.
        seed: of all random choices.
        grid: height and width in cells, each at least 3.
        cell: side of a cell in pixels.
    """
    if min(grid) < 3:
        raise ValueError(f'a grid must have at least 3 x 3 cells, got {grid[0]} x {grid[1]}')
    rng = np.random.default_rng([seed, list(SCANS).index(split)])
    tiles, scans, labels = material(split, cell)
    rows, columns = arrangements(count, grid, rng)
    digits = np.argsort(rng.random((count, 10)), axis=1)[:, :3]  # three that differ
    of_digit = [np.flatnonzero(labels == d) for d in range(10)]
    choice = rng.random((count, 3))
    chosen = np.empty((count, 3), int)
    for d, scans_of_d in enumerate(of_digit):
        here = digits == d
        chosen[here] = scans_of_d[(choice[here] * len(scans_of_d)).astype(int)]

    height, width = grid
    cells = tiles[torch.from_numpy(rng.integers(len(tiles), size=(count, height * width)))]
    kinds = torch.zeros(count, height * width, cell, cell, dtype=torch.long)
    ink = scans[torch.from_numpy(chosen)]  # (B, 3, cell, cell)
    places = torch.from_numpy(rows * width + columns)
    picture = torch.arange(count)
    leftmost = torch.from_numpy(columns.argmin(1))
    for i, color in enumerate(INKS):
        below = cells[picture, places[:, i]]
        alpha = ink[:, i, None]
        painted = torch.tensor(color).view(3, 1, 1)
        cells[picture, places[:, i]] = below * (1 - alpha) + painted * alpha
        kind = torch.where(leftmost == i, LEFTMOST, OTHER)[:, None, None]
        kinds[picture, places[:, i]] = torch.where(ink[:, i] > 0.5, kind, NOTHING)
    image = cells.view(count, height, width, 3, cell, cell).permute(0, 3, 1, 4, 2, 5)
    pixels = kinds.view(count, height, width, cell, cell).permute(0, 1, 3, 2, 4)
    corner = np.stack([columns, rows, columns, rows], axis=2) * cell
    return Scenes(
        image=image.reshape(count, 3, height * cell, width * cell) * 2 - 1,
        rows=torch.from_numpy(rows),
        columns=torch.from_numpy(columns),
        digits=torch.from_numpy(digits),
        pixels=pixels.reshape(count, height * cell, width * cell),
        boxes=torch.from_numpy(corner) + ink_boxes(ink),
        grid=grid,
    )


def arrangements(
    count: int, grid: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns (count, 3) of the digits, uniform among the allowed arrangements."""
    height, width = grid
    found = np.empty((0, 2, 3), int)  # rows and columns of each arrangement
    while len(found) < count:
        size = (2 * count + 64, 3)
        rows = rng.integers(height, size=size)
        columns = rng.integers(width, size=size)
        allowed = np.stack([rows, columns], axis=1)[is_allowed(rows, columns, grid)]
        found = np.concatenate([found, allowed])
    return found[:count, 0], found[:count, 1]


def is_allowed(rows: np.ndarray, columns: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Which arrangements (N, 3) have an answer to every question: rows and columns differ, one
    pair is closer than the others, and A is not in the middle of an odd grid."""
    distances = np.sort(squared_distances(rows, columns), axis=1)
    allowed = distances[:, 0] < distances[:, 1]
    for at, side in zip((rows, columns), grid):
        allowed &= (np.diff(np.sort(at, axis=1), axis=1) > 0).all(1)
        allowed &= 2 * at[:, 0] + 1 != side
    return allowed


def squared_distances(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(N, 3): of A and B, B and C, C and A."""
    return (rows - np.roll(rows, -1, 1)) ** 2 + (columns - np.roll(columns, -1, 1)) ** 2


@lru_cache
def material(split: str, cell: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """What the pictures of a split are made of.

    Returns:
        Crops of photographs (TILES, 3, cell, cell), darkened to 0 to 0.6; scans (N, cell, cell),
        the share of ink from 0 to 1; and the digit that each scan shows.
    """
    import skimage.data
    from skimage.color import gray2rgb
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(0)  # the same splits and crops for every seed of a run
    scans, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(scans))[SCANS[split]]
    scans = torch.from_numpy(scans[order].reshape(-1, 1, 8, 8) / 16).float()
    scans = F.interpolate(scans, (cell, cell), mode='bilinear').clamp(0, 1)[:, 0]

    names = PHOTOGRAPHS[split]
    tiles = []
    for name in names:
        photograph = getattr(skimage.data, name)()
        if photograph.ndim == 2:
            photograph = gray2rgb(photograph)
        for _ in range(math.ceil(TILES / len(names))):
            y, x = (rng.integers(side - 2 * cell) for side in photograph.shape[:2])
            crop = photograph[y : y + 2 * cell, x : x + 2 * cell]
            tiles.append(crop.reshape(cell, 2, cell, 2, 3).mean((1, 3)))
    tiles = torch.from_numpy(np.stack(tiles[:TILES]) / 255 * 0.6).float()
    return tiles.permute(0, 3, 1, 2).contiguous(), scans, labels[order]


def ink_boxes(ink: Tensor) -> Tensor:
    """(..., 4), x1 y1 x2 y2 around the ink of scans (..., h, w)."""
    sides = []
    for axis in (-2, -1):  # columns, then rows
        used = (ink > 0.5).any(axis).to(torch.uint8)
        length = used.shape[-1]
        sides.append((used.argmax(-1), length - used.flip(-1).argmax(-1)))
    (x1, x2), (y1, y2) = sides
    return torch.stack([x1, y1, x2, y2], dim=-1)
