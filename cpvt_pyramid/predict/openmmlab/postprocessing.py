"""mm's post-processing without the results that no prediction of the tools holds.

Shapes: B batch, K classes, h x w scores, H x W image.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional, Union

import torch
from mmengine.structures import BaseDataElement, PixelData
from torch import Tensor, nn

from ...export.possible_classes import possible_classes

upsample = torch.ops.aten.upsample_bilinear2d.out  # that of F.interpolate


class Unresized(NamedTuple):
    """What a segmentor's head passes to `best_labels`."""

    scores: Tensor  # (B, K, h, w)
    resize: Callable[[Tensor], Tensor]  # mmseg's, to the size of the batch


def as_scores(found: Union[Tensor, Unresized]) -> Tensor:
    """The scores of a segmentor's `inference`, in the size of the batch."""
    return found.resize(found.scores) if isinstance(found, Unresized) else found


def inherits(owner: Any, base: type, *methods: str) -> bool:
    """Whether an object is of a class, and has these methods of it."""
    return isinstance(owner, base) and all(
        getattr(type(owner), name) is getattr(base, name) and name not in vars(owner)
        for name in methods
    )


def skip_unused(model: nn.Module) -> None:
    """Let a model compute only what predictions hold, in place; see the functions below."""
    if hasattr(model, 'decode_head'):
        skip_class_scores(model)
    elif hasattr(model, 'roi_head'):
        skip_masks(model)


def skip_class_scores(model: Any) -> None:
    """Let a segmentor predict labels without `seg_logits`, in place; the labels are bit-identical.

    mmseg resizes the scores of all classes to the size of the batch, and again to that of the
    image: 7 GB for 150 classes and 12 megapixels. Methods that a model or its head overrides are
    left alone.
    """
    from mmseg.models import EncoderDecoder
    from mmseg.models.decode_heads.decode_head import BaseDecodeHead

    if not inherits(model, EncoderDecoder, 'predict', 'postprocess_result'):
        return
    model.postprocess_result = partial(best_labels, model, model.postprocess_result)
    whole = inherits(model, EncoderDecoder, 'inference', 'whole_inference', 'encode_decode')
    whole = whole and model.test_cfg.get('mode', 'whole') == 'whole'
    if whole and inherits(model.decode_head, BaseDecodeHead, 'predict', 'predict_by_feat'):
        resize: Any = model.decode_head.predict_by_feat

        def pass_on(scores: Tensor, metas: list[dict]) -> Unresized:
            return Unresized(scores, partial(resize, batch_img_metas=metas))

        model.decode_head.predict_by_feat = pass_on


def best_labels(
    model: Any,
    postprocess: Callable,
    found: Union[Tensor, Unresized],
    samples: Sequence[BaseDataElement],
) -> Sequence[BaseDataElement]:
    """The samples with `pred_sem_seg`, as `postprocess`, mmseg's method, computes it.

    Each class that can be the best somewhere is resized alone, and compared with the best before
    it. Not so on a GPU, and for channels-last scores, whose resizing PyTorch rounds otherwise.
    """
    if not isinstance(found, Unresized):
        found = Unresized(found, lambda scores: scores)
    scores = found.scores
    if not (scores.is_cpu and scores.is_contiguous()) or scores.shape[1] == 1:
        return postprocess(found.resize(scores), samples)
    for i, sample in enumerate(samples):
        own = Unresized(scores[i : i + 1], found.resize)
        labels = best_label_map(own, sample.metainfo, model.align_corners)
        sample.pred_sem_seg = PixelData(data=labels.long())
    return samples


def best_label_map(found: Unresized, meta: dict, align_corners: bool) -> Tensor:
    """The labels (1, H, W), int16, of an image with scores (1, K, h, w)."""
    scores = found.scores
    size = torch.Size(meta['ori_shape'])
    in_batch = found.resize(scores[:, :1]).shape[2:]
    grows = all(a >= b for a, b in zip(in_batch, scores.shape[2:]))
    classes = list(range(scores.shape[1]))
    if grows:  # a class that is the best nowhere is not so after resizing
        classes = possible_classes(scores)[0].nonzero()[:, 0].tolist()
    left, right, top, bottom = meta.get('img_padding_size', meta.get('padding_size', [0] * 4))
    resized = scores.new_empty(1, 1, *size)  # fresh memory would take longer than resizing
    labels = torch.full((1, *size), classes[0], dtype=torch.int16)
    best: Optional[Tensor] = None
    for k in classes:
        x = found.resize(scores[:, k : k + 1])
        x = x[..., top : x.shape[2] - bottom, left : x.shape[3] - right]
        if meta.get('flip'):
            x = x.flip(3 if meta['flip_direction'] == 'horizontal' else 2)
        if x.shape[2:] != size:
            x = upsample(x, size, align_corners, None, None, out=resized)
        if best is None:
            best = x[0].clone()
        else:
            labels.masked_fill_(x[0] > best, k)
            torch.maximum(best, x[0], out=best)
    return labels


def skip_masks(model: Any) -> None:
    """Let a detector with two stages compute no masks for boxes with a score below the `score_thr`
    in an image's `metainfo`, and no such boxes, in place.

    The rounding of the other masks' probabilities depends on the number of boxes, as it does on
    that of the images in a batch. Heads that override `predict_mask` are left alone.
    """
    from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead

    head = model.roi_head
    if any(inherits(head, base, 'predict_mask') for base in (StandardRoIHead, CascadeRoIHead)):
        predict: Any = head.predict_mask

        def predict_mask(x: Any, metas: list[dict], found: Sequence, **options: Any) -> Sequence:
            found = [y[y.scores >= meta.get('score_thr', 0)] for y, meta in zip(found, metas)]
            return predict(x, metas, found, **options)

        head.predict_mask = predict_mask
