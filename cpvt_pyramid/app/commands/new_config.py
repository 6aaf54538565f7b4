"""Write a config for a folder with your own data.

Recognizes COCO, YOLO and Pascal VOC, and folders of images and segmentation masks. The config
inherits from BASE and sets the classes, the paths, the numbers of classes of all heads, the image
scale, the learning rate, the schedule and the evaluators. Images stay where they are. Annotations
that need conversion are written to a folder next to the config. See docs/own_data.md.

    cpvt new-config DATA --base configs/mask_rcnn_cpvt_s.py --out my.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..tooling.command import run_command


def new_config(
    data: str,
    *,
    base: str,
    out: str,
    assign: Sequence[str] = (),
    skip_bad: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a config for a folder with data.

    Args:
        data: folder with images and annotations.
        base: config with the model and the recipe, for example
            configs/retinanet_cpvt_s.py.
        out: the config to write; converted annotations go to the folder CONFIG_data next
            to it, without .py.
        assign: what folders or files are for, train, val or test, where their names
            say something else; for example site_dev=train.
        skip_bad: leave out images and annotations that have errors.
        overwrite: replace files that exist.
    """
    from ..data.folder import assigned_splits
    from ..data.new_config import new_config

    assigned = assigned_splits(assign)
    for line in new_config(Path(data), Path(base), Path(out), skip_bad, overwrite, assigned):
        print(line)
    print(f'next: cpvt check-data {out}, then cpvt train {out}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(new_config, argv)
