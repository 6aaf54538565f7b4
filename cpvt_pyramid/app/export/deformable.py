"""Deformable attention over the maps of a batch, from the modules of mmcv and MMDetection.

mmcv's function takes the sizes of the maps as a tensor, from whose values a graph cannot build
maps. Here they are symbols, and reading at points is `grid_sample`.

Shapes: B batch, C channels, h x w map, N tokens of all maps, Q queries, L maps, P points, d
channels of a head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Levels:
    """Maps (B, C, h, w) of a padded image (B, 3, H', W') as one sequence of tokens, and which of
    them are image, from true heights and widths `valid`, (B, 2)."""

    def __init__(self, maps: Sequence[Tensor], image: Tensor, valid: Tensor) -> None:
        self.sizes = [x.shape[2:] for x in maps]
        # Booleans (B, h, w) of each map, True where a cell is not image.
        self.masks = [outside(size, image, valid) for size in self.sizes]
        # Width and height of each image in each map, (B, 2).
        self.sides = [
            torch.stack([(~mask[:, 0]).sum(1), (~mask[:, :, 0]).sum(1)], dim=1).float()
            for mask in self.masks
        ]
        self.outside = self.tokens(self.masks)

    def tokens(self, maps: Sequence[Tensor]) -> Tensor:
        """(B, N, ...) of (B, h, w, ...)."""
        return torch.cat([x.flatten(1, 2) for x in maps], dim=1)

    def split(self, x: Tensor) -> list[Tensor]:
        """(B, C, h, w) of each map, from tokens (B, N, C)."""
        parts = x.transpose(1, 2).split([h * w for h, w in self.sizes], dim=2)
        return [part.unflatten(2, size) for part, size in zip(parts, self.sizes)]

    def points(self) -> list[Tensor]:
        """(B, h, w, 2) of each map: x and y of the centres of the cells, as shares of the image."""
        result = []
        for (h, w), sides in zip(self.sizes, self.sides):
            x, y = (torch.arange(n, device=sides.device) + 0.5 for n in (w, h))
            grid = torch.stack([x.expand(h, w), y[:, None].expand(h, w)], dim=-1)
            result.append(grid / sides[:, None, None])
        return result

    def ratios(self) -> Tensor:
        """(B, L, 2), width and height of each image as shares of the padded batch."""
        result = []
        for (h, w), sides in zip(self.sizes, self.sides):
            width, height = sides.unbind(1)
            result.append(torch.stack([width / w, height / h], dim=1))
        return torch.stack(result, dim=1)


def outside(size: Sequence[int], image: Tensor, valid: Tensor) -> Tensor:
    """Booleans (B, h, w), True in the padding of a map of this height and width: MMDetection reads
    the mask of the pixels, (B, H', W'), at the nearest ones."""
    rows, columns = (
        torch.arange(length, device=valid.device) * pixels // length
        for length, pixels in zip(size, image.shape[2:])
    )
    height, width = valid[:, :1], valid[:, 1:]
    return (rows >= height)[:, :, None] | (columns >= width)[:, None]


def deformable_attention(
    module: nn.Module, x: Tensor, position: Tensor, value: Tensor, boxes: Tensor, levels: Levels
) -> Tensor:
    """What mmcv's `MultiScaleDeformableAttention` returns, (B, Q, C).

    Its arguments are the queries and their positions (B, Q, C), tokens (B, N, C), and boxes
    (B, Q, L, 2 or 4): centres as shares of the padded batch, and width and height.
    """
    heads, points = module.num_heads, module.num_points
    value = module.value_proj(value).masked_fill(levels.outside[..., None], 0)
    query = x + position
    offsets = module.sampling_offsets(query)
    offsets = offsets.unflatten(2, (heads, len(levels.sizes), points, 2))
    weights = module.attention_weights(query).unflatten(2, (heads, -1))
    weights = weights.softmax(-1).unflatten(3, (-1, points))  # (B, Q, heads, L, P)
    result = 0
    for i, ((h, w), of_level) in enumerate(zip(levels.sizes, levels.split(value))):
        center, offset = boxes[:, :, None, i, None, :2], offsets[:, :, :, i]
        if boxes.shape[-1] == 2:
            offset = torch.stack([offset[..., 0] / w, offset[..., 1] / h], dim=-1)
        else:
            offset = offset / points * boxes[:, :, None, i, None, 2:] * 0.5
        grid = 2 * (center + offset) - 1  # (B, Q, heads, P, 2)
        read = F.grid_sample(
            of_level.unflatten(1, (heads, -1)).flatten(0, 1),
            grid.transpose(1, 2).flatten(0, 1),
            align_corners=False,
        )  # (B * heads, d, Q, P)
        weight = weights[:, :, :, i].transpose(1, 2).flatten(0, 1)[:, None]
        result = result + (read * weight).sum(-1)
    result = result.unflatten(0, (-1, heads)).flatten(1, 2).transpose(1, 2)  # (B, Q, C)
    return module.output_proj(result) + x


def encode(
    encoder: nn.Module,
    maps: Sequence[Tensor],
    encoding: nn.Module,
    level_embedding: Tensor,
    levels: Levels,
) -> Tensor:
    """The tokens (B, N, C) that MMDetection's encoder makes of maps (B, C, h, w), with an encoding
    of positions, to which the embedding (L, C) of each map is added."""
    x = levels.tokens([x.permute(0, 2, 3, 1) for x in maps])
    positions = [
        encoding(mask).permute(0, 2, 3, 1) + embedding
        for mask, embedding in zip(levels.masks, level_embedding)
    ]
    position = levels.tokens(positions)
    points = levels.tokens(levels.points())[:, :, None] * levels.ratios()[:, None]
    for layer in encoder.layers:
        x = deformable_attention(layer.self_attn, x, position, x, points, levels)
        x = layer.norms[1](layer.ffn(layer.norms[0](x)))
    return x
