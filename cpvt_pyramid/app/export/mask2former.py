"""Mask2Former: of MMSegmentation for the class of each pixel, of MMDetection for instances.

Both attend to all of the padded image, and encode positions relative to it.

Shapes: B batch, H x W image in pixels, h x w map, N tokens, Q queries, C channels, K results.
"""

from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tooling.command import UserError
from .base import Batch, Preprocessing, full_sizes
from .deformable import Levels, encode, outside
from .detectors import Detector
from .labels import resized_labels
from .mm_model import preprocessing_of
from .mm_segmentors import check_whole, original_pixels
from .nms import best, largest, take
from .segmentors import PixelClassifier


class Mask2FormerSegmentor(PixelClassifier):
    """The class of each pixel: that with the largest sum, over the queries, of class probability
    times mask. Probabilities are the share of each class in the sums."""

    def __init__(self, model: nn.Module, probabilities: bool = False) -> None:
        check_whole(model)
        super().__init__(model, preprocessing_of(model), probabilities)
        check(self.preprocessing, model.decode_head)
        self.details['resized'] = 'probabilities'

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        x, valid = self.preprocess(batch)
        maps, stages = self.maps(x, valid)
        stages['features'], classes, masks = predict(self.model.decode_head, x, maps)
        masks = F.interpolate(masks, x.shape[2:], mode='bilinear', align_corners=False)
        sums = masks.permute(0, 2, 3, 1).sigmoid() @ classes.softmax(-1)[:, None, :, :-1]
        sums = sums.permute(0, 3, 1, 2)  # (B, classes, H', W')
        if not self.takes_original:
            sums = self.without_padding(sums, batch.images)
            return stages | {'probabilities': self.probabilities(sums)}
        weights = self.resizing(batch, x.shape[2:])
        return stages | {'labels': resized_labels(sums, *weights)}

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores / scores.sum(1, keepdim=True)

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        return original_pixels(self, image, original)


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
        x, valid = self.preprocess(batch)
        maps, stages = self.maps(x, valid)
        head = self.model.panoptic_head
        stages['features'], logits, masks = predict(head, x, maps)

        classes = logits.softmax(-1)[..., :-1]  # (B, Q, classes)
        count = classes.shape[2]
        scores, index = largest(classes.flatten(1), self.model.test_cfg.get('max_per_image', 100))
        labels, query = index % count, index // count
        scores = scores * (labels < head.num_things_classes)
        masks = take(masks, query)
        pixels = F.interpolate(masks, x.shape[2:], mode='bilinear', align_corners=False)
        image = ~outside(x.shape[2:], x, batch.sizes)[:, None]
        inside = (pixels > 0) & image  # (B, K, H', W')
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
    head: nn.Module, image: Tensor, maps: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What a `Mask2FormerHead` predicts with its last layer from maps, fine to coarse, of a padded
    image (B, 3, H', W'): features of the pixels (B, C, h, w), class logits (B, Q, classes + 1), and
    mask logits (B, Q, h, w)."""
    features, maps, levels = pixel_decoder(head.pixel_decoder, image, maps)
    keys, positions = [], []
    for i, (x, mask) in enumerate(zip(maps, levels.masks)):
        x = head.decoder_input_projs[i](x).flatten(2).transpose(1, 2)
        keys.append(x + head.level_embed.weight[i])
        position = head.decoder_positional_encoding(mask).flatten(2).transpose(1, 2)
        positions.append(position)
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
            cross_attn_mask=attention_mask(masks, levels.sizes[level], head.num_heads),
        )
        masks = mask_logits(head, query, features)
    return features, head.cls_embed(decoder.post_norm(query)), masks


def pixel_decoder(
    decoder: nn.Module, image: Tensor, maps: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], Levels]:
    """What an `MSDeformAttnPixelDecoder` returns: features of the pixels, and maps from coarse to
    fine; and these as levels."""
    coarse = maps[::-1][: decoder.num_encoder_levels]
    levels = Levels(coarse, image, full_sizes(image))
    projected = [conv(x) for conv, x in zip(decoder.input_convs, coarse)]
    embedding = decoder.level_encoding.weight
    tokens = encode(decoder.encoder, projected, decoder.postional_encoding, embedding, levels)
    encoded = levels.split(tokens)
    finer = F.interpolate(encoded[-1], maps[0].shape[2:], mode='bilinear', align_corners=False)
    x = decoder.lateral_convs[0](maps[0]) + finer
    features = decoder.mask_feature(decoder.output_convs[0](x))
    return features, encoded[: decoder.num_outs], levels


def mask_logits(head: nn.Module, query: Tensor, features: Tensor) -> Tensor:
    """(B, Q, h, w) of queries (B, Q, C) and pixels (B, C, h, w)."""
    embedding = head.mask_embed(head.transformer_decoder.post_norm(query))
    return (embedding @ features.flatten(2)).unflatten(2, features.shape[2:])


def attention_mask(masks: Tensor, size: Sequence[int], heads: int) -> Tensor:
    """Booleans (B * heads, Q, N), True where a query does not look: outside its mask, of logits
    (B, Q, h, w), unless that is empty, at the height and width of the keys' level."""
    masks = F.interpolate(masks, size, mode='bilinear', align_corners=False)
    not_in_mask = masks.flatten(2).sigmoid() < 0.5
    mask = not_in_mask & ~not_in_mask.all(-1, keepdim=True)
    return mask[:, None].expand(-1, heads, -1, -1).flatten(0, 1)


def ends(used: Tensor) -> tuple[Tensor, Tensor]:
    """The first True of each row (..., n), and the one after the last; 0 if there is none."""
    at = torch.arange(used.shape[-1], device=used.device, dtype=torch.float32)
    last = ((at + 1) * used).amax(-1)
    first = at.masked_fill(~used, float('inf')).amin(-1).minimum(last)
    return first, last
