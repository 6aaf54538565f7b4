"""What makes a model fast on a CPU, asked for once.

Names that are private to PyTorch: `torch.ops.mkldnn._linear_pointwise`, oneDNN's product with a
GELU; `F.linear` takes MKL.
"""

from .winograd import use_winograd

__all__ = ['use_winograd']
