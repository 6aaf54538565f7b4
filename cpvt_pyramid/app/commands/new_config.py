"""Write a config for your own data: a data.yaml, or a folder whose layout is recognized.

The config inherits from BASE and sets the classes, the paths, the numbers of classes of all heads,
the image scale, the learning rate, the schedule and the evaluators. Images stay where they are.
Annotations that need conversion are written to a folder next to the config. See docs/own_data.md.

    cpvt new-config data.yaml --base configs/mask_rcnn_cpvt_s.py --out my.py
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
    skip_bad: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a config for your own data.

    Args:
        data: data.yaml, which cpvt check-data --out writes, or a folder with images and
            annotations.
        base: config with the model and the recipe, for example
            configs/retinanet_cpvt_s.py.
        out: the config to write; converted annotations go to the folder CONFIG_data next
            to it, without .py.
        skip_bad: leave out images and annotations that have errors.
        overwrite: replace files that exist.
    """
    from ..data.new_config import new_config

    for line in new_config(Path(data), Path(base), Path(out), skip_bad, overwrite):
        print(line)
    print(f'next: cpvt check-data {out}, then cpvt train {out}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(new_config, argv)
