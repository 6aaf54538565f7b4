"""The label maps of mmseg's segmentors, one class at a time; see `best_labels`.

Shapes: B batch, K classes, h x w scores, H x W image.
"""

from collections.abc import Sequence
from typing import Any

from mmengine.structures import BaseDataElement, PixelData
from torch import Tensor

from ..pytorch.best_labels import best_labels


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
