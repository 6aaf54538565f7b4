"""All that knows mmengine, mmdet and mmseg. Importing it registers the backbone and what the tools
put into the configs that they run; `detection` and `segmentation` below it register the rest."""

from . import amp, checkpoints, distributed, resume  # noqa: F401 (they register what they hold)
from .backbone import CPVTPyramid

__all__ = ['CPVTPyramid']
