"""The data preprocessor for MMDetection, and a DINO whose boxes do not depend on the batch."""

from functools import partial
from typing import Any

import torch
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.models.detectors import DINO
from mmdet.models.layers.transformer.utils import coordinate_to_encoding
from mmengine.registry import MODELS
from torch import nn

from . import bands  # noqa: F401 (it registers transforms)
from .valid_region import AppendsValidity


@MODELS.register_module()
class ValidRegionDetDataPreprocessor(AppendsValidity, DetDataPreprocessor):
    """mmdet's DetDataPreprocessor, which appends the validity channel to padded batches."""


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
