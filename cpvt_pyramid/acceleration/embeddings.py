"""Patch embeddings, their convolution and layer norm as one function, in inference."""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..bfloat16 import is_captured
from ..model import OverlapPatchEmbed, PatchEmbed
from ..padding.batching import ceil_div
from ..recompute import drops_nothing
from .kernels import Linear, Norm, fast_embed_patches, has_products
from .norms import norm_of
from .ordinary import NotPlain, check_plain, fast_dtype, values
from .patches import PatchConv, settings_of

FEWEST_PATCHES = 64  # for fewer, to pack the weight takes longer than is gained


class FusedPatchEmbed(PatchEmbed):
    """A `PatchEmbed` that is one function in inference."""

    stands_for = PatchEmbed

    def forward(self, x: Tensor) -> Tensor:
        if type(self) is not FusedPatchEmbed:  # see `FAST`
            return PatchEmbed.forward(self, x)
        found = fast_embedded(self, x, k=self.size, border=0)
        return super().forward(x) if found is None else found


class FusedOverlapPatchEmbed(OverlapPatchEmbed):
    """The same of an `OverlapPatchEmbed`."""

    stands_for = OverlapPatchEmbed

    def forward(self, x: Tensor) -> Tensor:
        if type(self) is not FusedOverlapPatchEmbed:  # see `FAST`
            return OverlapPatchEmbed.forward(self, x)
        found = fast_embedded(self, x, k=2 * self.size - 1, border=self.size - 1)
        return super().forward(x) if found is None else found


def fast_embedded(embed: Any, x: Tensor, k: int, border: int) -> Optional[Tensor]:
    """The tokens of a map (B, H, W, C) by a patch embedding.

    Args:
        embed: the patch embedding.
        x: the map.
        k: side of a patch.
        border: how far the first patch begins before the map.

    Returns:
        The tokens. None: PyTorch's functions are to compute them.
    """
    if torch.is_grad_enabled() or is_captured() or x.is_nested or x.dim() != 4:
        return None
    if fast_dtype(x) != x.dtype or not has_products(x.dtype) or not drops_nothing(embed.drop):
        return None
    images, height, width, channels = x.shape
    if images * ceil_div(height, embed.size) * ceil_div(width, embed.size) < FEWEST_PATCHES:
        return None
    try:
        layer = linear_of_convolution(embed.proj, channels, k, embed.size, border, x.dtype)
        norm = optional_norm_of(embed.norm, len(layer.weight), x.dtype)
    except NotPlain:
        return None
    return fast_embed_patches(x, layer, norm, k, embed.size, border)


def linear_of_convolution(
    conv: Any, channels: int, k: int, step: int, border: int, dtype: torch.dtype
) -> Linear:
    """The linear layer of patches (C * k * k), in a dtype, that a convolution is, whose call does
    nothing but apply it.

    Raises:
        NotPlain: it is another layer.
    """
    check_plain(conv, nn.Conv2d, PatchConv)
    if settings_of(conv) != ((k, k), (step, step), (border, border), (1, 1), 1, 'zeros'):
        raise NotPlain
    weight = values(conv, 'weight', (conv.out_channels, channels, k, k), dtype)
    return Linear(weight.flatten(1), values(conv, 'bias', (conv.out_channels,), dtype))


def optional_norm_of(layer: nn.Module, channels: int, dtype: torch.dtype) -> Optional[Norm]:
    """The parameters of the layer norm after a convolution; None where there is none.

    Raises:
        NotPlain: it is another layer.
    """
    if type(layer) is nn.Identity:
        check_plain(layer, nn.Identity)
        return None
    return norm_of(layer, channels, dtype)
