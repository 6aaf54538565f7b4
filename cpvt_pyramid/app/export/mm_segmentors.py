"""Semantic segmentors of MMSegmentation.

Shapes: H x W image in pixels.
"""

from typing import Any, Optional

from torch import Tensor

from ..tooling.command import UserError
from .mm_model import original_result, preprocessing_of
from .segmentors import PixelClassifier, Segmentor


class EncoderDecoder(Segmentor):
    """A segmentor whose head returns logits."""

    def __init__(self, model: Any, probabilities: bool = False) -> None:
        check_whole(model)
        head = model.decode_head
        threshold = head.threshold if head.out_channels == 1 else None
        preprocessing = preprocessing_of(model)
        super().__init__(model, preprocessing, probabilities, head.align_corners, threshold)

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        return original_pixels(self, image, original)


def check_whole(model: Any) -> None:
    """Raise a UserError if a segmentor divides images, or pads them to one size."""
    if model.test_cfg.get('mode', 'whole') != 'whole':
        raise UserError('a segmentor is exported for whole images; set test_cfg.mode=whole')
    if (model.data_preprocessor.test_cfg or {}).get('size'):
        raise UserError(
            'data_preprocessor.test_cfg pads images to one size, which is not exported; set '
            'size_divisor instead of size, or set it to None'
        )


def original_pixels(
    graph: PixelClassifier, image: Tensor, original: Optional[Tensor]
) -> dict[str, Tensor]:
    """What MMSegmentation returns for an image; see `Exportable.reference`."""
    found = original_result(graph, image, original)
    if 'labels' in graph.output_names:
        return {'labels': found.pred_sem_seg.data}
    return {'probabilities': graph.probabilities(found.seg_logits.data[None])}
