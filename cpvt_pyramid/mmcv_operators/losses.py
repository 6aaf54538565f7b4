"""Focal loss ([1708.02002](https://arxiv.org/abs/1708.02002), section 3.2).

mmdet calls these on a GPU; on a CPU it has a function of its own.
"""

import torch
from torch import Tensor

LEAST = torch.finfo(torch.float32).tiny  # keeps logarithms finite


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """
    Args:
        input: logits (N, C).
        target: classes (N,); C is the background.
        weight: of the classes, (C,), or empty.
        output: (N, C), filled with the loss.
    """
    p = input.float().sigmoid()
    positive = -alpha * (1 - p) ** gamma * p.clamp(min=LEAST).log()
    negative = -(1 - alpha) * p**gamma * (1 - p).clamp(min=LEAST).log()
    loss = torch.where(is_class(target, input), positive, negative)
    output.copy_(loss * class_weights(weight, target))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """`grad_input` is filled with the derivative of the loss by `input`."""
    p = input.float().sigmoid()
    log_p = p.clamp(min=LEAST).log()
    log_rest = (1 - p).clamp(min=LEAST).log()
    positive = -alpha * (1 - p) ** gamma * (1 - p - gamma * p * log_p)
    negative = -(1 - alpha) * p**gamma * (gamma * (1 - p) * log_rest - p)
    grad = torch.where(is_class(target, input), positive, negative)
    grad_input.copy_(grad * class_weights(weight, target))


def softmax_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """
    Args:
        input: probabilities (N, C).
        target: classes (N,); the loss of negative ones is 0.
        weight: of the classes, (C,), or empty.
        output: (N,), filled with the loss.
    """
    p = probability_of(target, input)
    loss = -alpha * (1 - p) ** gamma * p.clamp(min=LEAST).log()
    loss = loss * class_weights(weight, target)[:, 0]
    output.copy_(torch.where(target >= 0, loss, 0))


def softmax_focal_loss_backward(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    buff: Tensor,
    grad_input: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """`grad_input` (N, C) is filled with the derivative of the loss by the logits, of which `input`
    are the probabilities; `buff` (N,) with p times the derivative by the target's probability p."""
    p = probability_of(target, input)
    log_p = p.clamp(min=LEAST).log()
    # (1 - p)**(gamma - 1) * p, which is infinite for p = 1 and gamma < 1, as in the operator.
    slope = alpha * (gamma * (1 - p) ** (gamma - 1) * p * log_p - (1 - p) ** gamma)
    slope = slope * class_weights(weight, target)[:, 0]
    slope = torch.where(target >= 0, slope, 0)
    buff.copy_(slope)
    grad_input.copy_(slope[:, None] * (is_class(target, input).float() - input.float()))


def is_class(target: Tensor, input: Tensor) -> Tensor:
    """(N, C), whether a column is the row's target."""
    return target[:, None] == torch.arange(input.shape[1], device=input.device)


def probability_of(target: Tensor, probabilities: Tensor) -> Tensor:
    """(N,), that of the target; of class 0 where there is none."""
    return probabilities.float().gather(1, target.clamp(min=0)[:, None])[:, 0]


def class_weights(weight: Tensor, target: Tensor) -> Tensor:
    """(N, 1), or a 1 if there are no weights. The background has no weight of its own: 1."""
    if weight.numel() == 0:
        return weight.new_ones(1, 1, dtype=torch.float32)
    padded = torch.cat([weight.float(), weight.new_ones(1, dtype=torch.float32)])
    return padded[torch.where(target < 0, len(weight), target)][:, None]
