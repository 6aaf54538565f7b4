"""The bare backbones and the columnar classifier. They need torch alone."""

from typing import Optional

from torch import Tensor, nn

from ..columnar import crop
from ..ops import ceil_div
from .base import Batch, Exportable, Preprocessing


class BackboneGraph(Exportable):
    """The maps (B, C, ceil(H / stride), ceil(W / stride)) of a `CPVTPyramid` or a `DenseCPVT`, zero
    in the padding."""

    task = 'features'

    def __init__(self, backbone: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.backbone = backbone
        self.output_names = tuple(f'map_{i}' for i in range(len(backbone.strides)))

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        x, valid = self.preprocess(batch)
        maps = self.backbone(x, valid)
        if valid is not None:  # then the graph has padded the images
            height, width = batch.images.shape[2:]
            maps = [
                crop(x.permute(0, 2, 3, 1), ceil_div(height, s), ceil_div(width, s)).movedim(3, 1)
                for x, s in zip(maps, self.backbone.strides)
            ]
        return dict(zip(self.output_names, maps))

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        return dict(zip(self.output_names, self.backbone(self.normalize(image))))


class ClassifierGraph(Exportable):
    """The logits (B, classes) of the columnar model, a `CPVT`."""

    task = 'classification'
    output_names = ('logits',)

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.model = model

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        return {'logits': self.model(*self.preprocess(batch))}

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        return {'logits': self.model(self.normalize(image))}
