"""Checkpoint schemes for `init_cfg`, `load_from` and resume: what mmengine cannot read itself."""

from typing import Optional

from mmengine.runner import CheckpointLoader

from ..checkpoints.reading import read_checkpoint
from ..tasks.trained import TRAINED, weights_of

SAFETENSORS = (r'https?://.*\.safetensors$', r'.*\.safetensors$')
NAMES = tuple(f'{name}$' for name in TRAINED)


@CheckpointLoader.register_scheme(prefixes=['cpvt://', 'timm://', 'hf://', *SAFETENSORS, *NAMES])
def load_from_cpvt_pyramid(filename: str, map_location: Optional[str] = None) -> dict:
    """`cpvt://NAME`, `timm://NAME`, `hf://OWNER/REPO/FILE`, safetensors files, and trained models
    by name."""
    return read_checkpoint(weights_of(filename), map_location or 'cpu')
