"""Semantic segmentors of MMSegmentation.

Shapes: B batch, H x W image in pixels.
"""

import copy
from typing import Optional

import torch
import torch.nn.functional as F
from mmseg.models.utils import Upsample
from torch import Tensor, nn

from ..tooling.command import UserError
from .base import Preprocessing
from .mm_model import MMModel


class PixelClassifier(MMModel):
    """What the segmentors share: their result is the class of each pixel.

    Args:
        model: an `EncoderDecoder` that is tested on whole images.
        probabilities: return those of all classes instead, (B, classes, H, W).
        preprocessing: of the images.
    """

    task = 'segmentation'

    def __init__(
        self, model: nn.Module, probabilities: bool, preprocessing: Optional[Preprocessing] = None
    ) -> None:
        if model.test_cfg.get('mode', 'whole') != 'whole':
            raise UserError('a segmentor is exported for whole images; set test_cfg.mode=whole')
        super().__init__(model, preprocessing)
        self.output_names = ('probabilities',) if probabilities else ('labels',)

    def labels(self, scores: Tensor) -> Tensor:
        """(B, H, W) of scores (B, classes, H, W)."""
        dtype = torch.uint8 if self.model.decode_head.num_classes <= 256 else torch.int32
        return scores.argmax(1).to(dtype)

    def probabilities(self, scores: Tensor) -> Tensor:
        """(B, classes, H, W) of what mm returns for each pixel."""
        raise NotImplementedError

    def reference(self, image: Tensor) -> dict[str, Tensor]:
        found = self.test(image)
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
        replace_upsampling(self.head)
        self.details['resized'] = 'logits'
        if self.head.out_channels == 1:
            self.details['threshold'] = self.head.threshold

    def stages(self, images: Tensor, valid: Optional[Tensor]) -> dict[str, Tensor]:
        maps, context, stages = self.maps(images, valid)
        with context:
            logits = stages['logits_0'] = self.head(maps)
            scores = F.interpolate(
                logits.float(), images.shape[2:], None, 'bilinear', self.head.align_corners
            )
        if self.head.out_channels == 1:  # mmseg applies the sigmoid to the scores of a single class
            scores = scores.sigmoid()
        return stages | {name: getattr(self, name)(scores) for name in self.output_names}

    def labels(self, scores: Tensor) -> Tensor:
        if self.head.out_channels > 1:
            return super().labels(scores)
        return (scores[:, 0] > self.head.threshold).to(torch.uint8)

    def probabilities(self, scores: Tensor) -> Tensor:
        if self.head.out_channels > 1:
            return scores.softmax(1)
        return torch.cat([1 - scores, scores], dim=1)


class Enlarge(nn.Module):
    """Bilinear enlargement by a whole factor.

    mmseg's `Upsample` multiplies by a float, which makes a constant of a size.
    """

    def __init__(self, factor: int, mode: str, align_corners: Optional[bool]) -> None:
        super().__init__()
        self.factor, self.mode, self.align_corners = factor, mode, align_corners

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, None, self.factor, self.mode, self.align_corners)


def replace_upsampling(head: nn.Module) -> None:
    """Replace the `Upsample`s in a head by `Enlarge`."""
    for parent in list(head.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Upsample) and not child.size:
                factor = int(child.scale_factor)
                if factor != child.scale_factor:
                    raise UserError(f'scale_factor={child.scale_factor} must be whole in exports')
                setattr(parent, name, Enlarge(factor, child.mode, child.align_corners))
