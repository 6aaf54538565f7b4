"""All that knows mmengine, mmdet and mmseg. Importing it registers the backbone."""

from . import checkpoints  # noqa: F401 (registers the checkpoint schemes)
from .backbone import CPVTPyramid

__all__ = ['CPVTPyramid']
