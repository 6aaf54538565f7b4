#!/usr/bin/env python
"""Measures what the tiles of infer.py --tile change: tiled against untiled segmentation.

For each overlap, within 16 pixels of the tiles' inner borders and elsewhere: the share of pixels
with the same label, and the mean difference of the scores relative to their standard deviation. The
image must fit into memory untiled.
"""

from __future__ import annotations

# torch and mm are imported inside the functions, so that --help is quick.
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from cpvt_pyramid.runner.inference.tiling import TileGrid

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

NEAR = 16  # pixels from a border


class Seams(NamedTuple):
    """Tiled against untiled, in a part of the image."""

    pixels: float  # size of the part, relative to the image
    labels: float  # share of equal labels
    scores: float  # mean difference relative to the standard deviation of the untiled scores


def seams(
    config: str,
    checkpoint: str,
    image: str,
    *,
    tile: int = 512,
    overlaps: Sequence[int] = (0, 32, 64, 128),
    device: str | None = None,
    out: str | None = None,
    cfg_options: Sequence[str] = (),
) -> None:
    """Print the table.

    Args:
        config: config file of a segmentor
        checkpoint: weights of the model, a path or an address
        image: an image that is larger than a tile
        tile (PIXELS): size of the tiles
        overlaps (PIXELS): of neighboring tiles
        device: torch device, for example cpu or cuda:1; by default a GPU if there is one
        out (FILE.png): draw the differences into this file
        cfg_options (KEY=VALUE): override settings of the config, for example
            model.backbone.window_padding=zero
    """
    from cpvt_pyramid.runner.configs import load_config
    from cpvt_pyramid.runner.inference import large_images, raster
    from cpvt_pyramid.runner.models import build_model, fetch_checkpoint, load_whole_model
    from cpvt_pyramid.tooling.command import UserError

    for overlap in overlaps:
        large_images.tile_options(1, tile, overlap)
    cfg = load_config(config, cfg_options)
    if cfg.default_scope != 'mmseg':
        raise UserError(f'{config} must be the config of a segmentor')
    weights = fetch_checkpoint(checkpoint)
    model = build_model(cfg, device)
    load_whole_model(model, weights, checkpoint)
    try:
        with raster.open_image(Path(image)) as file:
            pixels = raster.row_reader(file)(0, file.height)
    except raster.ReadError as error:
        raise UserError(f'{image}: {error}') from error
    if max(pixels.shape[1:]) <= tile:
        raise UserError(f'{image} fits into one tile of {tile}; choose a smaller --tile')

    maps = {}
    print(f'{"":8}  {"at borders":^31}  {"elsewhere":^31}')
    print(f'{"overlap":8}' + f'  {"of the image":>12} {"labels":>9} {"scores":>8}' * 2)
    predict = large_images.segmentor_scores(model)
    for overlap, parts, maps[overlap] in measured(pixels, tile, overlaps, predict):
        cells = (f'  {part.pixels:12.1%} {part.labels:9.3%} {part.scores:8.4f}' for part in parts)
        print(f'{overlap:<8}', *cells, sep='', flush=True)
    if out:
        draw(maps).save(out)
        print(out)


def measured(
    image: Tensor, tile: int, overlaps: Sequence[int], predict: Callable
) -> Iterator[tuple[int, tuple[Seams, Seams], Tensor]]:
    """Each overlap, what differs at borders and elsewhere, and the map of differences.

    Args:
        image: (3, H, W).
        tile, overlaps: in pixels.
        predict: scores (B, K, H, W) of images.
    """
    from cpvt_pyramid.runner.inference.tiling import TileGrid

    whole = predict(image[None])[0].cpu()
    for overlap in overlaps:
        grid = TileGrid(tuple(image.shape[1:]), tile, overlap)
        scores = tiled_scores(image, grid, predict)
        equal = scores.argmax(0) == whole.argmax(0)
        change = (scores - whole).abs().mean(0) / whole.std()
        near = near_borders(grid)
        parts = tuple(
            Seams(*(float(x.float().mean()) for x in (part, equal[part], change[part])))
            for part in (near, ~near)
        )
        yield overlap, parts, change


def tiled_scores(image: Tensor, grid: TileGrid, predict: Callable) -> Tensor:
    """The blended scores (K, H, W) of an image (3, H, W)."""
    import torch

    from cpvt_pyramid.runner.inference import tiling

    blended = None
    weights = tiling.ramps(grid.rows), tiling.ramps(grid.columns)
    with tempfile.TemporaryDirectory() as folder:
        strips = tiling.strips(lambda start, stop: image[:, start:stop], grid.rows)
        for row, strip in enumerate(strips):
            above, below = (tiling.Sums(Path(folder, str(i)), grid.size[1]) for i in (row, row + 1))
            scores = tiling.batches(strip, grid.columns, predict, 1, True)
            for ys, xs, block in tiling.blended(scores, grid, row, weights, above, below):
                if blended is None:
                    blended = torch.empty(len(block), *grid.size)
                blended[:, slice(*ys), slice(*xs)] = block
    return blended


def near_borders(grid: TileGrid) -> Tensor:
    """(H, W), whether a pixel is within `NEAR` pixels of a tile's border inside the image."""
    import torch

    axes = []
    for length, tiles in zip(grid.size, (grid.rows, grid.columns)):
        near = torch.zeros(length, dtype=torch.bool)
        for border in {end for span in tiles for end in span} - {0, length}:
            near[max(border - NEAR, 0) : border + NEAR] = True
        axes.append(near)
    return axes[0][:, None] | axes[1]


def draw(maps: dict[int, Tensor]) -> Image.Image:
    """The maps of differences side by side, on the same scale."""
    import numpy as np
    from PIL import Image, ImageDraw

    from cpvt_pyramid.tooling.drawing import INK, WHITE, font

    top = float(np.quantile(np.concatenate([m.numpy().ravel() for m in maps.values()]), 0.999))
    height, width = next(iter(maps.values())).shape
    step = max(1, max(height, width) // 512)
    panels = [
        Image.fromarray((255 * (m.numpy()[::step, ::step] / top).clip(0, 1)).astype(np.uint8))
        for m in maps.values()
    ]
    gap, line = 8, 26
    wide, high = panels[0].size
    sheet = Image.new('RGB', (len(panels) * (wide + gap) - gap, high + line), WHITE)
    pen = ImageDraw.Draw(sheet)
    for i, (overlap, panel) in enumerate(zip(maps, panels)):
        sheet.paste(panel, (i * (wide + gap), line))
        text = f'overlap {overlap} (white: {top:.2f} standard deviations)'
        pen.text((i * (wide + gap) + 4, line / 2), text, INK, font(13.0), anchor='lm')
    return sheet


def main(argv: Sequence[str] | None = None) -> int:
    from cpvt_pyramid.tooling.command import run_command

    return run_command(seams, argv)


if __name__ == '__main__':
    sys.exit(main())
