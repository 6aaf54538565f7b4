"""Make the weights that come with the package: distil EfficientNet-Lite0 into a small pyramid.

    python -m experiments.distillation --out pcpvt_nano.safetensors   # 40 minutes of two cores

The student learns the teacher's feature maps at four strides and its logits on random crops of
64 photographs, which have no labels. They are in packages that are installed, and in two that are
downloaded (150 MB), as is the teacher. It needs torch 2.9 (Muon).
cpvt_pyramid/weights/README.md has the results.
"""

import sys
from collections.abc import Sequence
from typing import Optional

from cpvt_pyramid.tooling.command import UserError, check_at_least, prepare_for_torch, run_command
from cpvt_pyramid.tooling.files import check_file

prepare_for_torch()  # before torch is imported


def distil(
    *,
    out: str,
    arch: str = 'pcpvt_nano',
    steps: int = 12000,
    batch: int = 16,
    side: int = 160,
    lr: float = 6e-3,
    seed: int = 0,
) -> None:
    """Train, and write the student's weights.

    Args:
        out: file of the weights to write, .safetensors
        arch: the student
        steps: optimizer steps
        batch: crops in a step
        side: of a crop, in pixels
        lr: the highest learning rate
        seed: of the student's first weights and of the crops
    """
    check_at_least('--steps', steps, 1)
    check_at_least('--batch', batch, 2)
    check_at_least('--side', side, 64)
    check_file(out)

    from cpvt_pyramid import ARCHS

    from .training import train

    if arch not in ARCHS:
        raise UserError(f'--arch must be one of {", ".join(ARCHS)}, got {arch}')
    train(out, arch, steps, batch, side, lr, seed)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(distil, argv)


if __name__ == '__main__':
    sys.exit(main())
