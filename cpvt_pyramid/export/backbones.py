"""The bare backbones and the columnar classifier. They need torch alone.

Shapes: B batch, H x W image in pixels, C channels.
"""

from typing import Optional

from torch import Tensor, nn

from ..columnar import crop
from ..ops import ceil_div
from .base import Exportable, Preprocessing


class BackboneGraph(Exportable):
    """The maps of a `CPVTPyramid` or a `DenseCPVT`, zero in the padding.

    Their shape is (B, C, ceil(H / stride), ceil(W / stride)).
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
            sizes = (
                [ceil_div(side, stride) for side in images.shape[2:]]
                for stride in self.backbone.strides
            )
            maps = [
                crop(x.permute(0, 2, 3, 1), *size).permute(0, 3, 1, 2)
                for x, size in zip(maps, sizes)
            ]
        return dict(zip(self.output_names, maps))

    def reference(self, image: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.output_names, self.backbone(self.normalize(image))))


class ClassifierGraph(Exportable):
    """The logits (B, classes) of the columnar model, a `CPVT`."""

    task = 'classification'
    output_names = ('logits',)

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.model = model

    def stages(self, images: Tensor, valid: Optional[Tensor]) -> dict[str, Tensor]:
        return {'logits': self.model(*self.preprocess(images, valid))}

    def reference(self, image: Tensor) -> dict[str, Tensor]:
        return {'logits': self.model(self.normalize(image))}
