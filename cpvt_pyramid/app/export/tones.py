"""Images of different tones, so that a result that depends on a statistic of the whole batch shows.

Images that all reach from black to white have the same extremes. A model that divides by the
largest pixel of its batch, or quantizes by its range, then seems to treat each image by itself.
"""

import numpy as np

# The darkest and the lightest value of each channel, where a full range has 0 and 1. Between any
# two rows that follow each other, minimum, maximum, range, mean and deviation differ. The level of
# the flat image is halfway between two of 256 values.
FULL = ((0.0, 1.0),)
TONES: tuple[tuple[tuple[float, float], ...], ...] = (
    FULL,
    ((0.31, 0.43),),  # low contrast
    ((0.002, 0.06),),  # dark
    ((0.7, 0.99),),  # bright
    FULL,
    ((76.5 / 255, 76.5 / 255),),  # flat
    ((0.5, 1.0), (0.1, 0.4), (0.0, 0.1)),  # tinted
    FULL,
)


def toned(image: np.ndarray, number: int) -> np.ndarray:
    """The image (C, H, W) of values from 0 to 1 in the tone of its place in a batch."""
    tone = TONES[number % len(TONES)]
    ranges = np.array([tone[channel % len(tone)] for channel in range(len(image))])
    low, high = ranges.T[..., None, None]  # (C, 1, 1)
    return image * (high - low) + low
