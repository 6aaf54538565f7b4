"""Checkpoints that mmengine's own loaders do not read, for `init_cfg`, `load_from` and resume."""

from typing import Any, Optional
from urllib.error import URLError

from mmengine.runner import CheckpointLoader
from mmengine.runner.checkpoint import load_from_http

from ..weights import read_checkpoint


@CheckpointLoader.register_scheme(prefixes=r'.*\.safetensors$')
def load_from_safetensors(filename: str, map_location: Optional[str] = None) -> dict:
    """A local safetensors file; mmengine's local loader reads pickles alone."""
    return read_checkpoint(filename, map_location or 'cpu')


@CheckpointLoader.register_scheme(prefixes='timm://')
def load_from_timm(filename: str, map_location: Optional[str] = None) -> dict:
    """`timm://NAME`: the weights that the Hugging Face hub holds under timm's name.

    Raises:
        ConnectionError: the hub is out of reach and the file is not in the local cache, or the
            hub has no model of that name.
    """
    from huggingface_hub import hf_hub_download

    name = filename.removeprefix('timm://')
    try:
        path = hf_hub_download(f'timm/{name}', 'model.safetensors')
    except Exception as error:  # the hub's client has many, from several libraries
        raise no_weights(
            f'for {filename} ({type(error).__name__}). Offline, or no such model?',
            f'model.safetensors of timm/{name}',
        ) from error
    return read_checkpoint(path, map_location or 'cpu')


@CheckpointLoader.register_scheme(prefixes=('http://', 'https://'), force=True)
def load_from_address(filename: str, map_location: Optional[str] = None, **options: Any) -> dict:
    """mmengine's own download, with an error that says what to do.

    Raises:
        ConnectionError: the address is out of reach.
    """
    try:
        return load_from_http(filename, map_location, **options)
    except URLError as error:
        raise no_weights(f'from {filename} ({error.reason}). Offline?', 'it') from error


def no_weights(problem: str, file: str) -> ConnectionError:
    """The problem, and what to do without a connection: what to download elsewhere."""
    return ConnectionError(
        f'no weights {problem} Download {file} elsewhere and name the file in '
        f'init_cfg.checkpoint, or train from scratch with model.backbone.init_cfg=None'
    )
