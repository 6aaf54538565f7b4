"""What exportable detectors and segmentors share.

Shapes: B batch, H x W image in pixels.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

from torch import Tensor, nn

from .base import Exportable, Preprocessing

Stages = dict[str, Tensor]  # by name, see `Exportable.stages`


class WholeModel(Exportable):
    """A model with a backbone, perhaps a neck, and heads, which take padding for image."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__(preprocessing)
        self.model: Any = model
        self.neck: Optional[nn.Module] = getattr(model, 'neck', None)
        self.canvas: Optional[tuple[int, int]] = None  # to which `reference` pads images

    def maps(self, x: Tensor, valid: Optional[Tensor]) -> tuple[Sequence[Tensor], Stages]:
        """The maps of the neck, or else of the backbone, and the first stages, of what `preprocess`
        returns."""
        maps = self.model.backbone(x, valid)
        stages = {f'map_{i}': x for i, x in enumerate(maps)}
        if self.neck is not None:
            maps = self.neck(maps)
        return maps, stages

    @contextmanager
    def on_canvas(self, size: tuple[int, int]) -> Iterator[None]:
        """See the base class."""
        try:
            self.canvas = size
            yield
        finally:
            self.canvas = None
