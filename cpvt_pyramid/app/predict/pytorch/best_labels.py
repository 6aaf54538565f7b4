"""Label maps, one class at a time.

MMSegmentation resizes the scores of all classes to the size of the batch, and again to that of the
image: 7 GB for 150 classes and 12 megapixels. Here each class that can be the best somewhere is
resized alone, and compared with the best before it. Labels are bit-identical.

Shapes: K classes, h x w scores, H x W image.
"""

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from .possible_classes import possible_classes

Resize = Callable[[Tensor], Tensor]

upsample = torch.ops.aten.upsample_bilinear2d.out  # that of F.interpolate


def best_labels(scores: Tensor, to_batch_size: Resize, meta: dict, align_corners: bool) -> Tensor:
    """The labels (1, H, W), int16, of an image with scores (1, K, h, w)."""
    size = torch.Size(meta['ori_shape'])
    in_batch = to_batch_size(scores[:, :1]).shape[2:]
    grows = all(a >= b for a, b in zip(in_batch, scores.shape[2:]))
    classes = list(range(scores.shape[1]))
    if grows:  # a class that is the best nowhere is not so after resizing
        classes = possible_classes(scores)[0].nonzero()[:, 0].tolist()
    left, right, top, bottom = meta.get('img_padding_size', meta.get('padding_size', [0] * 4))
    resized = scores.new_empty(1, 1, *size)  # fresh memory would take longer than resizing
    labels = torch.full((1, *size), classes[0], dtype=torch.int16)
    best: Optional[Tensor] = None
    for k in classes:
        x = to_batch_size(scores[:, k : k + 1])
        x = x[..., top : x.shape[2] - bottom, left : x.shape[3] - right]
        if meta.get('flip'):
            x = x.flip(3 if meta['flip_direction'] == 'horizontal' else 2)
        if x.shape[2:] != size:
            x = upsample(x, size, align_corners, None, None, out=resized)
        if best is None:
            best = x[0].clone()
        else:
            labels.masked_fill_(x[0] > best, k)
            torch.maximum(best, x[0], out=best)
    return labels
