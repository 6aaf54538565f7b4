"""Files to tensors: reads a checkpoint without running its code, and finds the model's tensors.

`files` knows the kinds of files, and which file of a folder is meant.
"""

import codecs
import collections
import pickle
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

import torch
from torch import Tensor, nn

from .downloads import local_file
from .files import INDEX_ENDING, describe_file, is_safetensors, listed, pick_from_folder, shards_of

# Keys under which training scripts store the tensors: moving averages, which are taken first, and
# others. `ema` is RT-DETR's key, `module` DeepSpeed's.
AVERAGES = ('state_dict_ema', 'model_ema', 'ema_state_dict', 'ema')
WRAPPERS = (*AVERAGES, 'state_dict', 'model', 'module')
MOST_WRAPPERS = 4  # nested
# What wrappers of single modules add to names: torch.compile, activation checkpointing, FSDP.
IN_NAMES = re.compile(r'\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.')
# Classes that checkpoints of mmengine and timm hold besides tensors and plain values.
INERT = (
    'argparse.Namespace',
    'builtins.getattr',
    'numpy.dtype',
    'numpy.ndarray',
    'numpy.core.multiarray._reconstruct',  # before NumPy 2
    'numpy.core.multiarray.scalar',
    'numpy._core.multiarray._reconstruct',
    'numpy._core.multiarray.scalar',
    'mmengine.logging.history_buffer.HistoryBuffer',
    'mmengine.optim.scheduler.param_scheduler.OneCycleParamScheduler',
)


class Inert:
    """Stands in for an object in a training's checkpoint that is not a tensor; does nothing."""

    def __new__(cls, *_args: object) -> 'Inert':
        return super().__new__(cls)

    def __setstate__(self, _state: object) -> None:
        pass


def read_checkpoint(path: Union[str, Path], map_location: str = 'cpu') -> dict:
    """Read a `.pth` or `.safetensors` file without running code from it.

    Objects other than tensors and plain values that mmengine and timm save become `Inert`.

    Args:
        path: a path, name or address, see `local_file`; or a folder with one checkpoint, which may
            be divided into several files.
        map_location: the device of the tensors.

    Raises:
        ConnectionError: the file cannot be downloaded.
        FileNotFoundError: there is no such file.
        ImportError: the file is a safetensors file, and the package safetensors is missing.
        ValueError: the file is damaged or of another kind, or holds objects that could run code; or
            a folder does not say which of its files is meant.

    Examples:
        >>> torch.save(CPVTPyramid('pcpvt_nano').state_dict(), 'nano.pth')
        >>> read_checkpoint('nano.pth')['patch_embeds.0.proj.weight'].shape
        torch.Size([32, 3, 4, 4])
    """
    path = local_file(path)
    if path.is_dir():
        path = pick_from_folder(path)
    if not path.name.endswith(INDEX_ENDING):
        return read_file(path, map_location)
    tensors = {}
    for shard in shards_of(path):
        tensors.update(read_file(shard, map_location))
    return tensors


def read_file(path: Path, map_location: str) -> dict:
    """Read one file; see `read_checkpoint`."""
    try:
        if is_safetensors(path):
            return load_safetensors(path, map_location)
        with warnings.catch_warnings():  # `describe_file` says what they are about
            warnings.simplefilter('ignore', UserWarning)
            checkpoint = load_tensors(path, map_location, [inert_class(name) for name in INERT])
    except ImportError:
        raise
    except Exception as error:  # whatever the bytes of a truncated or foreign file lead to
        if kind := describe_file(path):
            raise ValueError(f'{path} {kind}') from None
        unsafe = re.search(r'GLOBAL (\S+)', str(error))
        if isinstance(error, pickle.UnpicklingError) and unsafe:
            raise ValueError(
                f'{path} holds more than tensors: {unsafe[1]}. Such a file can run code when it '
                f'is loaded, so it is not'
            ) from None
        raise ValueError(f'{path} is not a complete checkpoint') from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f'{path} holds a {type(checkpoint).__name__}, not tensors by their names')
    return checkpoint


def load_safetensors(path: Path, map_location: str) -> dict:
    """The tensors of a safetensors file."""
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        if error.name != 'safetensors':
            raise
        raise ImportError(f'{path} needs safetensors; pip install safetensors') from None
    return load_file(path, device=map_location)


def inert_class(full_name: str) -> type[Inert]:
    """A class that stands in for the one of this name."""
    module, _, name = full_name.rpartition('.')
    return type(name, (Inert,), {'__module__': module})


def load_tensors(path: Path, map_location: str, others: Sequence[type]) -> Any:
    """`torch.load` of tensors, plain Python objects and these harmless classes."""
    if hasattr(torch.serialization, 'safe_globals'):
        with torch.serialization.safe_globals(list(others)):
            return torch.load(path, map_location=map_location, weights_only=True)
    # torch 2.1 to 2.4 has no public way to allow further classes, nor a public list of its own.
    known = dict(torch._weights_only_unpickler._get_allowed_globals())
    known['_codecs.encode'] = codecs.encode  # bytes in NumPy's arrays
    known['collections.Counter'] = collections.Counter  # of schedules
    known.update({f'{kind.__module__}.{kind.__name__}': kind for kind in others})

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full_name = f'{module}.{name}'.replace('__builtin__', 'builtins')  # of Python 2
            if full_name not in known:
                raise pickle.UnpicklingError(f'GLOBAL {full_name}')
            return known[full_name]

    restricted = SimpleNamespace(
        __name__='restricted', Unpickler=Unpickler, load=lambda f, **kw: Unpickler(f, **kw).load()
    )
    return torch.load(path, map_location=map_location, pickle_module=restricted)


def tensors_of(checkpoint: dict) -> dict[str, Tensor]:
    """The tensors in a checkpoint, without its wrappers and those of modules in names.

    Raises:
        ValueError: names or tensors are damaged, sharded, sparse or quantized.
    """
    checkpoint, _ = unwrapped(checkpoint)
    check_names(checkpoint)
    tensors: dict[str, Tensor] = {}
    for full_name, value in checkpoint.items():
        if not isinstance(value, Tensor):
            continue
        name = without_wrappers(full_name)
        if name in tensors:
            raise ValueError(f'{full_name[:100]} is in the checkpoint twice, also as {name[:100]}')
        tensors[name] = value
    for name, value in tensors.items():
        if type(value) not in (Tensor, nn.Parameter):
            kind = type(value).__name__
            raise ValueError(
                f'{name[:100]} is a {kind}; save plain tensors, such as a full state dict'
            )
        if value.layout != torch.strided or value.is_quantized:
            raise ValueError(f'{name[:100]} is sparse or quantized; only dense tensors load')
        if value.numel() > 2**32:
            raise ValueError(
                f'the checkpoint is damaged: {name[:100]} has {value.numel()} elements'
            )
    return tensors


def without_wrappers(name: str) -> str:
    """A name without what wrappers of single modules add to it; see `IN_NAMES`."""
    return IN_NAMES.sub('', name)


def unwrapped(checkpoint: dict) -> tuple[dict, str]:
    """Take the dict of tensors out of its wrappers.

    Returns:
        The dict, and a line that says which of several wrappers was taken, or ''.
    """
    choices = []
    for _ in range(MOST_WRAPPERS):
        wrappers = [name for name in WRAPPERS if holds_tensors(checkpoint.get(name))]
        if not wrappers:
            break
        if is_of_mmengine(checkpoint):
            wrappers.remove('ema_state_dict')
            choices.append(
                'taken from state_dict, which is the moving average; ema_state_dict holds the last '
                'weights'
            )
        elif len(wrappers) > 1:
            average = ' (the moving average)' if wrappers[0] in AVERAGES else ''
            choices.append(f'taken from {wrappers[0]}{average}, not from {listed(wrappers[1:])}')
        checkpoint = checkpoint[wrappers[0]]
    return checkpoint, '; '.join(choices)


def is_of_mmengine(checkpoint: dict) -> bool:
    """True if mmengine's EMAHook wrote a checkpoint. It swaps the average and the last weights."""
    if not all(holds_tensors(checkpoint.get(key)) for key in ('state_dict', 'ema_state_dict')):
        return False
    return 'steps' in checkpoint['ema_state_dict']


def holds_tensors(value: object) -> bool:
    """True for a dict of tensors, or of dicts that may hold them."""
    if not isinstance(value, dict):
        return False
    return any(isinstance(each, (Tensor, dict)) for each in value.values())


def contents_of(checkpoint: dict) -> str:
    """List the names in a checkpoint of another model, and say how to load a part of it."""
    contents = listed([str(name) for name in checkpoint])
    for name, value in checkpoint.items():
        if holds_tensors(value):
            return f'{contents}. Load a part that holds its tensors, such as {str(name)[:100]!r}'
    return contents


def check_names(names: Iterable) -> None:
    """Raise a ValueError unless all keys are strings."""
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f'the names of tensors must be strings, got {name!r}')
