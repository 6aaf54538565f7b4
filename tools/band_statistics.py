#!/usr/bin/env python
"""Print mean and standard deviation of the bands of images.

    python tools/band_statistics.py data/bands/scenes/train

They are for a config's data preprocessor. Pixels without data do not count. Of large images, pixels
in even distances are read.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
from cpvt_pyramid.tooling.command import UserError, run_command


def print_band_statistics(inputs: Sequence[str], bands: Sequence[int] = ()) -> None:
    """Print mean and standard deviation of the bands of images.

    Args:
        inputs (IMAGE): images, folders of them, or quoted patterns such as 'scenes/**/*.tif'.
        bands (N): numbers of the bands, from 1; by default all.
    """
    from tqdm import tqdm

    from cpvt_pyramid.runner.inference.raster import band_statistics
    from cpvt_pyramid.tooling.inputs import find_inputs

    paths = list(find_inputs(inputs))
    try:
        found = band_statistics(tqdm(paths, unit='image', disable=None), bands or None)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    print(f'# {len(paths)} images')
    for name, values in found.items():
        print(f'{name} = {list(values)}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(print_band_statistics, argv)


if __name__ == '__main__':
    sys.exit(main())
