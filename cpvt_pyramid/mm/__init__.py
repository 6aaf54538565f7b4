"""The plugin for mmengine, MMDetection and MMSegmentation.

Importing it registers the backbones, an optimizer constructor, an optimizer wrapper, a hook for
fine-tuning and checkpoint schemes, and changes nothing else. `detection` and `segmentation`
register each framework's data preprocessor.
"""

from . import amp, checkpoints, fine_tuning, optim  # noqa: F401 (they register)
from .backbone import CPVTPyramid, DenseCPVT

__all__ = ['CPVTPyramid', 'DenseCPVT']
