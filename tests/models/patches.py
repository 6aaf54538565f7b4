"""A stand-in for backbones in tests of what comes after them."""

from typing import Optional

from torch import Tensor, nn


class Patches(nn.Module):
    """Takes the place of a backbone, with maps of its shapes. It is captured in no time, and the
    backbone's own graphs are tested elsewhere."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.channels, self.strides = backbone.channels, backbone.strides
        self.convs = nn.ModuleList(
            nn.Conv2d(3, dim, stride, stride, stride // 2)
            for dim, stride in zip(self.channels, self.strides)
        )

    def forward(self, x: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        return tuple(conv(x[:, :3]) for conv in self.convs)  # without mm's channel of validity
