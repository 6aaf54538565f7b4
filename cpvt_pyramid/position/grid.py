"""The map that tokens form."""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..padding.mask import key_mask, subsample


class Grid(NamedTuple):
    """The map that tokens form: the queries of an attention."""

    height: int
    width: int
    mask: Optional[Tensor] = None  # (B, H, W, 1), see `padding.mask`
    class_tokens: int = 0  # 0 or 1, before the map's tokens

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split tokens (B, T, C) into the class token (B, 0 or 1, C) and the map (B, H, W, C)."""
        first, x = x.split([self.class_tokens, self.height * self.width], dim=1)
        return first, x.unflatten(1, (self.height, self.width))

    def encode(self, position: nn.Module, x: Tensor) -> Tensor:
        """Apply a position encoding to the map's tokens and not to the class token."""
        first, x = self.split(x)
        x = position(x, self.mask).flatten(1, 2)
        return torch.cat([first, x], dim=1) if self.class_tokens else x

    def keys(self, step: int = 1) -> Optional[Tensor]:
        """(B, 1, 1, M), True where a key may be attended to; None: everywhere.

        There is a key for the class token, and one for each `step` x `step` tokens of the map.
        """
        cells = subsample(self.mask, step)
        if cells is None:
            return None
        return key_mask(F.pad(cells.flatten(1), (self.class_tokens, 0), value=True))

    def centers(self, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (H',) and columns (W',) of the centers of `step` x `step` cells, in tokens.

        They are on the device of `like`, in its dtype or float32 if that is more precise.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        rows = torch.arange(ops.ceil_div(self.height, step), device=like.device, dtype=dtype)
        columns = torch.arange(ops.ceil_div(self.width, step), device=like.device, dtype=dtype)
        offset = (step - 1) / 2
        return rows * step + offset, columns * step + offset
