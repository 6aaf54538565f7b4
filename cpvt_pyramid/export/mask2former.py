"""Mask2Former: of MMSegmentation for the class of each pixel, of MMDetection for instances.

Both attend to all of the padded image, and encode positions relative to it. Here it is each image
padded by itself, so that its result is the one that it has alone.

Shapes: B batch, H x W image in pixels, h x w map, N tokens, Q queries, C channels, K results.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..columnar import crop
from ..regions import Region, mark
from ..tooling.command import UserError
from .base import Batch, Preprocessing
from .deformable import Levels, encode
from .detectors import Detector
from .extent import EachImage
from .labels import resized_labels
from .nms import best, largest, take
from .segmentors import PixelClassifier
from .two_stage import repeat_edge


class Mask2FormerSegmentor(PixelClassifier):
    """The class of each pixel: that with the largest sum, over the queries, of class probability
    times mask. Probabilities are the share of each class in the sums."""

    def __init__(self, model: nn.Module, probabilities: bool = False) -> None:
        super().__init__(model, probabilities)
        check(self.preprocessing, model.decode_head)
        self.details['resized'] = 'probabilities'

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        maps, context, stages = self.maps(batch)
        alone = self.padded_alone(batch.sizes)
        stages['features'], classes, masks = predict(self.model.decode_head, maps, context, alone)
        height, width = batch.images.shape[2:]
        size = [4 * side for side in masks.shape[2:]]  # of the padded batch
        masks = F.interpolate(masks, size, mode='bilinear', align_corners=False)
        masks = crop(masks.permute(0, 2, 3, 1), height, width)  # (B, H, W, Q)
        sums = masks.sigmoid() @ classes.softmax(-1)[:, None, :, :-1]
        sums = sums.permute(0, 3, 1, 2)
        if not self.takes_original:
            return stages | {'probabilities': self.probabilities(sums)}
        weights = self.resizing(batch)
        return stages | {'labels': resized_labels(sums.float(), *weights)}

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores / scores.sum(1, keepdim=True)


class Mask2Former(Detector):
    """Masks and classes of the queries, best first, also of a panoptic model. The boxes are those
    of the masks, which are (B, K, H / 4, W / 4), of the image padded to a multiple of 32. Masks are
    not compared with MMDetection's, which have the size of the image."""

    task = 'instance'

    def __init__(self, model: nn.Module) -> None:
        if not model.test_cfg.get('instance_on', False):
            raise UserError('only instances can be exported; set test_cfg.instance_on=True')
        super().__init__(model)
        check(self.preprocessing, model.panoptic_head)
        self.output_names += ('masks',)
        self.details['masks'] = 'image'

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        maps, context, stages = self.maps(batch)
        alone = self.padded_alone(batch.sizes)
        head = self.model.panoptic_head
        stages['features'], logits, masks = predict(head, maps, context, alone)

        classes = logits.softmax(-1)[..., :-1]  # (B, Q, classes)
        count = classes.shape[2]
        scores, index = largest(classes.flatten(1), self.model.test_cfg.get('max_per_image', 100))
        labels, query = index % count, index // count
        scores = scores * (labels < head.num_things_classes)
        masks = take(masks, query)
        size = [4 * side for side in masks.shape[2:]]
        pixels = F.interpolate(masks, size, mode='bilinear', align_corners=False)
        inside = (pixels > 0) & ~Region(batch.sizes).at_stride(1).outside(size)  # (B, K, H, W)
        area = inside.sum((2, 3))
        scores = scores * ((pixels.sigmoid() * inside).sum((2, 3)) / (area + 1e-6))
        (x1, x2), (y1, y2) = ends(inside.any(2)), ends(inside.any(3))
        boxes = torch.stack([x1, y1, x2, y2], dim=-1)
        boxes, scores, labels, index = best(scores, boxes, labels, scores.shape[1])
        masks = take(masks, index).sigmoid()
        return stages | {'boxes': boxes, 'scores': scores, 'labels': labels, 'masks': masks}


def check(preprocessing: Preprocessing, head: nn.Module) -> None:
    """Check that all maps divide the padded image, and that the head can be exported."""
    if preprocessing.divisor % 32:
        raise UserError(
            'a Mask2Former needs images padded to a multiple of 32 to be exported, got '
            f'{preprocessing.divisor}; set size_divisor=32 in data_preprocessor.test_cfg, or '
            'data_preprocessor.pad_size_divisor=32'
        )
    decoder = head.pixel_decoder
    kind = type(decoder).__name__
    if kind != 'MSDeformAttnPixelDecoder' or len(decoder.lateral_convs) != 1:
        raise UserError(
            'the pixel decoder of a Mask2Former must be an MSDeformAttnPixelDecoder with one map '
            f'that is not encoded, got {kind} with {len(decoder.lateral_convs)}'
        )


def predict(
    head: nn.Module, maps: Sequence[Tensor], context: EachImage, alone: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a `Mask2FormerHead` predicts with its last layer from maps, fine to coarse: features of
    the pixels (B, C, h, w), class logits (B, Q, classes + 1), and mask logits (B, Q, h, w), which
    may be resized without a mixture of image and padding.

    For the context, see `MMModel.maps`; `alone` is the size of each image padded by itself.
    """
    features, maps, levels = pixel_decoder(head.pixel_decoder, maps, context, alone)
    keys, positions = [], []
    for i, (x, mask) in enumerate(zip(maps, levels.masks)):
        x = head.decoder_input_projs[i](x).flatten(2).transpose(1, 2)
        keys.append(x + head.level_embed.weight[i])
        position = head.decoder_positional_encoding(mask).flatten(2).transpose(1, 2)
        positions.append(position.to(x.dtype))
    query = head.query_feat.weight.expand(features.shape[0], -1, -1)
    place = head.query_embed.weight.expand(features.shape[0], -1, -1)
    decoder = head.transformer_decoder
    masks = mask_logits(head, query, features)
    for i, layer in enumerate(decoder.layers):
        level = i % len(maps)
        query = layer(
            query,
            key=keys[level],
            value=keys[level],
            query_pos=place,
            key_pos=positions[level],
            cross_attn_mask=attention_mask(masks, levels.masks[level], head.num_heads),
        )
        masks = mask_logits(head, query, features)
    masks = repeat_edge(masks.float(), Region(alone).at_stride(4))
    return features, head.cls_embed(decoder.post_norm(query)).float(), masks


def pixel_decoder(
    decoder: nn.Module, maps: Sequence[Tensor], context: EachImage, alone: Tensor
) -> tuple[Tensor, list[Tensor], Levels]:
    """What an `MSDeformAttnPixelDecoder` returns: features of the pixels, and maps from coarse to
    fine; and these as levels."""
    coarse = list(zip(maps, decoder.strides))[::-1][: decoder.num_encoder_levels]
    levels = Levels(*zip(*coarse), alone)
    with context:
        projected = [conv(x) for conv, (x, _) in zip(decoder.input_convs, coarse)]
    embedding = decoder.level_encoding.weight
    tokens = encode(decoder.encoder, projected, decoder.postional_encoding, embedding, levels)
    encoded = levels.split(tokens)
    extent = Region(alone).at_stride(coarse[-1][1])
    finer = F.interpolate(
        repeat_edge(encoded[-1], extent), maps[0].shape[2:], mode='bilinear', align_corners=False
    )
    with context:
        x = decoder.lateral_convs[0](maps[0]) + finer
        # In MMDetection the sum of a map with a region and one without it has none.
        mark(x, Region(alone).at_stride(decoder.strides[0]))
        features = decoder.mask_feature(decoder.output_convs[0](x))
    return features, encoded[: decoder.num_outs], levels


def mask_logits(head: nn.Module, query: Tensor, features: Tensor) -> Tensor:
    """(B, Q, h, w) of queries (B, Q, C) and pixels (B, C, h, w)."""
    embedding = head.mask_embed(head.transformer_decoder.post_norm(query))
    return (embedding @ features.flatten(2)).unflatten(2, features.shape[2:])


def attention_mask(masks: Tensor, outside: Tensor, heads: int) -> Tensor:
    """Booleans (B * heads, Q, N), True where a query does not look: outside its mask, of logits
    (B, Q, h, w), or if that is empty, outside the image, (B, h', w') of the keys' level."""
    masks = F.interpolate(masks, outside.shape[1:], mode='bilinear', align_corners=False)
    outside = outside.flatten(1)[:, None]  # (B, 1, N)
    not_in_mask = (masks.flatten(2).sigmoid() < 0.5) | outside
    mask = (not_in_mask & ~not_in_mask.all(-1, keepdim=True)) | outside
    return mask[:, None].expand(-1, heads, -1, -1).flatten(0, 1)


def ends(used: Tensor) -> tuple[Tensor, Tensor]:
    """The first True of each row (..., n), and the one after the last; 0 if there is none."""
    at = torch.arange(used.shape[-1], device=used.device, dtype=torch.float32)
    last = ((at + 1) * used).amax(-1)
    first = at.masked_fill(~used, float('inf')).amin(-1).minimum(last)
    return first, last
