"""The label maps of mmseg's segmentors, one class at a time.

mmseg resizes the scores of all classes to the size of the batch, and again to that of the image:
7 GB for 150 classes and 12 megapixels. Here each class that can be the best somewhere is resized
alone, and compared with the best before it. Labels are bit-identical.

Shapes: B batch, K classes, h x w scores, H x W image.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from mmengine.structures import BaseDataElement, PixelData
from torch import Tensor

from .possible_classes import possible_classes

Resize = Callable[[Tensor], Tensor]

upsample = torch.ops.aten.upsample_bilinear2d.out  # that of F.interpolate


def predict_labels(model: Any, batch: dict) -> Sequence[BaseDataElement]:
    """The samples that a segmentor's `test_step` returns for a batch, without `seg_logits`.

    It is `test_step` itself for models that override how labels are decided, and mmseg's way from
    scores to labels for models of one class, on a GPU, and for channels-last scores, whose
    resizing PyTorch rounds otherwise.
    """
    from mmseg.models import EncoderDecoder
    from mmseg.models.decode_heads.decode_head import BaseDecodeHead

    if not inherits(model, EncoderDecoder, 'predict', 'postprocess_result'):
        return model.test_step(batch)
    data = model.data_preprocessor(batch, False)
    inputs = data['inputs']
    samples = data['data_samples']
    metas = [sample.metainfo for sample in samples]
    head = model.decode_head
    is_whole = model.test_cfg.get('mode', 'whole') == 'whole'
    is_whole = is_whole and inherits(
        model, EncoderDecoder, 'inference', 'whole_inference', 'encode_decode'
    )
    if is_whole and inherits(head, BaseDecodeHead, 'predict', 'predict_by_feat'):
        scores = head(model.extract_feat(inputs))

        def to_batch_size(x: Tensor) -> Tensor:
            return head.predict_by_feat(x, metas)

    else:
        scores = model.inference(inputs, metas)

        def to_batch_size(x: Tensor) -> Tensor:
            return x

    if not (scores.is_cpu and scores.is_contiguous()) or scores.shape[1] == 1:
        return model.postprocess_result(to_batch_size(scores), samples)
    for i, sample in enumerate(samples):
        own = scores[i : i + 1]
        labels = best_labels(own, to_batch_size, sample.metainfo, model.align_corners)
        sample.pred_sem_seg = PixelData(data=labels.long())
    return samples


def inherits(owner: Any, base: type, *methods: str) -> bool:
    """Whether an object is of a class, and has these methods of it."""
    return isinstance(owner, base) and all(
        getattr(type(owner), name) is getattr(base, name) and name not in vars(owner)
        for name in methods
    )


def best_labels(scores: Tensor, to_batch_size: Resize, meta: dict, align_corners: bool) -> Tensor:
    """The labels (1, H, W), int16, of an image with scores (1, K, h, w)."""
    size = torch.Size(meta['ori_shape'])
    in_batch = to_batch_size(scores[:, :1]).shape[2:]
    grows = all(a >= b for a, b in zip(in_batch, scores.shape[2:]))
    classes = list(range(scores.shape[1]))
    if grows:  # a class that is the best nowhere is not so after resizing
        classes = possible_classes(scores)[0].nonzero()[:, 0].tolist()
    left, right, top, bottom = meta.get('img_padding_size', meta.get('padding_size', [0] * 4))
    resized = scores.new_empty(1, 1, *size)  # fresh memory would take longer than resizing
    labels = torch.full((1, *size), classes[0], dtype=torch.int16)
    best: Optional[Tensor] = None
    for k in classes:
        x = to_batch_size(scores[:, k : k + 1])
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
