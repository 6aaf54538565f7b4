"""Where position comes from: the PEG of CPVT (arXiv 2102.10882, section 3.2)."""

from typing import Optional

from torch import Tensor, nn


class PosCNN(nn.Module):
    """Positional Encoding Generator: a zero-padded depthwise convolution, added to the tokens.

    The zeros beyond the border are what absolute position is read from, so that the padding of
    a batch, too, must look like zeros: tokens that are not `inside` are set to zero first.

    Args:
        dim: channels of the tokens.
        kernel_size: side of the kernel, odd; the paper's is 3.
    """

    def __init__(self, dim: int, kernel_size: int = 3) -> None:
        super().__init__()
        conv = nn.Conv2d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.proj = nn.Sequential(conv)  # a Sequential for the published name, proj.0

    def forward(self, x: Tensor, inside: Optional[Tensor] = None) -> Tensor:
        """Tokens (B, H, W, C) with their position added, in the same shape."""
        if inside is not None:
            x = x.masked_fill(~inside, 0)
        return x + self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
