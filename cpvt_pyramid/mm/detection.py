"""The data preprocessor for MMDetection, and RoI extractors and a DINO whose results for an image
do not depend on the batch."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.models.detectors import DINO
from mmdet.models.layers.transformer.utils import coordinate_to_encoding
from mmdet.models.roi_heads.roi_extractors import GenericRoIExtractor, SingleRoIExtractor
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..masked_map import split_images
from . import bands  # noqa: F401 (it registers transforms)
from .valid_region import AppendsValidity


@MODELS.register_module()
class ValidRegionDetDataPreprocessor(AppendsValidity, DetDataPreprocessor):
    """mmdet's DetDataPreprocessor, which appends the validity channel to padded batches."""


class ReadsEachImage:
    """Mixin, listed before an RoI extractor class: the RoIs of an image read it without padding."""

    def forward(
        self, feats: Sequence[Tensor], rois: Tensor, roi_scale_factor: Optional[float] = None
    ) -> Tensor:
        images = split_images(feats)
        if images is None:
            return super().forward(feats, rois, roi_scale_factor)
        found, order = [], []
        for i, levels in enumerate(images):
            index = (rois[:, 0] == i).nonzero()[:, 0]
            boxes = F.pad(rois[index, 1:], (1, 0))  # of image 0
            found.append(super().forward(levels, boxes, roi_scale_factor))
            order.append(index)
        return torch.cat(found)[torch.cat(order).argsort()]


@MODELS.register_module()
class ValidRegionSingleRoIExtractor(ReadsEachImage, SingleRoIExtractor):
    """mmdet's SingleRoIExtractor, whose RoIs read nothing of the padding of a batch."""


@MODELS.register_module()
class ValidRegionGenericRoIExtractor(ReadsEachImage, GenericRoIExtractor):
    """mmdet's GenericRoIExtractor, whose RoIs read nothing of the padding of a batch."""


@MODELS.register_module()
class ValidRegionDINO(DINO):
    """mmdet's DINO, whose queries encode their boxes relative to the image, not to the batch.

    mmdet (like DINO's authors) scales the boxes to the padded size of the first level before it
    encodes them as positions of the queries, so that a query changes with the padding. Parameters
    are those of DINO. Without padding the two are equal.

    One dependence on the batch is left: in both, tokens of padding may become queries. They all
    have the same score, which training makes low.
    """

    def _init_layers(self) -> None:
        super()._init_layers()
        for layer in self.decoder.layers:
            hook = partial(encode_unscaled_boxes, self.decoder.ref_point_head)
            layer.register_forward_pre_hook(hook, with_kwargs=True)


def encode_unscaled_boxes(
    ref_point_head: nn.Module, layer: nn.Module, args: tuple, options: dict[str, Any]
) -> tuple[tuple, dict]:
    """Replace a decoder layer's `query_pos` by that of the boxes relative to the image."""
    ratios = options['valid_ratios'][:, :1]  # (B, 1, 2)
    boxes = options['reference_points'][:, :, 0] / torch.cat([ratios, ratios], dim=-1)
    # The original mmdet encodes a coordinate in half as many numbers as the fork.
    num_feats = ref_point_head.layers[0].in_features // 4
    encoding = coordinate_to_encoding(boxes, num_feats=num_feats)
    return args, options | {'query_pos': ref_point_head(encoding)}
