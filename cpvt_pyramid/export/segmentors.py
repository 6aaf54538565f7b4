"""Semantic segmentors of MMSegmentation.

Shapes: B batch, H x W image in pixels.
"""

import copy
from typing import Optional

import torch
import torch.nn.functional as F
from mmseg.models.utils import Upsample
from torch import Tensor, nn

from ..masked_map import as_plain
from ..regions import extent_of, resample, resize_weights
from ..tooling.command import UserError
from .base import Batch, full_sizes
from .labels import resized_labels
from .mm_model import MMModel


class PixelClassifier(MMModel):
    """What the segmentors share: their result is the class of each pixel, or with `probabilities`
    those of all classes, (B, classes, H, W).

    As in MMSegmentation, scores are resized to the original image before the best class is taken.
    """

    task = 'segmentation'

    def __init__(self, model: nn.Module, probabilities: bool) -> None:
        if model.test_cfg.get('mode', 'whole') != 'whole':
            raise UserError('a segmentor is exported for whole images; set test_cfg.mode=whole')
        super().__init__(model)
        self.output_names = ('probabilities',) if probabilities else ('labels',)
        self.takes_original = not probabilities

    def resizing(self, batch: Batch, align_corners: bool = False) -> list[Tensor]:
        """Weights (B, h, H) and (B, w, W) that resize each image to its original size."""
        sizes, lengths = batch.sizes, batch.images.shape[2:]
        original = sizes if batch.original is None else batch.original
        return [
            resize_weights(old, length, new, new.max().item(), align_corners=align_corners)
            for old, length, new in zip(sizes.unbind(1), lengths, original.unbind(1))
        ]

    def probabilities(self, scores: Tensor) -> Tensor:
        """(B, classes, H, W) of what mm returns for each pixel."""
        raise NotImplementedError

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        found = self.test(image, original)
        if 'labels' in self.output_names:
            return {'labels': found.pred_sem_seg.data}
        return {'probabilities': self.probabilities(found.seg_logits.data[None])}


class Segmentor(PixelClassifier):
    """The class of each pixel; those of the padding mean nothing."""

    def __init__(self, model: nn.Module, probabilities: bool = False) -> None:
        if model.data_preprocessor.test_cfg:
            raise UserError(
                'data_preprocessor.test_cfg pads images, which is not exported; set it to None'
            )
        super().__init__(model, probabilities)
        self.head = copy.deepcopy(model.decode_head)
        for parent in list(self.head.modules()):
            for name, child in parent.named_children():
                # mmseg's Upsample makes a constant of the size.
                if isinstance(child, Upsample) and not child.size:
                    options = child.scale_factor, child.mode, child.align_corners
                    setattr(parent, name, nn.Upsample(None, *options))
        self.details['resized'] = 'logits'
        if self.head.out_channels == 1:
            self.details['threshold'] = self.head.threshold

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        maps, context, stages = self.maps(batch)
        corners, size = self.head.align_corners, batch.images.shape[2:]
        with context:
            logits = stages['logits_0'] = self.head(maps)
            if not self.takes_original:
                scores = F.interpolate(logits.float(), size, None, 'bilinear', corners)
                if self.head.out_channels == 1:  # as mmseg returns those of a single class
                    scores = scores.sigmoid()
                return stages | {'probabilities': self.probabilities(scores)}
        extent = extent_of(logits)
        weights = [  # of both resizings: to the pixels of the batch, and to the original image
            last @ resize_weights(old, length, new, new_length, align_corners=corners)
            for last, old, length, new, new_length in zip(
                self.resizing(batch, corners),
                extent.sides if extent else full_sizes(logits).unbind(1),
                logits.shape[2:],
                batch.sizes.unbind(1),
                size,
            )
        ]
        scores = as_plain(logits).float()
        if self.head.out_channels > 1:
            return stages | {'labels': resized_labels(scores, *weights)}
        scores = resample(weights[0], scores, weights[1])[:, 0].sigmoid()
        return stages | {'labels': (scores > self.head.threshold).to(torch.uint8)}

    def probabilities(self, scores: Tensor) -> Tensor:
        if self.head.out_channels > 1:
            return scores.softmax(1)
        return torch.cat([1 - scores, scores], dim=1)
