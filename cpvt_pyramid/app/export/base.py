"""What an exportable model is: a module from pixels to final results, of tensors alone.

Shapes: B batch, H x W image in pixels.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...padding.batching import ceil_div
from ...padding.mask import Padding


class Preprocessing(NamedTuple):
    """What happens to the pixels before the model. Mean and std are those of RGB."""

    mean: Sequence[float] = (123.675, 116.28, 103.53)
    std: Sequence[float] = (58.395, 57.12, 57.375)
    divisor: int = 1  # the model pads each image with zeros to a multiple of it
    bgr: bool = False  # the model takes blue first; the images are RGB
    marks_padding: bool = True  # the backbone is told the true sizes; else padding is image to it


class Settings(NamedTuple):
    """How a model is exported."""

    size: Optional[tuple[int, int]] = None  # fixed height and width of the images
    half: bool = False  # weights stored in float16, and computed with in float32
    has_valid: bool = True  # the graph is told the sizes of the images, if they may differ

    @property
    def dtype(self) -> str:
        return 'float16' if self.half else 'float32'


class Batch(NamedTuple):
    """The inputs of a graph: images that are padded at the right and bottom to one size.

    The sizes of the images, padded to multiples of the divisor, must be equal. Only backbones and
    classifiers take images of any sizes.
    """

    images: Tensor  # (B, 3, H, W) float32, RGB from 0 to 255
    valid: Optional[Tensor] = None  # (B, 2) int64, true heights and widths; None: no padding
    # (B, 2) int64, heights and widths before the images were resized, which label maps have; None:
    # no image was resized, or there are no label maps
    original: Optional[Tensor] = None

    @property
    def sizes(self) -> Tensor:
        """(B, 2), height and width of each image."""
        return full_sizes(self.images) if self.valid is None else self.valid


class Exportable(nn.Module):
    """A model as it is exported: `forward` is the graph.

    A subclass defines `stages` and `reference`, and sets `task`, `output_names` and `details`.
    docs/export.md describes the outputs. Nothing in `stages` may depend on the values of sizes
    in Python: they are symbols while the graph is captured.
    """

    task: str  # 'detection', 'instance', 'segmentation', 'features' or 'classification'
    output_names: tuple[str, ...]  # among those of the stages
    takes_original = False  # whether the graph has the input `original`
    takes_any_padding = False  # whether images of one batch may have any sizes
    mean: Tensor  # (1, C, 1, 1), as std
    std: Tensor

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.details: dict[str, Any] = {}  # further metadata, such as {'nms': {...}}
        for name in ('mean', 'std'):
            values = torch.tensor(getattr(preprocessing, name), dtype=torch.float32)
            self.register_buffer(name, values.view(1, -1, 1, 1), persistent=False)

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        """All that the verification compares, in the order of computation: 'map_0', ... of the
        backbone, 'logits_0', ... of the head, and what `output_names` lists."""
        raise NotImplementedError

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        """Some or all outputs for an image (1, 3, H, W) alone, computed by the original model, not
        by `stages`."""
        raise NotImplementedError

    def check(self, settings: Settings) -> None:
        """Raise a UserError if the model cannot be exported with these settings."""

    def on_canvas(self, size: tuple[int, int]) -> AbstractContextManager[None]:
        """A context in which `reference` pads images to a height and width, as in a batch with an
        image of that size; for models whose results depend on it."""
        return nullcontext()

    def forward(
        self, images: Tensor, valid: Optional[Tensor] = None, original: Optional[Tensor] = None
    ) -> tuple[Tensor, ...]:
        """The outputs, in the order of `output_names`; for the arguments, see `Batch`."""
        stages = self.stages(Batch(images, valid, original))
        return tuple(stages[name] for name in self.output_names)

    def input_shapes(self, settings: Settings) -> dict[str, list[Optional[int]]]:
        """The shape of each input of the graph, in their order; None for a dimension of any length.

        A graph is told the sizes of the images (`valid`) if they may differ within a batch.
        """
        is_fixed = settings.size is not None
        may_differ = is_fixed or self.takes_any_padding or self.preprocessing.divisor > 1
        shapes: dict[str, list[Optional[int]]] = {
            'images': [None, 3, *(settings.size or (None, None))]
        }
        if settings.has_valid and may_differ:
            shapes['valid'] = [None, 2]
        if self.takes_original:
            shapes['original'] = [None, 2]
        return shapes

    def returning_all_stages(self) -> 'Exportable':
        """The same model, whose outputs are all stages."""
        result = copy.copy(self)
        with torch.no_grad():
            result.output_names = tuple(self.stages(Batch(torch.zeros(1, 3, 64, 64))))
        return result

    def preprocess(self, batch: Batch) -> tuple[Tensor, Optional[Tensor]]:
        """Normalize, and pad with zeros to multiples of the divisor: (B, 3, H', W'), and the
        `valid` of the backbone, None where it takes all for image."""
        divisor, sides = self.preprocessing.divisor, batch.images.shape[2:]
        x = self.normalize(batch.images)
        # A side that is a symbol may need padding.
        fits = all(isinstance(side, int) and side % divisor == 0 for side in sides)
        if batch.valid is None and (divisor == 1 or fits):
            return x, None
        valid = batch.sizes
        outside = Padding.of_batch(x, valid).outside.movedim(3, 1)
        bottom, right = (ceil_div(side, divisor) * divisor - side for side in sides)
        x = F.pad(x.masked_fill(outside, 0), (0, right, 0, bottom))
        return x, valid if self.preprocessing.marks_padding else None

    def normalize(self, images: Tensor) -> Tensor:
        x = (images - self.mean) / self.std
        return x.flip(1) if self.preprocessing.bgr else x


def as_arguments(inputs: Mapping[str, Tensor]) -> tuple[Optional[Tensor], ...]:
    """The arguments of `Exportable.forward`, up to the last that is given."""
    arguments = [inputs.get(name) for name in ('images', 'valid', 'original')]
    while arguments[-1] is None:
        arguments.pop()
    return tuple(arguments)


def full_sizes(x: Tensor) -> Tensor:
    """(B, 2), height and width of a batch (B, C, H, W), once for each image."""
    sides = [torch.full_like(x[:, 0, 0, 0], n, dtype=torch.int64) for n in x.shape[2:]]
    return torch.stack(sides, dim=1)
