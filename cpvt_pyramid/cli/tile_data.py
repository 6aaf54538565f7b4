"""Cut the large images of a data set with boxes into tiles.

Reads COCO, YOLO and Pascal VOC, see docs/own_data.md, and writes COCO's layout, completely or not
at all. Training tiles overlap; those for validation and testing lie side by side. A box of which a
tile has only a part is ignored there, and left out if that is less than a tenth. Tiles without
objects stay: they show what is background. Images that are not larger than a tile are copied.

    cpvt tile-data DATA --out TILES
    cpvt check-data TILES
    cpvt new-config TILES --base configs/retinanet_cpvt_s.py --out my.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..tooling.command import check_at_least, run_command


def tile_data(
    data: str,
    *,
    out: str,
    tile: int = 384,
    step: Optional[int] = None,
    assign: Sequence[str] = (),
    boxes_only: bool = False,
    skip_bad: bool = False,
) -> None:
    """Cut the images of a folder with data into tiles.

    Args:
        data: folder with images and boxes.
        out: folder to create.
        tile: side of a tile in pixels; of tiles side by side, the longest side.
        step: pixels between the corners of training tiles (default: half a tile);
            objects up to tile - step pixels are whole in at least one.
        assign: what folders or files are for, train, val or test, where their names
            say something else; for example site_dev=train.
        boxes_only: leave out the masks of objects, which cannot be cut.
        skip_bad: leave out images and annotations that have errors.
    """
    from ..data.folder import assigned_splits
    from ..data.tile_data import tile_data

    check_at_least('--tile', tile, 32)
    step = tile // 2 if step is None else step
    lines = tile_data(
        Path(data), Path(out), tile, step, assigned_splits(assign), boxes_only, skip_bad
    )
    print('\n'.join(lines))
    print(f'next: cpvt check-data {out}, then cpvt new-config {out}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(tile_data, argv)
