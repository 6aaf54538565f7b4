"""The bare backbones and the columnar classifier. They need torch alone.

Shapes: B batch, H x W image in pixels, C channels.
"""

from typing import Optional

import torch
from torch import Tensor, nn

from ..ops import ceil_div
from .base import Exportable, Preprocessing


class Features(Exportable):
    """The maps of a backbone, (B, C, ceil(H / stride), ceil(W / stride)), zero in the padding.

    Args:
        backbone: a `CPVTPyramid` or a `DenseCPVT`.
        preprocessing: of the images.
    """

    task = 'features'

    def __init__(self, backbone: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.backbone = backbone
        self.output_names = tuple(f'map_{i}' for i in range(len(backbone.strides)))

    def stages(self, images: Tensor, valid: Optional[Tensor]) -> dict[str, Tensor]:
        x, valid = self.preprocess(images, valid)
        maps = self.backbone(x, valid)
        if valid is not None:  # then the graph has padded the images
            maps = [crop(x, images, stride) for x, stride in zip(maps, self.backbone.strides)]
        return dict(zip(self.output_names, maps))

    def reference(self, image: Tensor) -> dict[str, Tensor]:
        x = (image - self.mean) / self.std
        return dict(
            zip(self.output_names, self.backbone(x.flip(1) if self.preprocessing.bgr else x))
        )


class Classifier(Exportable):
    """The logits (B, classes) of the columnar model.

    Args:
        model: a `CPVT`.
        preprocessing: of the images.
    """

    task = 'classification'
    output_names = ('logits',)

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.model = model

    def stages(self, images: Tensor, valid: Optional[Tensor]) -> dict[str, Tensor]:
        return {'logits': self.model(*self.preprocess(images, valid))}

    def reference(self, image: Tensor) -> dict[str, Tensor]:
        return {'logits': self.model((image - self.mean) / self.std)}


def crop(x: Tensor, images: Tensor, stride: int) -> Tensor:
    """The top left of a map, as large as the map of these images at a stride.

    Not a slice: torch.export would specialize on whether there is something to crop.
    """
    rows, columns = (
        torch.arange(ceil_div(side, stride), device=x.device) for side in images.shape[2:]
    )
    return x.index_select(2, rows).index_select(3, columns)
