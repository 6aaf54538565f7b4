"""Position-aware pyramid backbones for detection and segmentation."""

from .archs import ARCHS, Arch
from .position import PosCNN
from .pyramid import CPVTPyramid
from .weights import load_weights

__all__ = ['ARCHS', 'Arch', 'CPVTPyramid', 'PosCNN', 'load_weights']
__version__ = '0.1.0'
