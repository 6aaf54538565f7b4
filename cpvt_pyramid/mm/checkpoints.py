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
            f'cannot load {filename}: the hub cannot be reached, or has no such model '
            f'({type(error).__name__}). Download model.safetensors of timm/{name} elsewhere and '
            f'set init_cfg.checkpoint to the file, or train from scratch with '
            f'model.backbone.init_cfg=None'
        ) from error
    return read_checkpoint(path, map_location or 'cpu')
