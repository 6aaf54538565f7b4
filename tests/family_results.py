"""What a detector or segmentor of tests/models/families.py computes for a batch."""

import copy
import random

import numpy as np
import torch

from tests.models.families import outputs


def results(model: torch.nn.Module, data: dict) -> dict[str, list[torch.Tensor]]:
    """Raw outputs, losses, gradients of the backbone, and predictions."""
    state = copy.deepcopy(model.state_dict())  # of BatchNorm, too
    found = {'outputs': [output.tensor for output in outputs(model, data)]}

    torch.manual_seed(0)  # samplers and denoising queries
    np.random.seed(0)
    random.seed(0)
    model.train().zero_grad()
    losses = model(data['inputs'], copy.deepcopy(data['data_samples']), mode='loss')
    total, logs = model.parse_losses(losses)
    total.backward()
    found['losses'] = list(logs.values())
    gradients = {name: p.grad for name, p in model.backbone.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    assert all(gradient.any() for gradient in gradients.values())
    found['gradients'] = list(gradients.values())

    model.eval().load_state_dict(state, strict=False)  # DDQ got more modules in training
    torch.manual_seed(0)  # SegNeXt's head starts from random matrices
    with torch.no_grad():
        samples = model(data['inputs'], copy.deepcopy(data['data_samples']), mode='predict')
    predicted = [
        getattr(sample, kind).to_dict()
        for sample in samples
        for kind in ('pred_instances', 'pred_sem_seg', 'pred_panoptic_seg', 'seg_logits')
        if kind in sample
    ]
    assert len(predicted) >= len(samples)
    found['predictions'] = [
        value.float() for fields in predicted for value in fields.values() if torch.is_tensor(value)
    ]
    return found


def assert_same(ours: dict, expected: dict) -> None:
    """Gradients and predictions as a whole: a deformable convolution has a kink at every cell, and
    a mask changes where its probability is 0.5, so that rounding can change some values by much. Of
    memory that is read in another order, all values are others."""
    for kind in ours:
        assert ours[kind] and len(ours[kind]) == len(expected[kind])
        for mine, theirs in zip(ours[kind], expected[kind]):
            assert kind == 'outputs' or mine.isfinite().all(), kind
            if kind in ('outputs', 'losses'):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
            else:
                assert mine.shape == theirs.shape
                assert (mine - theirs).norm() <= 0.02 * theirs.norm() + 1e-4, kind
