"""Write a config for your own data: a data.yaml, or a folder whose layout is recognized.

The config inherits from BASE and sets the classes, the paths, the numbers of classes of all heads,
the image scale, the learning rate, the schedule and the evaluators. Images stay where they are.
Annotations that need conversion are written to a folder next to the config. See docs/own_data.md.

    cpvt new-config data.yaml --base mask_rcnn_cpvt_s --out my.py

BASE is a config file, also one of MMDetection or MMSegmentation, or a config of this package:

    boxes
        retinanet_{cpvt,svt}_{s,b,l}{,_3x}
        retinanet_pvt_{t,s,m,l}
        retinanet_pvt_v2_{b0,b1,b2,b3,b4,b5}
        dino_cpvt_s
    masks of objects
        mask_rcnn_{cpvt,svt}_{s,b,l}{,_3x}
        mask_rcnn_pvt_{t,s,m,l}
        mask_rcnn_pvt_v2_b2
    segmentation masks
        semantic_fpn_{cpvt,svt}_{s,b,l}
        semantic_fpn_pvt_{t,s,m,l}
        semantic_fpn_pvt_v2_b2
        semantic_fpn_columnar_cpvt_ti
        upernet_{cpvt,svt}_{s,b,l}
        segformer_{b0,b1,b2,b3,b4,b5}{,_cityscapes}
        segformer_b5_640
        mask2former_cpvt_s
    small models, the weights of whose backbone are in this package: nothing is downloaded
        {trees,pages}_retinanet_cpvt_nano
        pages_semantic_fpn_cpvt_nano

retinanet_{cpvt,svt}_s stands for retinanet_cpvt_s and retinanet_svt_s. The sizes are tiny, small,
medium, base and large; _3x trains three times as long.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..tooling.command import check_at_least, run_command

GROUP = 'data'


def new_config(
    data: str,
    *,
    base: str,
    out: str,
    skip_bad: bool = False,
    overwrite: bool = False,
    epochs: Optional[int] = None,
) -> None:
    """Write a config for your own data.

    Args:
        data: data.yaml, which cpvt check-data --out writes, or a folder with images and
            annotations.
        base: config with the model and the recipe: a file or a name, see above.
        out: the config to write; converted annotations go to a folder next to it, such as
            my_data for my.py.
        skip_bad: leave out images and annotations that have errors; reads all images completely.
        overwrite: replace files that exist.
        epochs: length of the training; by default as many images as 3000 steps of the base see,
            but at most 300 epochs, and at least those of the base.
    """
    check_at_least('epochs', epochs, 1)
    from ..data.new_config import find_base, new_config

    for line in new_config(Path(data), find_base(base), Path(out), skip_bad, overwrite, epochs):
        print(line)
    shown = shlex.quote(out)
    print(f'next: cpvt check-data {shown}, then cpvt train {shown}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(new_config, argv)
