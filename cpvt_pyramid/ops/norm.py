"""Layer normalization over the channels."""

import torch.nn.functional as F
from torch import Tensor, nn

from .dispatch import opaque_when_compiled


@opaque_when_compiled(lambda x, *others: x.new_empty(x.shape))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.layer_norm` over the last dimension."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, computed by `layer_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)
