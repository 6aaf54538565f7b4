"""Files to tensors: reads a checkpoint without running its code, and finds the model's tensors."""

import codecs
import collections
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

import torch
from torch import Tensor

from .downloads import local_file

# Keys under which training scripts store the tensors, the moving average first. mmengine's EMAHook
# stores the average as `state_dict` and the last weights as `ema_state_dict`; DeepSpeed's key is
# `module`.
WRAPPERS = ('state_dict_ema', 'model_ema', 'state_dict', 'model', 'module', 'ema_state_dict')
PREFIXES = ('module.', 'backbone.')
MOST_WRAPPERS = 4  # nested
COMPILED = '_orig_mod.'  # in names, from torch.compile
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
        path: a path, name or address, see `local_file`.
        map_location: the device of the tensors.

    Raises:
        ConnectionError: the file cannot be downloaded.
        FileNotFoundError: there is no such file.
        ImportError: a package is missing that downloads or reads the file.
        ValueError: the file is damaged, or holds objects that could run code.

    Examples:
        >>> torch.save(CPVTPyramid('pcpvt_nano').state_dict(), 'nano.pth')
        >>> read_checkpoint('nano.pth')['patch_embeds.0.proj.weight'].shape
        torch.Size([32, 3, 4, 4])
    """
    path = local_file(path)
    try:
        if is_safetensors(path):
            from safetensors.torch import load_file

            return load_file(path, device=map_location)
        checkpoint = load_tensors(path, map_location, [inert_class(name) for name in INERT])
    except ImportError as error:
        raise ImportError(f'reading {path} needs safetensors; pip install safetensors') from error
    except Exception as error:  # whatever the bytes of a torn or foreign file lead to
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


def inert_class(full_name: str) -> type[Inert]:
    """A class that stands in for the one of this name."""
    module, _, name = full_name.rpartition('.')
    return type(name, (Inert,), {'__module__': module})


def is_safetensors(path: Path) -> bool:
    """True if a file, whatever its name, begins like a safetensors file: with the length of a
    header, 8 bytes, and the header, which is JSON."""
    with path.open('rb') as file:
        length = int.from_bytes(file.read(8), 'little')
        return file.read(1) == b'{' and length <= path.stat().st_size


def load_tensors(path: Path, map_location: str, others: Sequence[type]) -> Any:
    """`torch.load` of tensors, plain Python objects and these harmless classes."""
    if hasattr(torch.serialization, 'safe_globals'):
        with torch.serialization.safe_globals(list(others)):
            return torch.load(path, map_location=map_location, weights_only=True)
    # torch 2.1 to 2.4 has no public way to allow further classes.
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
    """The tensors of a model inside a checkpoint, without wrapper and prefix.

    Raises:
        ValueError: names or tensors are damaged, sparse or quantized.
    """
    checkpoint, _ = unwrapped(checkpoint)
    check_names(checkpoint)
    checkpoint = {name.replace(COMPILED, ''): value for name, value in checkpoint.items()}
    while prefix := prefix_of(checkpoint):  # two, if an average wraps DDP
        inner = {}
        classifier = {}  # mmpretrain has it next to the backbone
        for name, value in checkpoint.items():
            if name.startswith(prefix):
                inner[name.removeprefix(prefix)] = value
            elif name.startswith('head.'):
                classifier[name] = value
        checkpoint = inner | classifier
    tensors = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized:
            raise ValueError(f'{name[:100]} is sparse or quantized; only dense tensors load')
        if value.numel() > 2**32:
            raise ValueError(
                f'the checkpoint is damaged: {name[:100]} has {value.numel()} elements'
            )
    return tensors


def prefix_of(names: Iterable[str]) -> str:
    """The first of `PREFIXES` that some name has, or ''."""
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in names):
            return prefix
    return ''


def unwrapped(checkpoint: dict) -> tuple[dict, str]:
    """Take the dict of tensors out of its wrappers.

    Returns:
        The dict, and a line that says which of several wrappers was taken, or ''.
    """
    choice = ''
    for _ in range(MOST_WRAPPERS):
        wrappers = [name for name in WRAPPERS if holds_tensors(checkpoint.get(name))]
        if not wrappers:
            break
        taken, *others = wrappers
        if others:
            choice = f'taken from {taken}, not from {listed(others)}'
        checkpoint = checkpoint[taken]
    return checkpoint, choice


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


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first names, shortened, and how many more there are."""
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(name[:100] for name in names[:most]) + more
