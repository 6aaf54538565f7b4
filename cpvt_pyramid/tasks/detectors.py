"""torchvision's detectors on the backbones of this package.

    model = retinanet('pcpvt_small', num_classes=10)
    losses = model(images, targets)  # as torchvision's own
    predictions = model.eval()(images)

torchvision pads images of different sizes to one batch, so that the boxes of an image depend on the
others of its batch. Here
  - evaluation runs batches of images of one padded size (`BySize`), so that each image's results
    are those that it has alone, whatever the head;
  - the backbone ignores padding, also in training (`ValidRegionTransform`): its maps are those of
    each image alone, and zero in the padding. FPN, heads and losses are torchvision's own;
  - anchors and RoIAlign get the strides, which torchvision guesses (`StrideAnchors`,
    `StrideRoIAlign`).

In autocast and with weights in half precision, backbone, FPN and the layers of heads before the
last compute in half precision. The layers that predict, anchors, boxes, RoIAlign and losses are in
float32 (`compute_boxes_in_float32`): bfloat16 has 8 bits, so that coordinates would move in steps
of 8 pixels at 1333, and many scores would be equal.

Shapes: B batch, C channels, H x W image in pixels, h x w map, N anchors.
"""

import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torchvision.models import detection
from torchvision.models.detection._utils import BoxCoder, BoxLinearCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.fcos import FCOSClassificationHead, FCOSRegressionHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.detection.retinanet import (
    RetinaNetClassificationHead,
    RetinaNetRegressionHead,
)
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign, clip_boxes_to_image, nms
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool
from torchvision.ops.poolers import LevelMapper

from ..bfloat16 import corrected
from ..padding.batching import map_in_batches
from ..padding.mask import split_validity
from ..versions import without_autocast
from .bodies import Backbone, Body, build_body, check_normalization


class BySize(nn.Module):
    """A detector that in evaluation runs the images in batches of one padded size.

    The padded size of an image depends on the image alone. Nothing else is padding, so that its
    results do not depend on the other images. In training, the images are one batch.
    """

    transform: GeneralizedRCNNTransform
    backbone: 'BackboneFPN'
    head: Any  # of RetinaNet and FCOS

    def forward(
        self, images: Sequence[Tensor], targets: Optional[Sequence[dict[str, Tensor]]] = None
    ) -> Any:
        """As of torchvision's detectors: losses in training, else the results of each image."""
        if self.training or torch.jit.is_tracing():  # a graph runs its images as one batch
            return super().forward(images, targets)
        return self.evaluate(super().forward, images, targets)

    @torch.compiler.disable(recursive=False)  # only the forward pass of a batch is compiled
    def evaluate(
        self,
        forward: Callable,
        images: Sequence[Tensor],
        targets: Optional[Sequence[dict[str, Tensor]]],
    ) -> list[dict[str, Tensor]]:
        """The results of each image, by a forward pass for each padded size."""

        def results(indices: list[int]) -> list[dict[str, Tensor]]:
            their_targets = None if targets is None else [targets[i] for i in indices]
            return forward([images[i] for i in indices], their_targets)

        sizes = [self.padded_size(image) for image in images]
        count = len(images)
        return list(map_in_batches(results, range(count), sizes.__getitem__, batch_size=count))

    @torch.compiler.disable
    def padded_size(self, image: Tensor) -> tuple[int, ...]:
        """Height and width of an image, resized and padded by the transform."""
        # The meta device computes sizes alone. Hooks of users are not called: this is no image.
        batch, _ = self.transform.forward([torch.empty_like(image, device='meta')])
        return tuple(batch.tensors.shape[-2:])


class RetinaNet(BySize, detection.RetinaNet):
    """torchvision's, in evaluation `BySize`."""


class MMDetectionRetinaNet(RetinaNet):
    """RetinaNet whose boxes are those of MMDetection's, for its trained models.

    torchvision's limits the growth of anchors alone, lets boxes of different classes be separated
    in two ways, and keeps empty boxes.
    """

    anchor_generator: 'StrideAnchors'
    box_coder: BoxCoder
    score_thresh: float
    nms_thresh: float
    topk_candidates: int
    detections_per_img: int

    def detect(self, batch: Tensor, sizes: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """The detections in pixels of a batch that the transform has normalized and padded; its
        images have these heights and widths."""
        maps = list(self.backbone(batch).values())
        outputs = self.head(maps)
        anchors = self.anchor_generator(ImageList(batch, sizes), maps)
        cells = [x.shape[2] * x.shape[3] for x in maps]
        per_cell = anchors[0].shape[0] // sum(cells)
        counts = [per_cell * count for count in cells]
        by_level = {name: list(x.split(counts, dim=1)) for name, x in outputs.items()}
        anchors_by_level = [list(x.split(counts)) for x in anchors]
        return self.postprocess_detections(by_level, anchors_by_level, sizes)

    def postprocess_detections(
        self,
        head_outputs: dict[str, list[Tensor]],
        anchors: list[list[Tensor]],
        image_shapes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """The detections of each image, from the outputs and anchors of each level."""
        found = []
        for i, size in enumerate(image_shapes):
            logits = [x[i] for x in head_outputs['cls_logits']]
            deltas = [x[i] for x in head_outputs['bbox_regression']]
            parts = [self.candidates(*level) for level in zip(logits, deltas, anchors[i])]
            boxes, scores, labels = (torch.cat(part) for part in zip(*parts))
            boxes = clip_boxes_to_image(boxes, size)
            used = (boxes[:, 2:] > boxes[:, :2]).all(1)
            boxes, scores, labels = boxes[used], scores[used], labels[used]
            keep = nms_by_label(boxes, scores, labels, self.nms_thresh)[: self.detections_per_img]
            found.append({'boxes': boxes[keep], 'scores': scores[keep], 'labels': labels[keep]})
        return found

    def candidates(
        self, logits: Tensor, deltas: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best boxes, scores and labels of a level, from N anchors."""
        scores = logits.sigmoid()  # (N, classes)
        anchor, label = (scores > self.score_thresh).nonzero(as_tuple=True)
        scores, order = scores[anchor, label].sort(descending=True)
        order = order[: self.topk_candidates]
        anchor, label = anchor[order], label[order]
        boxes = self.box_coder.decode_single(deltas[anchor], anchors[anchor])
        return boxes, scores[: self.topk_candidates], label

    def replace_classifiers(self, num_classes: int) -> None:
        """Give the model a new classifier, with the initial weights of RetinaNet (section 4.1)."""
        head = self.head.classification_head
        old = head.cls_logits
        count = head.num_anchors * num_classes
        new: Any = nn.Conv2d(old.in_channels, count, 3, padding=1).to(old.weight)
        nn.init.normal_(new.weight, std=0.01)
        nn.init.constant_(new.bias, -math.log(99))  # all scores are 0.01
        head.cls_logits = new
        head.num_classes = num_classes


def predict_in_float32(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of a layer, computed in float32, also in autocast and with weights in half
    precision; in float64 if these are."""
    weights = {}
    for name, parameter in layer.named_parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            weights[name] = parameter.float()
    with without_autocast(x.device.type):
        x = at_least_float32(x)
        return functional_call(layer, weights, (x,)) if weights else layer(x)


def hidden(layers: nn.Module, x: Tensor) -> Tensor:
    """The output of a head's layers before the last."""
    with corrected(x):
        return layers(x)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def by_anchor(maps: Sequence[Tensor], values: int) -> Tensor:
    """Join the predictions of all levels, (B, A * values, h, w) each, for A anchors of a cell.

    Returns:
        (B, N, values), in the order of `StrideAnchors`.
    """
    return torch.cat(
        [x.unflatten(1, (-1, values)).permute(0, 3, 4, 1, 2).flatten(1, 3) for x in maps], dim=1
    )


class ClassificationInFloat32(nn.Module):
    """Mixin, listed before a classification head: the last layer computes in float32."""

    conv: nn.Module
    cls_logits: nn.Module
    num_classes: int

    def forward(self, x: list[Tensor]) -> Tensor:
        """Scores (B, N, classes) of the maps of all levels."""
        return by_anchor(
            [predict_in_float32(self.cls_logits, hidden(self.conv, level)) for level in x],
            self.num_classes,
        )


class RetinaNetClassification(ClassificationInFloat32, RetinaNetClassificationHead):
    pass


class FCOSClassification(ClassificationInFloat32, FCOSClassificationHead):
    pass


class RetinaNetRegression(RetinaNetRegressionHead):
    """torchvision's, whose last layer computes in float32."""

    def forward(self, x: list[Tensor]) -> Tensor:
        return by_anchor(
            [predict_in_float32(self.bbox_reg, hidden(self.conv, level)) for level in x], 4
        )


class FCOSRegression(FCOSRegressionHead):
    """torchvision's, whose last layers compute in float32."""

    def forward(self, x: list[Tensor]) -> tuple[Tensor, Tensor]:
        maps = [hidden(self.conv, level) for level in x]
        distances = [predict_in_float32(self.bbox_reg, level).relu() for level in maps]
        centerness = [predict_in_float32(self.bbox_ctrness, level) for level in maps]
        return by_anchor(distances, 4), by_anchor(centerness, 1)


class RegionProposal(RPNHead):
    """torchvision's, whose last layers compute in float32."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        maps = [hidden(self.conv, level) for level in x]
        scores = [predict_in_float32(self.cls_logits, level) for level in maps]
        return scores, [predict_in_float32(self.bbox_pred, level) for level in maps]


class BoxPredictor(FastRCNNPredictor):
    """torchvision's, whose layers compute in float32."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(1)
        return predict_in_float32(self.cls_score, x), predict_in_float32(self.bbox_pred, x)


class MaskPredictor(MaskRCNNPredictor):
    """torchvision's, whose last layer computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        *layers, last = self
        for layer in layers:
            x = layer(x)
        return predict_in_float32(last, x)


class RegionHeads(RoIHeads):
    """torchvision's, which takes the predictions of any `box_predictor` in float32."""

    def postprocess_detections(
        self, class_logits: Tensor, box_regression: Tensor, *others: Any
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        class_logits = at_least_float32(class_logits)
        return super().postprocess_detections(
            class_logits, at_least_float32(box_regression), *others
        )


class Float32BoxCoder(BoxCoder):
    """torchvision's, which computes in float32."""

    def encode_single(self, reference_boxes: Tensor, proposals: Tensor) -> Tensor:
        reference_boxes = at_least_float32(reference_boxes)
        return super().encode_single(reference_boxes, at_least_float32(proposals))

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        return super().decode_single(at_least_float32(rel_codes), at_least_float32(boxes))


class Float32LinearCoder(BoxLinearCoder):
    """torchvision's, which computes in float32."""

    def encode(self, reference_boxes: Tensor, proposals: Tensor) -> Tensor:
        return super().encode(at_least_float32(reference_boxes), at_least_float32(proposals))

    def decode(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        return super().decode(at_least_float32(rel_codes), at_least_float32(boxes))


# The class that takes the place of a class of torchvision, of heads and of what codes boxes.
IN_FLOAT32: dict[type, type] = {
    RetinaNetClassificationHead: RetinaNetClassification,
    RetinaNetRegressionHead: RetinaNetRegression,
    FCOSClassificationHead: FCOSClassification,
    FCOSRegressionHead: FCOSRegression,
    RPNHead: RegionProposal,
    RoIHeads: RegionHeads,
    FastRCNNPredictor: BoxPredictor,
    MaskRCNNPredictor: MaskPredictor,
    BoxCoder: Float32BoxCoder,
    BoxLinearCoder: Float32LinearCoder,
}


def compute_boxes_in_float32(model: nn.Module) -> None:
    """Let a detector of torchvision predict and code boxes in float32, whatever the precision of
    its backbone. Parameters and their names stay."""
    for module in model.modules():
        for part in (module, vars(module).get('box_coder')):
            if type(part) in IN_FLOAT32:
                part.__class__ = IN_FLOAT32[type(part)]  # type: ignore[union-attr, assignment]


class ClampedBoxCoder(Float32BoxCoder):
    """torchvision's, which limits the shrinking of anchors as it does their growth."""

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        limit = self.bbox_xform_clip
        shifts, scales = rel_codes[:, :2], rel_codes[:, 2:]
        return super().decode_single(torch.cat([shifts, scales.clamp(-limit, limit)], 1), boxes)


def nms_by_label(boxes: Tensor, scores: Tensor, labels: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes that survive non-maximum suppression in their class, best first.

    As in mmcv, each class is moved to a place of its own. torchvision does so for few boxes only.
    """
    if not len(boxes):
        return labels
    places = labels.to(boxes.dtype) * (boxes.max() + 1)
    return nms(boxes + places[:, None], scores, iou_threshold)


class FCOS(BySize, detection.FCOS):
    """torchvision's, in evaluation `BySize`."""


class FasterRCNN(BySize, detection.FasterRCNN):
    """torchvision's, in evaluation `BySize`."""


class MaskRCNN(BySize, detection.MaskRCNN):
    """torchvision's, in evaluation `BySize`."""


def retinanet(
    backbone: Backbone = 'pcpvt_small',
    *,
    num_classes: int,
    out_channels: int = 256,
    extra_levels: int = 2,
    head_convs: int = 4,
    mmdetection: bool = False,
    **options: Any,
) -> RetinaNet:
    """RetinaNet, with the levels and anchors of `configs/retinanet_cpvt_s.py`.

    Args:
        backbone: see `Backbone`.
        num_classes: labels are 0 to num_classes - 1; there is none for background.
        out_channels: channels of FPN and head.
        extra_levels: levels after those of the backbone, which have strides 8, 16 and 32.
        head_convs: 3x3 convolutions, 1 to 4, before those that predict.
        mmdetection: follow MMDetection where torchvision differs, as `load_trained` does:
            in the limits of boxes and the order of their suppression, up to 100 boxes in an image,
            the sizes of resized images, and padding, which the backbone then does not ignore.
        **options: options of torchvision's `RetinaNet`, for example `min_size` and `max_size`.

    Examples:
        >>> model = retinanet('pcpvt_nano', num_classes=10, min_size=64, max_size=96).eval()
        >>> found = model([torch.rand(3, 64, 96), torch.rand(3, 80, 64)])
        >>> sorted(found[0])
        ['boxes', 'labels', 'scores']
    """
    if not 1 <= head_convs <= 4:
        raise ValueError(f'head_convs must be 1 to 4, got {head_convs}')
    sides = [4 * 2 ** (i / 3) for i in range(3)]
    parts = one_stage_parts(backbone, out_channels, extra_levels, sides)
    if mmdetection:
        parts['detections_per_img'] = 100
        model = assemble(MMDetectionRetinaNet, num_classes, parts | options, MMDetectionTransform)
        model.box_coder = ClampedBoxCoder((1.0, 1.0, 1.0, 1.0))
    else:
        model = assemble(RetinaNet, num_classes, parts | options)
    for branch in (model.head.classification_head, model.head.regression_head):
        branch.conv = branch.conv[:head_convs]
    return model


def fcos(
    backbone: Backbone = 'pcpvt_small',
    *,
    num_classes: int,
    out_channels: int = 256,
    extra_levels: int = 2,
    **options: Any,
) -> FCOS:
    """FCOS. Arguments are those of `retinanet`; out_channels must be 64, 96, 128, ...

    The head normalizes 32 groups of channels. A group of one channel has one value on a map of one
    cell, which cannot be normalized.

    Examples:
        >>> model = fcos('pcpvt_nano', num_classes=10, out_channels=64)
    """
    if out_channels % 32 or out_channels < 64:
        raise ValueError(
            f'out_channels must be a multiple of 32 and at least 64, got {out_channels}: the head '
            'of FCOS normalizes 32 groups of several channels'
        )
    parts = one_stage_parts(backbone, out_channels, extra_levels, [1], (1.0,))
    return assemble(FCOS, num_classes, parts | options)


def faster_rcnn(
    backbone: Backbone = 'pcpvt_small',
    *,
    num_classes: int,
    out_channels: int = 256,
    **options: Any,
) -> FasterRCNN:
    """Faster R-CNN.

    Args:
        backbone: see `Backbone`.
        num_classes: number of classes, with background, which is label 0.
        out_channels: channels of the FPN.
        **options: options of torchvision's `FasterRCNN`.

    Examples:
        >>> model = faster_rcnn({'arch': 'pcpvt_nano', 'drop_path_rate': 0.1}, num_classes=11)
    """
    return assemble(FasterRCNN, num_classes, two_stage_parts(backbone, out_channels) | options)


def mask_rcnn(
    backbone: Backbone = 'pcpvt_small',
    *,
    num_classes: int,
    out_channels: int = 256,
    **options: Any,
) -> MaskRCNN:
    """Mask R-CNN. Arguments are those of `faster_rcnn`, and options of torchvision's `MaskRCNN`.

    Examples:
        >>> model = mask_rcnn('svt_small', num_classes=11)
    """
    parts = two_stage_parts(backbone, out_channels)
    parts['mask_roi_pool'] = StrideRoIAlign(14, parts['backbone'].strides[:-1])
    return assemble(MaskRCNN, num_classes, parts | options)


def one_stage_parts(
    backbone: Backbone,
    out_channels: int,
    extra_levels: int,
    sides: Sequence[float],
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
) -> dict[str, Any]:
    """The parts of `RetinaNet` and `FCOS` that depend on the backbone.

    `sides` are those of the square anchors, as multiples of the stride of their level.
    """
    body = build_body(backbone, finest=8)
    extra = ExtraLevels(body.channels[-1], out_channels, extra_levels)
    pyramid = BackboneFPN(body, out_channels, extra, extra_levels)
    sizes = [[side * stride for side in sides] for stride in pyramid.strides]
    anchors = StrideAnchors(pyramid.strides, sizes, aspect_ratios)
    return dict(backbone=pyramid, anchor_generator=anchors)


def two_stage_parts(backbone: Backbone, out_channels: int) -> dict[str, Any]:
    """The parts of `FasterRCNN` that depend on the backbone."""
    pyramid = BackboneFPN(build_body(backbone, finest=4), out_channels, LastLevelMaxPool(), 1)
    return dict(
        backbone=pyramid,
        rpn_anchor_generator=StrideAnchors(pyramid.strides, [[8 * s] for s in pyramid.strides]),
        box_roi_pool=StrideRoIAlign(7, pyramid.strides[:-1]),
    )


Detector = TypeVar('Detector', RetinaNet, FCOS, FasterRCNN, MaskRCNN)


def assemble(
    kind: type[Detector],
    num_classes: int,
    options: dict[str, Any],
    transform: Optional[type['DetectorTransform']] = None,
) -> Detector:
    """Build a detector with a transform, by default one that marks the padding for the backbone.

    Raises:
        TypeError: an unknown option, or one that must be a number and is not. torchvision ignores
            the former, and the latter fails with the first image.
        ValueError: means or deviations that are not as many as the channels of the image.
    """
    known = {**inspect.signature(GeneralizedRCNNTransform).parameters}
    known |= inspect.signature(kind).parameters
    for name, value in options.items():
        if name not in known:
            raise TypeError(f'{kind.__name__} has no option {name}')
        must_be_number = isinstance(known[name].default, (int, float))
        if must_be_number and not is_number_or_several(value):
            raise TypeError(f'{name} of {kind.__name__} must be a number, got {value!r}')
    model = kind(num_classes=num_classes, **options)
    compute_boxes_in_float32(model)
    plain = model.transform
    check_normalization(plain.image_mean, plain.image_std, model.backbone.in_channels)
    model.transform = (transform or ValidRegionTransform)(
        model.backbone.in_channels,
        plain.min_size,
        plain.max_size,
        plain.image_mean,
        plain.image_std,
        plain.size_divisible,
        plain.fixed_size,
    )
    return model


def is_number_or_several(value: object) -> bool:
    """True for a number and, as `min_size` can be, for a list of numbers."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(each, (int, float)) for each in values)


class DetectorTransform(GeneralizedRCNNTransform):
    """torchvision's transform, which refuses images of other channels: a gray one would become one
    of three."""

    def __init__(self, in_channels: int, *args: Any) -> None:
        super().__init__(*args)
        self.in_channels = in_channels

    def normalize(self, image: Tensor) -> Tensor:
        channels = image.shape[-3]
        if channels != self.in_channels:
            raise ValueError(
                f'the backbone takes images of {self.in_channels} channels, got {channels}'
            )
        return super().normalize(image)


class ValidRegionTransform(DetectorTransform):
    """torchvision's transform, which marks the padding for the backbone.

    Padded batches get a further channel, 1 inside an image and 0 in the padding, which
    `BackboneFPN` splits off. Batches without padding get none and run at full speed.
    """

    def resize(
        self, image: Tensor, target: Optional[dict[str, Tensor]] = None
    ) -> tuple[Tensor, Optional[dict[str, Tensor]]]:
        """torchvision's, which would leave no pixels of the short side of a very narrow image: in
        evaluation, the image is made wide enough first."""
        if target is None and self.fixed_size is None and not torch.jit.is_tracing():
            height, width = image.shape[1:]
            least = max(height, width) // self.max_size + 1
            if min(height, width) < least:
                sides = max(height, least), max(width, least)
                image = F.interpolate(image[None], sides, mode='bilinear', align_corners=False)[0]
        return super().resize(image, target)

    def batch_images(self, images: list[Tensor], size_divisible: int = 32) -> Tensor:
        """The padded batch of images (C, H, W), (B, C, H, W) or (B, C + 1, H, W)."""
        batch = super().batch_images(images, size_divisible)
        is_padded = any(image.shape[1:] != batch.shape[2:] for image in images)
        if not is_padded and not torch.jit.is_tracing():  # a graph must serve other sizes
            return batch
        marked = [torch.cat([image, torch.ones_like(image[:1])]) for image in images]
        return super().batch_images(marked, size_divisible)


class MMDetectionTransform(DetectorTransform):
    """torchvision's transform, whose evaluation resizes images to the sizes of MMDetection."""

    def resize(
        self, image: Tensor, target: Optional[dict[str, Tensor]] = None
    ) -> tuple[Tensor, Optional[dict[str, Tensor]]]:
        if self.training or target is not None:
            return super().resize(image, target)
        height, width = image.shape[1:]
        short, long = min(height, width), max(height, width)
        scale = min(self.max_size / long, self.min_size[-1] / short)
        size = [max(int(side * scale + 0.5), 1) for side in (height, width)]
        return F.interpolate(image[None], size, mode='bilinear', align_corners=False)[0], target


# Names in MMDetection's RetinaNet, and ours.
MMDETECTION_NAMES = (
    (r'backbone\.', r'backbone.body.'),
    (r'neck\.lateral_convs\.(\d+)\.conv\.', r'backbone.fpn.inner_blocks.\1.0.'),
    (r'neck\.fpn_convs\.([012])\.conv\.', r'backbone.fpn.layer_blocks.\1.0.'),
    (r'neck\.fpn_convs\.3\.conv\.', r'backbone.fpn.extra_blocks.convs.0.'),
    (r'neck\.fpn_convs\.4\.conv\.', r'backbone.fpn.extra_blocks.convs.1.'),
    (r'bbox_head\.cls_convs\.(\d+)\.conv\.', r'head.classification_head.conv.\1.0.'),
    (r'bbox_head\.reg_convs\.(\d+)\.conv\.', r'head.regression_head.conv.\1.0.'),
    (r'bbox_head\.retina_cls\.', r'head.classification_head.cls_logits.'),
    (r'bbox_head\.retina_reg\.', r'head.regression_head.bbox_reg.'),
)


def from_mmdetection(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of MMDetection's RetinaNet under the names of ours. Those of the backbone keep
    their format, which it recognizes. Tensors of our own model keep their names."""
    if not any(name.startswith('bbox_head.') for name in tensors):
        return tensors
    renamed = {}
    for name, value in tensors.items():
        for theirs, ours in MMDETECTION_NAMES:
            new, count = re.subn(f'^{theirs}', ours, name)
            if count:
                name = new
                break
        renamed[name] = value
    return renamed


class BackboneFPN(nn.Module):
    """A backbone and torchvision's FPN, in the form that torchvision's detectors take.

    `extra_blocks` append further levels, each of twice the stride of the one before.
    """

    def __init__(
        self,
        body: Body,
        out_channels: int,
        extra_blocks: Optional[ExtraFPNBlock] = None,
        extra_levels: int = 0,
    ) -> None:
        super().__init__()
        self.body = body
        self.fpn = FeaturePyramidNetwork(list(body.channels), out_channels, extra_blocks)
        self.in_channels = body.in_channels
        self.out_channels = out_channels
        coarsest = body.strides[-1]
        self.strides = (*body.strides, *(coarsest * 2**i for i in range(1, extra_levels + 1)))

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> dict[str, Tensor]:
        """The levels of a batch.

        Args:
            image: (B, in_channels, H, W), or with the channel of `ValidRegionTransform`.
            valid: see `CPVTPyramid.forward`; read from that channel if there is one.
        """
        if image.shape[1] == self.in_channels + 1:
            image, _, valid = split_validity(image)
        maps = self.body(image, valid)
        with corrected(maps[0]):
            return self.fpn(OrderedDict((str(i), x) for i, x in enumerate(maps)))


class ExtraLevels(ExtraFPNBlock):
    """Further levels by 3x3 convolutions of stride 2, from the last map of the backbone.

    They are those of MMDetection's FPN. torchvision's `LastLevelP6P7` has two, with a ReLU in
    between.
    """

    def __init__(self, in_channels: int, out_channels: int, count: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        for i in range(count):
            inputs = out_channels if i else in_channels
            self.convs.append(nn.Conv2d(inputs, out_channels, 3, stride=2, padding=1))
        for parameter in self.parameters():
            if parameter.dim() == 4:
                nn.init.kaiming_uniform_(parameter, a=1)
            else:
                nn.init.zeros_(parameter)

    def forward(
        self, results: list[Tensor], x: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:
        level = x[-1]
        for conv in self.convs:
            level = conv(level)
            results.append(level)
            names.append(str(len(names)))
        return results, names


class StrideAnchors(AnchorGenerator):
    """Anchors at fixed strides, of fractional sides.

    torchvision's generator divides the size of the batch by that of the map, so that the distance
    of the anchors depends on the padding. It also rounds their sides to whole pixels.

    They are in float32, whatever the precision of the maps, or in float64.

    Args:
        strides: of each map.
        sizes: sides of each map's square anchors in pixels.
        aspect_ratios: height / width of the anchors.
    """

    def __init__(
        self,
        strides: Sequence[int],
        sizes: Sequence[Sequence[float]],
        aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    ) -> None:
        self.strides = tuple(strides)
        super().__init__(tuple(map(tuple, sizes)), (tuple(aspect_ratios),) * len(sizes))

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: Union[str, torch.device] = 'cpu',
    ) -> Tensor:
        """(len(scales) * len(aspect_ratios), 4), boxes around the origin."""
        sides = torch.as_tensor(scales, dtype=dtype, device=device)
        roots = torch.as_tensor(aspect_ratios, dtype=dtype, device=device).sqrt()[:, None]
        widths = (sides / roots).flatten()
        heights = (sides * roots).flatten()
        return torch.stack([-widths, -heights, widths, heights], dim=1) / 2

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """(N, 4) for each image."""
        dtype = torch.promote_types(feature_maps[0].dtype, torch.float32)
        self.set_cell_anchors(dtype, feature_maps[0].device)
        map_sizes = [list(x.shape[-2:]) for x in feature_maps]
        levels = self.grid_anchors(map_sizes, [[stride, stride] for stride in self.strides])
        return [torch.cat(levels)] * len(image_list.image_sizes)


class StrideRoIAlign(MultiScaleRoIAlign):
    """RoIAlign with given strides, which torchvision guesses from the first batch and keeps."""

    def __init__(self, output_size: int, strides: Sequence[int]) -> None:
        names = [str(i) for i in range(len(strides))]
        super().__init__(names, output_size, sampling_ratio=2)
        self.scales = [1 / stride for stride in strides]
        self.map_levels = LevelMapper(int(math.log2(strides[0])), int(math.log2(strides[-1])))

    def forward(
        self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> Tensor:
        """Computed in float32, since boxes are; the results have the dtype of the maps."""
        maps = {name: at_least_float32(x[name]) for name in self.featmap_names}
        return super().forward(maps, boxes, image_shapes).to(x[self.featmap_names[0]].dtype)
