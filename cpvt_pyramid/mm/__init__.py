"""The plugin for mmengine, MMDetection and MMSegmentation.

Importing it registers the backbones, an optimizer constructor, an optimizer wrapper, a hook for
fine-tuning and checkpoint schemes, provides mmcv's operators where mmcv has none, and changes
nothing else. `detection` and `segmentation` register each framework's data preprocessor.
"""

from ..mmcv_operators import provide

provide()  # before anything here imports mmdet or mmseg

from . import amp, checkpoints, fine_tuning, optim  # noqa: E402, F401 (they register)
from .backbone import CPVTPyramid, DenseCPVT  # noqa: E402

__all__ = ['CPVTPyramid', 'DenseCPVT']
