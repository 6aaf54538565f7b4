"""The sizes of images that commands take: `--size SIDE` or `--size HEIGHTxWIDTH`."""

import re
from argparse import ArgumentTypeError
from typing import NamedTuple


class Size(NamedTuple):
    """Height and width of an image in pixels.

    Examples:
        >>> parse_size('800x1344')
        Size(height=800, width=1344)
        >>> parse_size('640')
        Size(height=640, width=640)
    """

    height: int
    width: int

    def __str__(self) -> str:
        return f'{self.height}x{self.width}'


SYNTAX = 'SIDE|HEIGHTxWIDTH'  # in --help


def parse_size(text: str) -> Size:
    """The size that an option gives.

    Raises:
        ArgumentTypeError: it has another form, or a side of 0.
    """
    match = re.fullmatch(r'([1-9][0-9]{0,8})(?:x([1-9][0-9]{0,8}))?', text)
    if not match:
        raise ArgumentTypeError(
            f'must be SIDE or HEIGHTxWIDTH in pixels, such as 640 or 800x1344, got {text}'
        )
    return Size(int(match[1]), int(match[2] or match[1]))
