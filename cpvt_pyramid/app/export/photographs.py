"""Photographs that a user names for a comparison."""

from collections.abc import Sequence

import numpy as np

from ..images.inputs import find_images
from ..images.reading import load_image
from ..predict.result_files import is_result
from ..tooling.command import UserError, one_line

PHOTOGRAPHS = 8  # in a comparison, at most


def given_photographs(inputs: Sequence[str]) -> list[np.ndarray]:
    """The first images that a user names, (H, W, 3) RGB."""
    images = []
    for path in find_images(inputs, '--images', is_result)[:PHOTOGRAPHS]:
        try:
            images.append(load_image(path))
        except OSError as error:
            raise UserError(f'--images {path}: {one_line(error)}') from error
    return images
