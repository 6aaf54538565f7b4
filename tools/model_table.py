#!/usr/bin/env python
"""Print the table of models in the README, from the models themselves; --write puts it in."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

README = ROOT / 'README.md'
BEGIN, END = '<!-- models: tools/model_table.py -->\n', '<!-- end of models -->'

# As published (Twins, arXiv 2104.13840, tables 1 to 6): name, ImageNet top-1, box AP of
# RetinaNet 1x on COCO, mIoU of Semantic FPN on ADE20K.
PUBLISHED = {
    'pcpvt_small': ('PCPVT-S, CPVTv2-S', 81.2, 43.0, 44.3),
    'pcpvt_base': ('PCPVT-B, CPVTv2-B', 82.7, 44.3, 44.9),
    'pcpvt_large': ('PCPVT-L, CPVTv2-L', 83.1, 45.1, 46.4),
    'svt_small': ('Twins-SVT-S', 81.7, 43.0, 43.2),
    'svt_base': ('Twins-SVT-B', 83.2, 45.3, 45.3),
    'svt_large': ('Twins-SVT-L', 83.7, 45.7, 46.7),
}


def model_table() -> str:
    """The table in Markdown: a row for each variant."""
    from cpvt_pyramid import ARCHS

    rows = [
        '| `arch` | published as | parameters | GFLOPs, 224 x 224 | GFLOPs, 800 x 1344 '
        '| ImageNet top-1 | RetinaNet 1x AP | Semantic FPN mIoU |',
        '|---|---|---|---|---|---|---|---|',
    ]
    for arch in ARCHS:
        parameters, *flops = (count_parameters(arch), *(count_flops(arch, *s) for s in SIZES))
        name, *results = PUBLISHED.get(arch, ('ours, for demo and tests', '', '', ''))
        cells = [f'`{arch}`', name, f'{parameters / 1e6:.1f}M']
        cells += [f'{f / 1e9:.1f}' for f in flops] + [str(result) for result in results]
        rows.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(rows) + '\n'


SIZES = ((224, 224), (800, 1344))


def count_parameters(arch: str) -> int:
    """Parameters of the backbone."""
    import torch

    from cpvt_pyramid import CPVTPyramid

    with torch.device('meta'):
        return sum(p.numel() for p in CPVTPyramid(arch).parameters())


def count_flops(arch: str, height: int, width: int) -> int:
    """Multiply-additions of a forward pass of one image, which papers call FLOPs."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from cpvt_pyramid import CPVTPyramid

    # The counter does not know the CPU's fused attention; the same as plain products it does.
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        with sdpa_kernel(SDPBackend.MATH):
            CPVTPyramid(arch)(torch.empty(1, 3, height, width))
    return counter.get_total_flops() // 2


def with_table(text: str) -> str:
    """The README's text with the table of today between its two marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + model_table() + END + rest.split(END)[1]


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog='model_table', description=__doc__)
    parser.add_argument('--write', action='store_true', help='put the table into README.md')
    if parser.parse_args(argv).write:
        README.write_text(with_table(README.read_text()))
    else:
        print(model_table(), end='')
    return 0


if __name__ == '__main__':
    sys.exit(main())
