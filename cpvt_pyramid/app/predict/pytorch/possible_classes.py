"""Classes that cannot be the best of any pixel of a label map, which need not be resized."""

import torch
import torch.nn.functional as F
from torch import Tensor


def possible_classes(scores: Tensor) -> Tensor:
    """Booleans (B, K), False where a class is the best of no pixel after scores (B, K, h, w) go
    through one or two bilinear resizings, of which the first one of two enlarges.

    A pixel then mixes cells of a window of 3 x 3. In it, the best class of its center has at least
    the lowest of its own scores, and no class more than the highest.

    There is neither padding nor slicing, as would be natural: in a graph of a dynamic size OpenVINO
    leaves out the slice that begins at the first cell, and refuses the sizes.
    """
    height, width = scores.shape[2:]
    rows = torch.arange(height, device=scores.device)[:, None]
    columns = torch.arange(width, device=scores.device)
    best = scores.argmax(1)  # (B, h, w)
    flat = scores.flatten(1)
    lowest = torch.full_like(scores[:, 0], torch.inf)
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            # Beyond the border it is the cell at the border, which is in the window, too.
            row = (rows + down).clamp(0, height - 1)
            column = (columns + right).clamp(0, width - 1)
            place = best * (height * width) + row * width + column
            its_score = flat.gather(1, place.flatten(1)).view_as(best)
            lowest = torch.minimum(lowest, its_score)
    rounding = 100 * torch.finfo(scores.dtype).eps * scores.abs().max()
    enough = -F.max_pool2d(-lowest[:, None], 3, 1, 1) - rounding  # for all windows with the cell
    return (~(scores < enough)).flatten(2).any(2)  # NaN leaves all
