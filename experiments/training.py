"""How the experiments train: the schedule, what counts as failed, and what names a run's file."""

import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics.functional.classification import multiclass_jaccard_index

FORMAT = 2  # increased when the same settings give other results


@contextmanager
def one_thread() -> Iterator[None]:
    """Make sums independent of the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def muon_and_adamw(
    matrices: Sequence[nn.Parameter], model: nn.Module, lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the given matrices of a model, if any, AdamW for the others.

    Muon's steps are scaled to the size of AdamW's (arXiv 2502.16982), so that both have one
    learning rate. Vectors have no weight decay.
    """
    by_muon = set(matrices)
    others = [p for p in model.parameters() if p.requires_grad and p not in by_muon]
    groups = [
        dict(params=[p for p in others if p.ndim > 1]),
        dict(params=[p for p in others if p.ndim <= 1], weight_decay=0.0),
    ]
    decay = dict(lr=lr, weight_decay=weight_decay)
    adamw = torch.optim.AdamW(groups, **decay)
    if not matrices:
        return [adamw]
    return [torch.optim.Muon(matrices, adjust_lr_fn='match_rms_adamw', **decay), adamw]


def optimize(
    optimizers: Sequence[torch.optim.Optimizer],
    loss_at: Callable[[int], Tensor],
    steps: int,
    warm_up: float,
    clip: float,
) -> list[float]:
    """Train for one cycle of the learning rate; returns the losses, means over tenths of the steps.

    Args:
        optimizers: of the model's parameters, with the peak learning rates.
        loss_at: the loss of a step, from 0.
        steps: their number; a loss that is not finite ends the training.
        warm_up: share of the steps before the peak.
        clip: largest norm of the gradients.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group['params']]
    schedules = []
    for optimizer in optimizers:
        peaks = [group['lr'] for group in optimizer.param_groups]
        schedules.append(OneCycleLR(optimizer, peaks, steps, pct_start=warm_up))
    losses = []
    for step in range(steps):
        loss = loss_at(step)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, clip)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
    tenths = np.array_split(losses, min(10, len(losses)))
    return [float(np.mean(tenth)) for tenth in tenths]


def failure_of(losses: Sequence[float]) -> str:
    """Why a run counts as failed, or ''. Its metrics enter the tables all the same."""
    if not all(map(math.isfinite, losses)):
        return 'the loss is not finite'
    if losses[-1] >= losses[0]:
        return 'the loss did not fall'
    return ''


def mean_iou(predicted: Tensor, pixels: Tensor, classes: int) -> float:
    """The mean over the classes of intersection over union, of all pixels together."""
    return float(multiclass_jaccard_index(predicted, pixels, classes))


# Files


def determined(settings: Any) -> dict[str, Any]:
    """The fields that determine a run, of settings, a dataclass: all that it compares."""
    compared = {one.name for one in fields(settings) if one.compare}
    return {name: value for name, value in asdict(settings).items() if name in compared}


def digest(settings: Any, label: str) -> str:
    """A file name for what settings, a dataclass, determine; it begins with the label."""
    text = json.dumps({'format': FORMAT, **determined(settings)}, sort_keys=True)
    hashed = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f'{label}-{hashed}'


def versions() -> dict[str, dict[str, str]]:
    """What a result was computed with."""
    import skimage
    import sklearn

    from cpvt_pyramid import __version__

    packages = {
        'python': platform.python_version(),
        'cpvt_pyramid': __version__,
        'torch': torch.__version__,
        'numpy': np.__version__,
        'scikit-image': skimage.__version__,
        'scikit-learn': sklearn.__version__,
    }
    return {'versions': packages}
