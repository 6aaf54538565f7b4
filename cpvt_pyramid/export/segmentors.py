"""Semantic segmentors of MMSegmentation.

Shapes: B batch, H x W image in pixels.
"""

import copy
from typing import Optional

import torch
import torch.nn.functional as F
from mmseg.models.utils import Upsample
from torch import Tensor, nn

from ..runner.inference.samples import data_sample
from ..tooling.command import UserError
from .base import Exportable
from .detectors import preprocessing_of
from .extent import EachImage


class Segmentor(Exportable):
    """The class of each pixel; those of the padding mean nothing.

    Args:
        model: an `EncoderDecoder` that is tested on whole images.
        probabilities: return those of all classes instead, (B, classes, H, W).
    """

    task = 'segmentation'

    def __init__(self, model: nn.Module, probabilities: bool = False) -> None:
        if model.test_cfg.get('mode', 'whole') != 'whole':
            raise UserError('a segmentor is exported for whole images; set test_cfg.mode=whole')
        if model.data_preprocessor.test_cfg:
            raise UserError(
                'data_preprocessor.test_cfg pads images, which is not exported; set it to None'
            )
        super().__init__(preprocessing_of(model))
        self.model = model
        self.head = copy.deepcopy(model.decode_head)
        replace_upsampling(self.head)
        self.details['resized'] = 'logits'
        if self.head.out_channels == 1:
            self.details['threshold'] = self.head.threshold
        self.output_names = ('probabilities',) if probabilities else ('labels',)

    def stages(self, images: Tensor, valid: Optional[Tensor]) -> dict[str, Tensor]:
        x, of_model = self.preprocess(images, valid)
        backbone = self.model.backbone
        maps = backbone(x, of_model)
        stages = {f'map_{i}': x for i, x in enumerate(maps)}
        with EachImage([images, *maps], of_model, [1, *backbone.strides]):
            logits = self.head(self.model.neck(maps) if self.model.with_neck else maps)
            stages['logits_0'] = logits
            logits = F.interpolate(
                logits.float(), images.shape[2:], None, 'bilinear', self.head.align_corners
            )
        outputs = {'labels': self.labels, 'probabilities': self.probabilities}
        return stages | {name: outputs[name](logits) for name in self.output_names}

    def labels(self, logits: Tensor) -> Tensor:
        """(B, H, W) of the logits (B, classes, H, W), or (B, 1, H, W) of two classes."""
        if self.head.out_channels == 1:
            labels = logits[:, 0].sigmoid() > self.head.threshold
        else:
            labels = logits.argmax(1)
        return labels.to(torch.uint8 if self.head.num_classes <= 256 else torch.int32)

    def probabilities(self, logits: Tensor) -> Tensor:
        """(B, classes, H, W)."""
        if self.head.out_channels > 1:
            return logits.softmax(1)
        second = logits.sigmoid()
        return torch.cat([1 - second, second], dim=1)

    def reference(self, image: Tensor) -> dict[str, Tensor]:
        blue_first = image[0].flip(0)  # as OpenCV reads images
        size = tuple(image.shape[2:])
        data = {'inputs': [blue_first], 'data_samples': [data_sample(True, size)]}
        found = self.model.test_step(data)[0]
        if 'labels' in self.output_names:
            return {'labels': found.pred_sem_seg.data}
        logits = found.seg_logits.data[None]
        if self.head.out_channels == 1:  # mmseg has applied the sigmoid
            return {'probabilities': torch.cat([1 - logits, logits], dim=1)}
        return {'probabilities': logits.softmax(1)}


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
