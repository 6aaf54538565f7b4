"""Outlines of masks as polygons.

Coordinates are (x, y) in pixels of the image; pixel (0, 0) is the square from (0, 0) to (1, 1).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..tooling.rasters import import_rasterio

TOLERANCE = 1.0  # pixels; removes the steps of a slanting line


def regions(values: Any, **options: Any) -> Iterator[tuple[list, int]]:
    """The connected regions of equal values, as polygons along the borders of pixels, each a list
    of rings with the outer one first, with their value.

    `values` are (H, W) uint8, or a band of a rasterio data set, which is read line by line;
    `options` are those of `rasterio.features.shapes`.
    """
    shapes = import_rasterio('a polygon of a mask').features.shapes
    for geometry, value in shapes(values, connectivity=4, **options):
        yield geometry['coordinates'], int(value)


def outlines(mask: np.ndarray) -> list[np.ndarray]:
    """The outer borders of the parts of a mask (H, W) as polygons (N, 2), the largest first.

    Steps of up to a pixel are straightened, and holes are left out.
    """
    found = regions(mask.astype(np.uint8), mask=mask)
    rings = [np.array(polygon[0][:-1]) for polygon, _ in found]
    return [without_steps(ring) for ring in sorted(rings, key=ring_area, reverse=True)]


def ring_area(ring: np.ndarray) -> float:
    """The area inside a polygon (N, 2)."""
    x, y = ring.T
    return abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def without_steps(ring: np.ndarray) -> np.ndarray:
    """A polygon (N, 2) without the vertices that change it by no more than `TOLERANCE` (Douglas and
    Peucker 1973); of a polygon that would vanish, all."""
    closed = np.concatenate([ring, ring[:1]])
    opposite = int(np.abs(ring - ring[0]).sum(1).argmax())
    kept, waiting = {0, opposite}, [(0, opposite), (opposite, len(ring))]
    while waiting:
        start, stop = waiting.pop()
        if stop - start < 2:
            continue
        chord = closed[stop] - closed[start]
        offsets = closed[start + 1 : stop] - closed[start]
        away = np.abs(chord[0] * offsets[:, 1] - chord[1] * offsets[:, 0]) / np.hypot(*chord)
        farthest = start + 1 + int(away.argmax())
        if away.max() > TOLERANCE:
            kept.add(farthest)
            waiting += [(start, farthest), (farthest, stop)]
    return ring[sorted(kept)] if len(kept) > 2 else ring


def one_polygon(parts: list[np.ndarray]) -> np.ndarray:
    """One polygon (N, 2) of several: it goes to each next one along the shortest line and back."""
    whole = parts[0]
    for part in parts[1:]:
        distances = np.abs(whole[:, None] - part).sum(-1)
        i, j = np.unravel_index(distances.argmin(), distances.shape)
        there_and_back = [whole[: i + 1], np.roll(part, -j, 0), part[j : j + 1], whole[i:]]
        whole = np.concatenate(there_and_back)
    return whole
