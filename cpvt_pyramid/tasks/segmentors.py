"""Semantic segmentors on the backbones of this package, in plain PyTorch.

    model = segformer('mit_b0', num_classes=6)
    loss = model.loss(images, labels)
    labels = model.eval()(images).argmax(1)

- `semantic_fpn`: Semantic FPN (arXiv 1901.02446, section 3)
- `upernet`: UPerNet (arXiv 1807.10221, section 3.1)
- `segformer`: SegFormer's head (arXiv 2105.15203, section 3.2)

Parameters have the names of MMSegmentation, whose checkpoints they load unchanged; `load_trained`
builds the published ones.

Shapes: B batch, K classes, H x W image in pixels, h x w map of stride 4, C channels.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bfloat16 import corrected
from ..padding.mask import check_image, check_valid
from .bodies import Backbone, Body, build_body, check_normalization

IMAGE_MEAN = (0.485, 0.456, 0.406)  # of ImageNet, red, green and blue in [0, 1]
IMAGE_STD = (0.229, 0.224, 0.225)
IGNORED = 255  # label of pixels without a class
DROPOUT = 0.1  # before the classifier, as in all three recipes of MMSegmentation
AUXILIARY_WEIGHT = 0.4  # of the loss of UPerNet's second classifier


def resize(x: Tensor, size: Sequence[int]) -> Tensor:
    """Bilinear resizing of a map (B, C, H, W) to (height, width)."""
    return F.interpolate(x, tuple(size), mode='bilinear', align_corners=False)


def cross_entropy(scores: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The mean cross entropy of scores (B, K, h, w), resized to labels (B, H, W), over the pixels
    that count; 0 if none does. It is computed in float32."""
    resized = resize(scores.float(), labels.shape[1:])
    total = F.cross_entropy(resized, labels, ignore_index=ignore_index, reduction='sum')
    return total / (labels != ignore_index).sum().clamp(min=1)


def check_num_classes(num_classes: int) -> None:
    """Raise a ValueError unless a classifier can tell its classes apart."""
    if num_classes < 2:
        raise ValueError(
            f'num_classes of a segmentor must be at least 2, got {num_classes}: the score of a '
            'single class has nothing to be compared with. Count the background as a class'
        )


class ConvNormReLU(nn.Module):
    """A convolution that keeps the size of its map, batch normalization and ReLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        padding = kernel_size // 2
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)
        nn.init.kaiming_normal_(self.conv.weight, mode='fan_out', nonlinearity='relu')

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Conv(nn.Module):
    """A convolution alone, under the name that it has in `ConvNormReLU`."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        padding = kernel_size // 2
        conv: Any = nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding)
        nn.init.xavier_uniform_(conv.weight)
        nn.init.zeros_(conv.bias)
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class FPN(nn.Module):
    """Feature pyramid network (arXiv 1612.03144, section 3): every map gets what is in the coarser
    ones.

    Args:
        in_channels: of each map.
        out_channels: of all results.
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int) -> None:
        super().__init__()
        self.lateral_convs = nn.ModuleList(Conv(c, out_channels, 1) for c in in_channels)
        self.fpn_convs = nn.ModuleList(Conv(out_channels, out_channels, 3) for _ in in_channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        with corrected(maps[0]):
            levels = [conv(x) for conv, x in zip(self.lateral_convs, maps)]
            for i in reversed(range(len(levels) - 1)):
                levels[i] = levels[i] + F.interpolate(levels[i + 1], levels[i].shape[2:])
            return [conv(x) for conv, x in zip(self.fpn_convs, levels)]


class Head(nn.Module):
    """The classifier of each cell of a map. Derived classes say of which map.

    Args:
        channels: of that map.
        num_classes: K, at least 2.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        check_num_classes(num_classes)
        self.dropout = nn.Dropout2d(DROPOUT)
        self.conv_seg: Any = nn.Conv2d(channels, num_classes, 1)
        self.start_classifier()

    def start_classifier(self) -> None:
        nn.init.normal_(self.conv_seg.weight, std=0.01)
        nn.init.zeros_(self.conv_seg.bias)

    def features(self, maps: Sequence[Tensor]) -> Tensor:
        """One map (B, channels, h, w) from those of all strides."""
        raise NotImplementedError

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Scores (B, K, h, w)."""
        with corrected(maps[0]):
            return self.conv_seg(self.dropout(self.features(maps)))


class SemanticFPNHead(Head):
    """Semantic FPN's branch (arXiv 1901.02446, section 3.1 and figure 3): each map is enlarged to
    stride 4 in steps of 2, with a convolution before each, and their sum is classified.

    Args:
        in_channels: of each map.
        channels: of the convolutions.
        num_classes: K.
    """

    def __init__(self, in_channels: Sequence[int], channels: int, num_classes: int) -> None:
        super().__init__(channels, num_classes)
        self.scale_heads = nn.ModuleList()
        for steps, inputs in enumerate(in_channels):  # a map of stride 4 * 2^steps
            layers: list[nn.Module] = []
            for i in range(max(steps, 1)):
                layers.append(ConvNormReLU(inputs if i == 0 else channels, channels, 3))
                if steps:
                    layers.append(nn.Upsample(scale_factor=2, mode='bilinear'))
            self.scale_heads.append(nn.Sequential(*layers))

    def features(self, maps: Sequence[Tensor]) -> Tensor:
        x = self.scale_heads[0](maps[0])
        for branch, level in zip(self.scale_heads[1:], maps[1:]):
            x = x + resize(branch(level), x.shape[2:])
        return x


class PyramidPooling(nn.ModuleList):
    """Means over 1, 2 x 2, 3 x 3 and 6 x 6 parts of a map (PSPNet, arXiv 1612.01105, section
    3.2)."""

    SIDES = (1, 2, 3, 6)

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        for side in self.SIDES:
            conv = ConvNormReLU(in_channels, channels, 1)
            self.append(nn.Sequential(nn.AdaptiveAvgPool2d(side), conv))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [resize(branch(x), x.shape[2:]) for branch in self]


class UPerHead(Head):
    """UPerNet's head (arXiv 1807.10221, section 3.1): an FPN whose coarsest map comes from pyramid
    pooling, and whose maps are classified together.

    Arguments are those of `SemanticFPNHead`.
    """

    def __init__(self, in_channels: Sequence[int], channels: int, num_classes: int) -> None:
        super().__init__(channels, num_classes)
        *finer, coarsest = in_channels
        self.psp_modules = PyramidPooling(coarsest, channels)
        pooled = coarsest + len(PyramidPooling.SIDES) * channels
        self.bottleneck = ConvNormReLU(pooled, channels, 3)
        self.lateral_convs = nn.ModuleList(ConvNormReLU(c, channels, 1) for c in finer)
        self.fpn_convs = nn.ModuleList(ConvNormReLU(channels, channels, 3) for _ in finer)
        self.fpn_bottleneck = ConvNormReLU(len(in_channels) * channels, channels, 3)

    def features(self, maps: Sequence[Tensor]) -> Tensor:
        coarsest = torch.cat([maps[-1], *self.psp_modules(maps[-1])], dim=1)
        levels = [conv(x) for conv, x in zip(self.lateral_convs, maps)]
        levels.append(self.bottleneck(coarsest))
        for i in reversed(range(len(levels) - 1)):
            levels[i] = levels[i] + resize(levels[i + 1], levels[i].shape[2:])
        results = [conv(x) for conv, x in zip(self.fpn_convs, levels)]
        results.append(levels[-1])
        size = results[0].shape[2:]
        enlarged = [resize(x, size) for x in results[1:]]
        return self.fpn_bottleneck(torch.cat([results[0], *enlarged], dim=1))


class SegformerHead(Head):
    """SegFormer's head (arXiv 2105.15203, section 3.2): a linear layer for each map, and one for
    all of them at stride 4.

    Arguments are those of `SemanticFPNHead`.
    """

    def __init__(self, in_channels: Sequence[int], channels: int, num_classes: int) -> None:
        super().__init__(channels, num_classes)
        self.convs = nn.ModuleList(ConvNormReLU(c, channels, 1) for c in in_channels)
        self.fusion_conv = ConvNormReLU(len(in_channels) * channels, channels, 1)

    def features(self, maps: Sequence[Tensor]) -> Tensor:
        size = maps[0].shape[2:]
        x = torch.cat([resize(conv(x), size) for conv, x in zip(self.convs, maps)], dim=1)
        return self.fusion_conv(x)


class AuxiliaryHead(Head):
    """A classifier of the map of stride 16 for the training alone (PSPNet, section 3.3).

    Args:
        in_channels: of that map.
        channels: of the convolution.
        num_classes: K.
    """

    def __init__(self, in_channels: int, channels: int, num_classes: int) -> None:
        super().__init__(channels, num_classes)
        self.convs = nn.Sequential(ConvNormReLU(in_channels, channels, 3))

    def features(self, maps: Sequence[Tensor]) -> Tensor:
        return self.convs(maps[2])


class SemanticSegmentor(nn.Module):
    """A semantic segmentor: a backbone, perhaps an FPN, and a head.

    Args:
        backbone: with maps of strides 4, 8, 16 and 32; see `Backbone`.
        decode_head: takes these maps, or those of `neck`.
        neck: an `FPN`, or None.
        auxiliary_head: a second classifier, for the training alone, or None.
        image_mean: for each channel of the image, which is in [0, 1]: what is subtracted. By
            default that of ImageNet, for RGB.
        image_std: for each channel: what it is divided by then.
        window: side of windows in pixels, and the distance between two, in which evaluation
            predicts; their scores are averaged where they overlap. None: the whole image at once.

    Examples:
        >>> model = semantic_fpn('pcpvt_nano', num_classes=6).eval()
        >>> model(torch.rand(1, 3, 97, 130)).shape
        torch.Size([1, 6, 97, 130])
    """

    def __init__(
        self,
        backbone: Body,
        decode_head: Head,
        neck: Optional[FPN] = None,
        auxiliary_head: Optional[Head] = None,
        *,
        image_mean: Sequence[float] = IMAGE_MEAN,
        image_std: Sequence[float] = IMAGE_STD,
        window: Optional[tuple[int, int]] = None,
    ) -> None:
        super().__init__()
        check_normalization(image_mean, image_std, backbone.in_channels)
        self.in_channels = backbone.in_channels
        self.backbone = backbone
        self.neck = neck
        self.decode_head = decode_head
        self.auxiliary_head = auxiliary_head
        self.image_mean = tuple(image_mean)
        self.image_std = tuple(image_std)
        self.window = window

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> Tensor:
        """Scores (B, K, H, W) of the classes of each pixel, before a softmax.

        Args:
            image: (B, C, H, W) with values in [0, 1]; of any size.
            valid: (B, 2), the true height and width of each image of a padded batch. The backbone
                keeps the padding out of its maps, which are then those of each image alone; see
                `CPVTPyramid.forward`. Convolutions and pooling of the heads read zeros there, and
                windows are those of the batch: for the scores that images have alone, run batches
                of images of one size, without padding.

        Raises:
            ValueError: see `CPVTPyramid.forward`.
        """
        if self.window is not None and not self.training:
            return self.in_windows(image, valid)
        return resize(self.scores(image, valid), image.shape[2:])

    def scores(self, image: Tensor, valid: Optional[Tensor] = None) -> Tensor:
        """Scores (B, K, h, w), which are not enlarged; arguments are those of `forward`."""
        maps = self.backbone(self.normalized(image), valid)
        return self.decode_head(maps if self.neck is None else self.neck(maps))

    def loss(
        self,
        image: Tensor,
        labels: Tensor,
        valid: Optional[Tensor] = None,
        ignore_index: int = IGNORED,
    ) -> Tensor:
        """The mean cross entropy of the pixels, and 0.4 times that of the auxiliary head.

        Args:
            image, valid: see `forward`.
            labels: (B, H, W), classes from 0 to K - 1.
            ignore_index: the label of pixels that do not count, such as those of the padding. If
                none counts, the loss is 0.

        Raises:
            ValueError: `ignore_index` is the label of a class.
        """
        if 0 <= ignore_index < self.num_classes:
            raise ValueError(
                f'ignore_index={ignore_index} is the label of one of the {self.num_classes} '
                'classes; choose another for pixels without a class, such as -1'
            )
        maps = self.backbone(self.normalized(image), valid)
        scores = self.decode_head(maps if self.neck is None else self.neck(maps))
        loss = cross_entropy(scores, labels, ignore_index)
        if self.auxiliary_head is not None:
            auxiliary = cross_entropy(self.auxiliary_head(maps), labels, ignore_index)
            loss = loss + AUXILIARY_WEIGHT * auxiliary
        return loss

    def in_windows(self, image: Tensor, valid: Optional[Tensor]) -> Tensor:
        """`forward` of windows that cover the batch, averaged where they overlap."""
        assert self.window is not None
        check_image(image, self.in_channels)
        if valid is not None:
            check_valid(valid, image)
        side, step = self.window
        height, width = image.shape[2:]
        total: Any = 0
        count = image.new_zeros(1, 1, height, width)
        for top, left in itertools.product(
            window_starts(height, side, step), window_starts(width, side, step)
        ):
            bottom = min(top + side, height)
            right = min(left + side, width)
            part = image[:, :, top:bottom, left:right]
            part_valid = None if valid is None else sizes_inside(valid, part, top, left)
            scores = resize(self.scores(part, part_valid), part.shape[2:])
            if isinstance(total, int):
                total = scores.new_zeros(*scores.shape[:2], height, width)
            total[:, :, top:bottom, left:right] += scores
            count[:, :, top:bottom, left:right] += 1
        return total / count

    def normalized(self, image: Tensor) -> Tensor:
        check_image(image, self.in_channels)  # a gray image would become one of three
        mean = image.new_tensor(self.image_mean)[:, None, None]
        std = image.new_tensor(self.image_std)[:, None, None]
        return (image - mean) / std

    @property
    def num_classes(self) -> int:
        return self.decode_head.conv_seg.out_channels

    def replace_classifiers(self, num_classes: int) -> None:
        """Give the heads new classifiers, with initial weights."""
        check_num_classes(num_classes)
        for head in (self.decode_head, self.auxiliary_head):
            if head is not None:
                old = head.conv_seg
                head.conv_seg = nn.Conv2d(old.in_channels, num_classes, 1).to(old.weight)
                head.start_classifier()


def sizes_inside(valid: Tensor, window: Tensor, top: int, left: int) -> Tensor:
    """The height and width, (B, 2), of what a window of a padded batch has of each image; 0 where
    it lies in the padding.

    Args:
        valid: (B, 2), those of each image.
        window: (B, C, H, W).
        top: row of the batch at which the window begins.
        left: column at which it begins.
    """
    sizes = valid - valid.new_tensor([top, left])
    return sizes.clamp(min=0).minimum(valid.new_tensor(window.shape[2:]))


def window_starts(length: int, side: int, step: int) -> list[int]:
    """Where windows begin along an axis: at multiples of a step, but the last one ends with it."""
    count = max(length - side + step - 1, 0) // step + 1
    return [max(min(i * step, length - side), 0) for i in range(count)]


def semantic_fpn(
    backbone: Backbone = 'pcpvt_small',
    *,
    num_classes: int,
    channels: int = 128,
    fpn_channels: int = 256,
    **options: Any,
) -> SemanticSegmentor:
    """Semantic FPN, as in PVT, section 5.3, and Twins, section 4.2.

    Args:
        backbone: see `Backbone`.
        num_classes: K.
        channels: of the head.
        fpn_channels: of the FPN.
        **options: of `SemanticSegmentor`.

    Examples:
        >>> model = semantic_fpn('pcpvt_nano', num_classes=6, channels=32, fpn_channels=64)
    """
    body = build_body(backbone, finest=4)
    neck = FPN(body.channels, fpn_channels)
    head = SemanticFPNHead([fpn_channels] * 4, channels, num_classes)
    return SemanticSegmentor(body, head, neck, **options)


def upernet(
    backbone: Backbone = 'pcpvt_small',
    *,
    num_classes: int,
    channels: int = 512,
    auxiliary_channels: int = 256,
    **options: Any,
) -> SemanticSegmentor:
    """UPerNet, as in Twins, section 4.2, with an auxiliary head.

    Arguments are those of `semantic_fpn`; `auxiliary_channels` are those of the auxiliary head.

    Examples:
        >>> model = upernet('pcpvt_nano', num_classes=6, channels=64, auxiliary_channels=32)
    """
    body = build_body(backbone, finest=4)
    head = UPerHead(body.channels, channels, num_classes)
    auxiliary = AuxiliaryHead(body.channels[2], auxiliary_channels, num_classes)
    return SemanticSegmentor(body, head, auxiliary_head=auxiliary, **options)


def segformer(
    backbone: Backbone = 'mit_b0',
    *,
    num_classes: int,
    channels: int = 256,
    **options: Any,
) -> SemanticSegmentor:
    """SegFormer's head. Arguments are those of `semantic_fpn`.

    Examples:
        >>> model = segformer('pcpvt_nano', num_classes=6, channels=64)
    """
    body = build_body(backbone, finest=4)
    return SemanticSegmentor(body, SegformerHead(body.channels, channels, num_classes), **options)
