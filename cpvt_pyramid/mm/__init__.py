"""All that knows mmengine, mmdet and mmseg. Importing it registers the backbones and what the
tools put into the configs that they run; `detection` and `segmentation` below it register the
rest."""

from . import amp, checkpoints, optim  # noqa: F401 (they register things)
from .backbone import CPVT, CPVTPyramid

__all__ = ['CPVT', 'CPVTPyramid']
