"""Layer normalization over the channels."""

import torch.nn.functional as F
from torch import Tensor

from .dispatch import stays_whole


@stays_whole(lambda x, *others: x.new_empty(x.shape))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.layer_norm` over the last dimension."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)
