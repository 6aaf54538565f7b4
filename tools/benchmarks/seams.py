#!/usr/bin/env python
"""Measure what the tiles of infer.py --tile change: tiled against untiled segmentation.

For each overlap it prints, within 16 pixels of the tiles' borders inside of the image and away from
them, the share of pixels whose label is the untiled one and the mean difference of the scores, as a
share of their standard deviation. With --out it draws the differences. The image must be one that
fits into memory untiled.
"""

# Imports wait until the arguments are read: --help is quick, and mm's take seconds.
import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from cpvt_pyramid.runner.tiling import Grid

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

NEAR = 16  # pixels from a border


class Seams(NamedTuple):
    """Tiled against untiled, in a part of the image."""

    pixels: float  # the part, as a share of the image
    labels: float  # share of equal labels
    scores: float  # mean difference, as a share of the untiled scores' standard deviation


def measure_seams(
    config: str,
    checkpoint: str,
    image: str,
    tile: int = 512,
    overlaps: Sequence[int] = (0, 32, 64, 128),
    device: Optional[str] = None,
    out: Optional[str] = None,
    cfg_options: Sequence[str] = (),
) -> dict[int, dict[str, Seams]]:
    """Print the table and return it, by overlap, for 'at borders' and 'away from them'.

    Args:
        config: the config file of a segmentor.
        checkpoint: path or address of the model's weights.
        image: one that is larger than a tile.
        tile: size of the tiles, in pixels.
        overlaps: of neighbouring tiles, in pixels.
        device: torch device; by default a GPU if there is one.
        out: file for a picture of the differences.
        cfg_options: `key=value` settings that override the config's.
    """
    from cpvt_pyramid.runner import large_images, launch
    from cpvt_pyramid.runner.tiling import Grid

    for overlap in overlaps:
        large_images.tile_options(1, tile, overlap, None, False)
    cfg = launch.load_config(config, cfg_options)
    if cfg.default_scope != 'mmseg':
        raise launch.UserError(f'{config} is no segmentor')
    weights = launch.read_checkpoint(checkpoint)
    model = launch.build_model(cfg, device)
    launch.load_weights(model, weights, checkpoint)
    predict = large_images.segmentor_scores(model)
    try:
        with large_images.open_image(Path(image)) as file:
            pixels = large_images.row_reader(file)(0, file.height)
    except large_images.ReadError as error:
        raise launch.UserError(f'{image}: {error}') from error
    size = tuple(pixels.shape[1:])
    if max(size) <= tile:
        raise launch.UserError(f'{image} is one tile of {tile}; take a smaller --tile')

    whole = predict(pixels[None])[0].cpu()
    results, maps = {}, {}
    print(f'{"":8}  {"at borders":^31}  {"away from them":^31}')
    print(f'{"overlap":8}' + f'  {"of the image":>12} {"labels":>9} {"scores":>8}' * 2)
    for overlap in overlaps:
        grid = Grid(size, tile, overlap)
        scores = tiled_scores(pixels, grid, predict)
        equal = scores.argmax(0) == whole.argmax(0)
        near = near_borders(grid)
        maps[overlap] = (scores - whole).abs().mean(0) / whole.std()
        results[overlap] = {
            name: Seams(
                float(part.float().mean()),
                float(equal[part].float().mean()),
                float(maps[overlap][part].mean()),
            )
            for name, part in (('at borders', near), ('away from them', ~near))
        }
        parts = results[overlap].values()
        cells = (f'  {part.pixels:12.1%} {part.labels:9.3%} {part.scores:8.4f}' for part in parts)
        print(f'{overlap:<8}', *cells, sep='', flush=True)
    if out:
        draw(maps).save(out)
        print(f'the differences are drawn in {out}')
    return results


def tiled_scores(image: 'Tensor', grid: 'Grid', predict: Callable) -> 'Tensor':
    """The blended scores (K, H, W) of an image (3, H, W)."""
    import torch

    from cpvt_pyramid.runner import tiling

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


def near_borders(grid: 'Grid') -> 'Tensor':
    """(H, W), whether a pixel is within `NEAR` of a tile's border that is inside of the image."""
    import torch

    axes = []
    for length, tiles in zip(grid.size, (grid.rows, grid.columns)):
        near = torch.zeros(length, dtype=torch.bool)
        for border in {end for span in tiles for end in span} - {0, length}:
            near[max(border - NEAR, 0) : border + NEAR] = True
        axes.append(near)
    return axes[0][:, None] | axes[1]


def draw(maps: dict[int, 'Tensor']) -> 'Image.Image':
    """The differences side by side, one scale for all."""
    import numpy as np
    from PIL import Image, ImageDraw

    from cpvt_pyramid.runner.drawing import INK, WHITE, font

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


def main(argv: Optional[Sequence[str]] = None) -> int:
    from cpvt_pyramid.runner.options import add_cfg_options

    parser = argparse.ArgumentParser(
        prog='measure_seams',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('config', metavar='CONFIG', help='config file of a segmentor')
    add('checkpoint', metavar='CHECKPOINT', help='weights of the model, a path or an address')
    add('image', metavar='IMAGE', help='an image that is larger than a tile')
    add('--tile', type=int, default=512, metavar='PIXELS', help='size of the tiles (%(default)s)')
    add(
        '--overlaps',
        type=int,
        nargs='+',
        default=[0, 32, 64, 128],
        metavar='PIXELS',
        help='of neighbouring tiles (%(default)s)',
    )
    add('--device', help='torch device, for example cpu or cuda:1 (a GPU if there is one)')
    add('--out', metavar='FILE.png', help='draw the differences')
    add_cfg_options(parser, 'model.backbone.window_padding=zero')
    arguments = vars(parser.parse_args(argv))

    from cpvt_pyramid.runner.launch import run_tool

    return run_tool('measure_seams', print_seams, arguments, 'there is no result')


def print_seams(**arguments: object) -> None:
    measure_seams(**arguments)


if __name__ == '__main__':
    sys.exit(main())
