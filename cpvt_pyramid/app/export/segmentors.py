"""Semantic segmentors with a backbone, perhaps a neck, and a head that classifies cells of a map.

Shapes: B batch, H x W image in pixels.
"""

import copy
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...columnar import crop
from .base import Batch, Preprocessing, full_sizes
from .labels import resized_labels
from .resizing import AdaptiveAvgPool2d, Length, resample, resize_weights
from .whole_model import WholeModel


class PixelClassifier(WholeModel):
    """What the segmentors share: their result is the class of each pixel, or with `probabilities`
    those of all classes, (B, classes, H, W).

    As in MMSegmentation, scores are resized to the original image before the best class is taken.
    """

    task = 'segmentation'

    def __init__(self, model: nn.Module, preprocessing: Preprocessing, probabilities: bool) -> None:
        super().__init__(model, preprocessing)
        self.output_names = ('probabilities',) if probabilities else ('labels',)
        self.takes_original = not probabilities

    def resizing(
        self, batch: Batch, padded: Sequence[Length], align_corners: bool = False
    ) -> list[Tensor]:
        """Weights (B, h, H') and (B, w, W') that resize each image to its original size. H' and W'
        are those of the batch with its padding."""
        original = batch.sizes if batch.original is None else batch.original
        return [
            resize_weights(old, length, new, new.max().item(), align_corners)
            for old, length, new in zip(batch.sizes.unbind(1), padded, original.unbind(1))
        ]

    def without_padding(self, x: Tensor, images: Tensor) -> Tensor:
        """The part of a map (B, C, H', W') that has the size of the images (B, 3, H, W)."""
        if self.preprocessing.divisor == 1:
            return x
        return crop(x.permute(0, 2, 3, 1), *images.shape[2:]).permute(0, 3, 1, 2)

    def probabilities(self, scores: Tensor) -> Tensor:
        """(B, classes, H, W) of what the original model returns for each pixel."""
        raise NotImplementedError


class Segmentor(PixelClassifier):
    """The class of each pixel; those of the padding mean nothing.

    Args:
        model: with `backbone`, perhaps `neck`, and `decode_head`, which returns logits
            (B, classes, h, w).
        preprocessing: see there.
        probabilities: return those of all classes instead of labels.
        align_corners: of the resizing of logits.
        threshold: of the second of two classes, if the model has one logit for both; else None.
    """

    def __init__(
        self,
        model: Any,
        preprocessing: Preprocessing,
        probabilities: bool,
        align_corners: bool = False,
        threshold: Optional[float] = None,
    ) -> None:
        super().__init__(model, preprocessing, probabilities)
        self.head = for_any_size(model.decode_head)
        self.neck = None if self.neck is None else for_any_size(self.neck)
        self.align_corners = align_corners
        self.threshold = threshold
        self.details['resized'] = 'logits'
        if threshold is not None:
            self.details['threshold'] = threshold

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        x, valid = self.preprocess(batch)
        maps, stages = self.maps(x, valid)
        logits = stages['logits_0'] = self.head(maps)
        size = x.shape[2:]
        if not self.takes_original:
            scores = F.interpolate(logits, size, None, 'bilinear', self.align_corners)
            scores = self.without_padding(scores, batch.images)
            if self.threshold is not None:  # as mmseg returns those of a single class
                scores = scores.sigmoid()
            return stages | {'probabilities': self.probabilities(scores)}
        rows, columns = self.weights(logits, batch, size)
        if self.threshold is None:
            return stages | {'labels': resized_labels(logits, rows, columns)}
        scores = resample(rows, logits, columns)[:, 0].sigmoid()
        return stages | {'labels': (scores > self.threshold).to(torch.uint8)}

    def weights(self, logits: Tensor, batch: Batch, padded: Sequence[Length]) -> list[Tensor]:
        """Weights (B, h, H) and (B, w, W) of both resizings: from the logits to the padded image,
        and from that to the original image."""
        corners = self.align_corners
        # The sizes are those of the batch: one image stands for all.
        old_sides = full_sizes(logits[:1]).unbind(1)
        new_sides = [torch.full_like(old, new) for old, new in zip(old_sides, padded)]
        axes = zip(old_sides, logits.shape[2:], new_sides, padded)
        first = [resize_weights(*axis, corners) for axis in axes]
        second = self.resizing(batch, padded, corners)
        return [b @ a for a, b in zip(first, second)]

    def probabilities(self, scores: Tensor) -> Tensor:
        if self.threshold is None:
            return scores.softmax(1)
        return torch.cat([1 - scores, scores], dim=1)


def for_any_size(module: nn.Module) -> nn.Module:
    """A copy whose layers have no constants in graphs that come from the size of the example."""
    result = copy.deepcopy(module)
    child: Any
    for parent in list(result.modules()):
        for name, child in parent.named_children():
            enlarges = type(child).__name__ == 'Upsample'  # mmseg's, or PyTorch's, which stays
            if enlarges and not child.size:  # by a factor
                options = child.scale_factor, child.mode, child.align_corners
                setattr(parent, name, nn.Upsample(None, *options))
            elif isinstance(child, nn.AdaptiveAvgPool2d):
                size = child.output_size
                parts = size if isinstance(size, tuple) else (size, size)
                setattr(parent, name, AdaptiveAvgPool2d(*parts))
    return result
