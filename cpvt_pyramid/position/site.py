"""Where a position encoding acts: what it is built for."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple, Union

from ..padding.batching import ceil_div


class Site(NamedTuple):
    """A stage of a model, as an encoding sees it.

    Attributes:
        dim: channels of the tokens.
        heads: attention heads.
        image_size: height and width, in pixels, of the images that a table is for.
        stride: pixels from one token to the next.
        attentions: the classes of the attention of its blocks; see the attributes of `Attention`.
        drop_border: the last rows and columns have no key if they do not fill a patch.
        mode: of the interpolation of tables.
    """

    dim: int
    heads: int
    image_size: tuple[int, int]
    stride: int
    attentions: tuple[Any, ...]
    drop_border: bool = False
    mode: str = 'bilinear'

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.dim // self.heads

    @property
    def map_size(self) -> tuple[int, int]:
        """Height and width of the map of images of `image_size`, in tokens."""
        height, width = self.image_size
        return ceil_div(height, self.stride), ceil_div(width, self.stride)

    def all_attentions(self, attribute: str) -> bool:
        """True if an attribute of all attentions is true."""
        return all(getattr(attention, attribute) for attention in self.attentions)


def check_image_size(image_size: Union[int, Sequence[int]]) -> tuple[int, int]:
    """Height and width of images, in pixels, from a side or both.

    Raises:
        ValueError: it is neither.
    """
    sides = image_size if isinstance(image_size, (list, tuple)) else (image_size, image_size)
    if len(sides) != 2 or not all(isinstance(side, Integral) and int(side) > 0 for side in sides):
        raise ValueError(
            f'pretrain_img_size (img_size in timm) must be a side in pixels, or a height and a '
            f'width, got {image_size!r}'
        )
    return int(sides[0]), int(sides[1])
