"""Checkpoint schemes for `init_cfg`, `load_from` and resume: safetensors files and `timm://`."""

from typing import Optional

from mmengine.runner import CheckpointLoader

from ..weights import read_checkpoint


@CheckpointLoader.register_scheme(prefixes=r'.*\.safetensors$')
def load_from_safetensors(filename: str, map_location: Optional[str] = None) -> dict:
    """A local safetensors file. mmengine's local loader reads pickles alone."""
    return read_checkpoint(filename, map_location or 'cpu')


@CheckpointLoader.register_scheme(prefixes='timm://')
def load_from_timm(filename: str, map_location: Optional[str] = None) -> dict:
    """`timm://NAME`: timm's weights of this name on the Hugging Face hub.

    Raises:
        ConnectionError: the hub cannot be reached and the file is not in the local cache, or the
            hub has no model of that name.
    """
    from huggingface_hub import hf_hub_download

    name = filename.removeprefix('timm://')
    try:
        path = hf_hub_download(f'timm/{name}', 'model.safetensors')
    except Exception as error:  # the hub's client raises many, from several libraries
        raise ConnectionError(
            f'cannot load {filename} ({type(error).__name__}): offline, or no such model? Download '
            f'model.safetensors of timm/{name} elsewhere and name the file in '
            f'init_cfg.checkpoint, or train from scratch with model.backbone.init_cfg=None'
        ) from error
    return read_checkpoint(path, map_location or 'cpu')
