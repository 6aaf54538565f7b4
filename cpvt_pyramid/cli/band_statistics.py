"""Print mean and standard deviation of the bands of images.

    cpvt band-statistics data/bands/scenes/train

They are for a config's data preprocessor. Pixels without data do not count. Of large images, pixels
in even distances are read.
"""

from collections.abc import Sequence
from typing import Optional

from ..tooling.command import UserError, run_command


def band_statistics(inputs: Sequence[str], *, bands: Sequence[int] = ()) -> None:
    """Print mean and standard deviation of the bands of images.

    Args:
        inputs: images, folders of them, or quoted patterns such as 'scenes/**/*.tif'.
        bands: numbers of the bands, from 1; by default all.
    """
    from tqdm import tqdm

    from ..predict.openmmlab import rasters
    from ..tooling.inputs import find_inputs

    paths = list(find_inputs(inputs))
    try:
        found = rasters.band_statistics(tqdm(paths, unit='image', disable=None), bands or None)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    print(f'# {len(paths)} images')
    for name, values in found.items():
        print(f'{name} = {list(values)}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(band_statistics, argv)
