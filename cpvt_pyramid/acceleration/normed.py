"""A layer norm as the first step of a function, in training.

Autograd saves the tokens for the layer norm, and its result for the layers after it. A function of
both saves the tokens alone: its backward pass recomputes the layer norm, which takes little time.

Shapes: tokens are (..., C).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from torch import Tensor, nn

from ..bfloat16 import layer_norm, layer_norm_gradients, layer_norm_with_statistics
from ..layers import LayerNorm
from ..plain_layers import acts_alone, plain_class
from .ordinary import NotPlain


class TrainedNorm(NamedTuple):
    """The parameters of a layer norm, of any dtypes. Without weight and bias it does nothing."""

    weight: Optional[Tensor] = None  # (C,)
    bias: Optional[Tensor] = None  # (C,)
    eps: float = 0.0


NO_NORM = TrainedNorm()


class Normalized(NamedTuple):
    """The result of a layer norm, in the dtype of the tokens, and what its gradient needs."""

    out: Tensor
    mean: Optional[Tensor] = None  # (..., 1)
    inverse_deviation: Optional[Tensor] = None  # (..., 1)


def trained_norm_of(layer: nn.Module) -> TrainedNorm:
    """The parameters of a layer norm over the channels whose call does nothing but apply them.

    Raises:
        NotPlain: it is another layer.
    """
    norm: Any = layer
    if plain_class(norm) is not LayerNorm or not acts_alone(norm) or norm.bias is None:
        raise NotPlain
    if norm.normalized_shape != norm.weight.shape or norm.weight.dim() != 1:
        raise NotPlain
    return TrainedNorm(norm.weight, norm.bias, float(norm.eps))


def normalize(x: Tensor, norm: TrainedNorm) -> Normalized:
    """A layer norm of tokens, without gradient."""
    weight, bias, eps = norm
    if weight is None:
        return Normalized(x)
    return Normalized(*layer_norm_with_statistics(x, weight.shape, weight, bias, eps))


def differentiable_norm(x: Tensor, norm: TrainedNorm) -> Tensor:
    """A layer norm of tokens, which can be differentiated any number of times."""
    if norm.weight is None:
        return x
    return layer_norm(x, norm.weight.shape, *norm)


def norm_gradients(
    grad: Optional[Tensor],
    x: Tensor,
    norm: TrainedNorm,
    normalized: Normalized,
    needed: Sequence[bool],
) -> Sequence[Optional[Tensor]]:
    """The gradients of the tokens x and of weight and bias, where needed.

    `grad` is that of the result. None: none of them is needed.
    """
    _, mean, inverse_deviation = normalized
    if grad is None or norm.weight is None or mean is None or inverse_deviation is None:
        return grad, None, None
    shape = norm.weight.shape
    return layer_norm_gradients(
        grad, x, shape, mean, inverse_deviation, norm.weight, norm.bias, needed
    )
