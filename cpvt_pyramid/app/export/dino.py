"""DINO of MMDetection.

Shapes: B batch, N tokens of all maps, Q queries, C channels, K results.
"""

from typing import Optional

import torch
from torch import Tensor, nn

from ...padding.batching import ceil_div
from .anchors import clip
from .base import Batch
from .deformable import Levels, deformable_attention, encode
from .detectors import Detector
from .nms import best, take, top


class DINO(Detector):
    """Boxes from queries: the tokens with the best scores, refined by each layer of a decoder.

    An image with fewer tokens than there are queries, for which MMDetection raises an error, has as
    many queries as tokens.
    """

    @property
    def strides(self) -> list[int]:
        """Of the maps that the neck returns: those of the backbone, and coarser ones."""
        first = list(self.model.backbone.strides)
        coarser = self.model.num_feature_levels - len(first)
        return first + [first[-1] * 2**i for i in range(1, coarser + 1)]

    def stages(self, batch: Batch) -> dict[str, Tensor]:
        from mmdet.structures.bbox import bbox_cxcywh_to_xyxy

        model = self.model
        x, valid = self.preprocess(batch)
        maps, stages = self.maps(x, valid)
        levels = Levels(maps, x, batch.sizes)
        memory = encode(model.encoder, maps, model.positional_encoding, model.level_embed, levels)
        logits, boxes = self.proposals(memory, levels)
        stages |= {'memory': memory, 'logits_0': logits}

        scores, index = top(logits.amax(-1), model.num_queries, float('-inf'))
        boxes = take(boxes, index).sigmoid()
        unused = scores == float('-inf')

        logits, boxes = self.decode(boxes, unused, memory, levels)
        scores = logits.sigmoid() * ~unused[..., None]  # (B, Q, classes)
        sides = batch.sizes.to(boxes.dtype).flip(1).repeat(1, 2)[:, None]  # (B, 1, 4)
        boxes = clip(bbox_cxcywh_to_xyxy(boxes) * sides, batch)
        classes = torch.arange(scores.shape[2], device=scores.device).expand_as(scores)
        boxes = boxes[:, :, None].expand(-1, -1, scores.shape[2], -1)
        count = model.test_cfg.get('max_per_img', model.num_queries)
        boxes, scores, labels, _ = best(
            scores.flatten(1), boxes.flatten(1, 2), classes.flatten(1), count
        )
        return stages | {'boxes': boxes, 'scores': scores, 'labels': labels}

    def reference(self, image: Tensor, original: Optional[Tensor] = None) -> dict[str, Tensor]:
        """A small image gets as many queries as tokens, see the class."""
        model, divisor = self.model, self.preprocessing.divisor
        sides = self.canvas or image.shape[2:]
        height, width = (ceil_div(side, divisor) * divisor for side in sides)
        tokens = sum(ceil_div(height, s) * ceil_div(width, s) for s in self.strides)
        count, embedding = model.num_queries, model.query_embedding
        try:
            model.num_queries = min(count, tokens)
            model.query_embedding = nn.Embedding.from_pretrained(embedding.weight[:tokens])
            return super().reference(image)
        finally:
            model.num_queries, model.query_embedding = count, embedding

    def proposals(self, memory: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
        """Class logits (B, N, classes) and boxes (B, N, 4), before the sigmoid, of each token."""
        model = self.model
        head, last = model.bbox_head, model.decoder.num_layers
        places = enumerate(levels.points())
        boxes = [torch.cat([xy, torch.full_like(xy, 0.05 * 2**i)], dim=-1) for i, xy in places]
        boxes = levels.tokens(boxes)
        unused = ~((boxes > 0.01) & (boxes < 0.99)).all(-1) | levels.outside
        boxes = (boxes / (1 - boxes)).log().masked_fill(unused[..., None], float('inf'))
        x = memory.masked_fill(unused[..., None], 0)
        x = model.memory_trans_norm(model.memory_trans_fc(x))
        return head.cls_branches[last](x), head.reg_branches[last](x) + boxes

    def decode(
        self, boxes: Tensor, unused: Tensor, memory: Tensor, levels: Levels
    ) -> tuple[Tensor, Tensor]:
        """Class logits (B, Q, classes) and boxes (B, Q, 4), centre, width and height, as shares of
        the image, of which some queries are unused, (B, Q)."""
        from mmdet.models.layers import coordinate_to_encoding, inverse_sigmoid

        model, head = self.model, self.model.bbox_head
        ratios = levels.ratios().repeat(1, 1, 2)[:, None]  # (B, 1, L, 4)
        x = model.query_embedding.weight.expand(memory.shape[0], -1, -1)
        for i, layer in enumerate(model.decoder.layers):
            points = boxes[:, :, None] * ratios
            position = coordinate_to_encoding(points[:, :, 0], num_feats=x.shape[2])
            position = model.decoder.ref_point_head(position)
            x = layer.self_attn(x, query_pos=position, key_pos=position, key_padding_mask=unused)
            x = layer.norms[0](x)
            x = deformable_attention(layer.cross_attn, x, position, memory, points, levels)
            x = layer.norms[2](layer.ffn(layer.norms[1](x)))
            before = boxes
            boxes = (head.reg_branches[i](x) + inverse_sigmoid(boxes, eps=1e-3)).sigmoid()
        x = model.decoder.norm(x)
        boxes = head.reg_branches[i](x) + inverse_sigmoid(before)
        return head.cls_branches[i](x), boxes.sigmoid()
