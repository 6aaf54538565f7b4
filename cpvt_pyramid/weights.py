"""Checkpoints: their formats, and how they are converted when a model loads them.

`prepare_state_dict` runs first in every `load_state_dict` of a model (`LoadsCheckpoints`), so that
torch, timm, mmengine's `Pretrained`, `load_from` and `resume` all read the same files:
  - wrappers (`state_dict`, `model`, ...) and prefixes (`module.`, `backbone.`) are removed; of
    several wrappers the first in `WRAPPERS` is taken, and the report says so;
  - the names of another format, recognized by its keys, are mapped to ours, which are those of the
    Twins authors and of timm;
  - what a backbone does not have is dropped: the classifier, and stages that were not built;
  - the stage norms of SVT, which classification checkpoints do not hold, keep their values, and
    so do PEGs that were added at zero.

A checkpoint of another architecture is an error, wherever it is loaded.
"""

import codecs
import collections
import functools
import logging
import math
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor, nn

from .archs import ARCHS, COLUMNAR_ARCHS
from .downloads import local_file

# Keys under which training scripts store the tensors, the moving average first. mmengine's EMAHook
# stores the average as `state_dict` and the last weights as `ema_state_dict`; DeepSpeed's key is
# `module`.
WRAPPERS = ('state_dict_ema', 'model_ema', 'state_dict', 'model', 'module', 'ema_state_dict')
PREFIXES = ('module.', 'backbone.')
MOST_WRAPPERS = 4  # inside of each other
COMPILED = '_orig_mod.'  # torch.compile puts it into the names of what it wraps
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Format(NamedTuple):
    """How a family of checkpoint files names and shapes the tensors of our models."""

    mark: str  # regular expression: some key of such a file, and of no other, matches it
    holds: str  # regular expression: our names of what it has a place for, the classifier aside
    # (ours, theirs): the beginning of a key or, with a dot in front, what stands inside of it.
    # i is the stage, j the block; {i+1} counts from one.
    names: tuple[tuple[str, str], ...]
    in_proj: bool = False  # q and kv of global attention are one tensor, rows [q; kv]
    pointwise: bool = False  # the MLP's weights are those of 1x1 convolutions
    flat_tables: bool = False  # tables are (1, N, C)
    class_entry: bool = False  # the last table has a class token's entry in front of the rest
    prefix: str = ''  # of all but the head


PEG_PYRAMID = r'(patch_embeds|blocks|norm_list)\.|pos_block\.\d+\.proj\.0\.(weight|bias)$'
COLUMN = r'(patch_embed|pos_embed|blocks)\.'
TABLE_PYRAMID = r'(patch_embeds|pos_embeds)\.|blocks\.\d+\.\d+\.(?!attn\.qkv)'
# Rows that models of the mm packages have in common.
MM_MLP = (('.mlp.fc1.', '.ffn.layers.0.0.'), ('.mlp.fc2.', '.ffn.layers.1.'))
MM_PYRAMID = (
    ('patch_embeds.{i}.proj.', 'patch_embeds.{i}.projection.'),
    ('pos_block.{i}.proj.0.', 'position_encodings.{i}.proj.'),
    *MM_MLP,
)


FORMATS = {
    'mmseg': Format(  # mmsegmentation's PCPVT and SVT
        r'layers\.\d+\.\d+\.(norm1|attn)\.',
        PEG_PYRAMID,
        (*MM_PYRAMID, ('blocks.{i}.{j}.', 'layers.{i}.{j}.')),
        in_proj=True,
    ),
    'mmpretrain': Format(  # mmpretrain's PCPVT and SVT
        r'stages\.\d+\.\d+\.',
        PEG_PYRAMID,
        (
            *MM_PYRAMID,
            ('blocks.{i}.{j}.', 'stages.{i}.{j}.'),
            ('norm_list.{i}.', 'norm_after_stage{i}.'),
            ('head.', 'head.fc.'),
        ),
        prefix='backbone.',
    ),
    'mmdet': Format(  # mmdetection's PyramidVisionTransformer; a stage is [patches, blocks]
        r'layers\.\d+\.1\.\d+\.',
        TABLE_PYRAMID,
        (
            ('patch_embeds.{i}.proj.', 'layers.{i}.0.projection.'),
            ('patch_embeds.{i}.norm.', 'layers.{i}.0.norm.'),
            ('pos_embeds.{i}.table', 'layers.{i}.1.0.pos_embed'),
            ('blocks.{i}.{j}.', 'layers.{i}.1.{j+1}.'),
            ('.mlp.fc1.', '.ffn.layers.0.'),
            ('.mlp.fc2.', '.ffn.layers.3.'),
        ),
        in_proj=True,
        pointwise=True,
        flat_tables=True,
    ),
    'pvt': Format(  # PVT's authors
        r'patch_embed1\.',
        TABLE_PYRAMID,
        (
            ('patch_embeds.{i}.', 'patch_embed{i+1}.'),
            ('pos_embeds.{i}.table', 'pos_embed{i+1}'),
            ('blocks.{i}.{j}.', 'block{i+1}.{j}.'),
        ),
        flat_tables=True,
        class_entry=True,
    ),
    'mmpretrain_vit': Format(  # mmpretrain's VisionTransformer
        r'layers\.\d+\.ln1\.',
        COLUMN,
        (
            ('patch_embed.proj.', 'patch_embed.projection.'),
            ('blocks.{j}.norm1.', 'layers.{j}.ln1.'),
            ('blocks.{j}.norm2.', 'layers.{j}.ln2.'),
            ('blocks.{j}.', 'layers.{j}.'),
            *MM_MLP,
            ('norm.', 'ln1.'),
            ('pos_embed.table', 'pos_embed'),
            ('head.', 'head.layers.head.'),
        ),
        flat_tables=True,
        class_entry=True,
        prefix='backbone.',
    ),
    'vit': Format(  # DeiT's authors, and timm's ViT
        r'pos_embed$',
        COLUMN,
        (('pos_embed.table', 'pos_embed'),),
        flat_tables=True,
        class_entry=True,
    ),
}
# Classes that checkpoints of mmengine and timm hold besides tensors and plain values.
INERT = (
    'argparse.Namespace',
    'builtins.getattr',
    'numpy.dtype',
    'numpy.ndarray',
    *(
        f'numpy.{core}.multiarray.{name}'
        for core in ('core', '_core')
        for name in ('_reconstruct', 'scalar')
    ),
    'mmengine.logging.history_buffer.HistoryBuffer',
    'mmengine.optim.scheduler.param_scheduler.OneCycleParamScheduler',
)
# What tells one architecture from another; position, norms and the classifier are a choice.
BODY = re.compile(r'(patch_embeds?|blocks)\.(?!(\d+\.)+attn\.(position|peg)\.)')
PEG_KEY = re.compile(r'(more_)?pos_block\.|.*\.attn\.peg\.')
POSITION = re.compile(r'(pos_block|more_pos_block|pos_embeds?)\.')
FIRST_CONV = re.compile(r'patch_embed(s\.0)?\.proj\.weight$')
RGB = ('red', 'green', 'blue')
CLASSIFIER = re.compile(r'(norm|head)\.|cls_token$|cls_pos$')
FIELD = re.compile(r'\{(\w)(\+1)?\}')


class LoadReport(NamedTuple):
    """What happened to the tensors of a checkpoint, under the names of the model.

    Examples:
        >>> weights = CPVTPyramid('pcpvt_nano').state_dict() | {'head.bias': torch.zeros(10)}
        >>> torch.save(weights, 'classifier.pth')
        >>> report = load_weights(CPVTPyramid('pcpvt_nano'), 'classifier.pth')
        >>> len(report.loaded), len(report.kept), report.ignored
        (160, 0, ['head.bias'])
    """

    loaded: list[str]  # in both, with the same shape
    kept: list[str]  # only in the model: these keep their values
    unused: list[str]  # only in the checkpoint
    mismatched: list[str]  # in both, with different shapes
    inflated: str = ''  # how the first convolution was made from that of RGB, if it was
    ignored: Sequence[str] = ()  # only in the checkpoint, and expected there, such as a classifier
    choice: str = ''  # which of several wrappers in the checkpoint was taken, if there were several

    @property
    def misfit(self) -> Optional[str]:
        """Why the checkpoint is not that of the whole model; None if it is."""
        if self.kept:
            return f'lacks: {listed(self.kept)}'
        if self.unused:
            return f'has more than the model: {listed(self.unused)}'
        if self.mismatched:
            return f'has other shapes: {listed(self.mismatched)}'
        return None

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.kept) + len(self.mismatched)
        parts = [f'loaded {len(self.loaded)} of {total} tensors']
        for what, names in (('missing', self.kept), ('unused', [*self.unused, *self.ignored])):
            parts.append(f'{len(names)} {what}' + (f' ({listed(names)})' if names else ''))
        remarks = [remark for remark in (self.inflated, self.choice) if remark]
        return '; '.join([', '.join(parts), *remarks])


class Inert:
    """Stands in for an object in a training's checkpoint that is not a tensor; does nothing."""

    def __new__(cls, *_args: object) -> 'Inert':
        return super().__new__(cls)

    def __setstate__(self, _state: object) -> None:
        pass


def load_weights(model: 'LoadsCheckpoints', path: Union[str, Path]) -> LoadReport:
    """Load a checkpoint into a model of this package.

    Args:
        model: a backbone or a classifier, of timm's registry, too.
        path: a `.pth` or `.safetensors` file in any format that this module reads: a path, name
            or address, see `downloads.local_file`.

    Raises:
        ConnectionError: the file cannot be downloaded.
        FileNotFoundError: there is no such file.
        ImportError: a package is missing that downloads or reads the file.
        TypeError: the model is not of this package, such as the detector that a backbone is part
            of.
        ValueError: the file is damaged or empty, or the tensors have another architecture.

    Examples:
        >>> torch.save(CPVTPyramid('pcpvt_nano').state_dict(), 'nano.pth')
        >>> print(load_weights(CPVTPyramid('pcpvt_nano'), 'nano.pth'))
        loaded 160 of 160 tensors, 0 missing, 0 unused
    """
    if not isinstance(model, LoadsCheckpoints):
        raise TypeError(
            f'load_weights needs a backbone or a classifier of this package, got a '
            f'{type(model).__name__}; pass the part that is one, such as model.backbone'
        )
    checkpoint = read_checkpoint(path)
    try:
        report = prepare_state_dict(model, checkpoint, '')
        model.load_state_dict(checkpoint, strict=False)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None
    if not report.loaded:
        raise ValueError(f'{path} is empty')
    return report


def read_checkpoint(path: Union[str, Path], map_location: str = 'cpu') -> dict:
    """Read a `.pth` or `.safetensors` file, by a path, name or address as in `load_weights`.

    No code from it runs. Other objects that mmengine and timm save become `Inert`.

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
        names = (name.rpartition('.') for name in INERT)
        inert = [type(name, (Inert,), {'__module__': module}) for module, _, name in names]
        checkpoint = load_tensors(path, map_location, inert)
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


def is_safetensors(path: Path) -> bool:
    """True if a file, whatever its name, begins as a safetensors file: with the length of a header,
    8 bytes, and the header, which is JSON."""
    with path.open('rb') as file:
        length = int.from_bytes(file.read(8), 'little')
        return file.read(1) == b'{' and length <= path.stat().st_size


def load_tensors(path: Path, map_location: str, others: Sequence[type]) -> Any:
    """`torch.load` of tensors, plain Python objects and these harmless classes."""
    if hasattr(torch.serialization, 'safe_globals'):
        with torch.serialization.safe_globals(list(others)):
            return torch.load(path, map_location=map_location, weights_only=True)
    known = dict(torch._weights_only_unpickler._get_allowed_globals())  # torch 2.1 to 2.4
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


class LoadsCheckpoints(nn.Module):
    """A model whose `load_state_dict` reads every format of this module.

    Arguments are those of `CPVTPyramid`.
    """

    peg_starts_at_zero = False

    def __init__(self, in_channels: int, rgb_weights: Union[str, Sequence[str], None]) -> None:
        super().__init__()
        check_rgb_weights(rgb_weights, in_channels)
        self.in_channels = in_channels
        self.rgb_weights = rgb_weights

    def ignores_key(self, name: str) -> bool:
        """True if published checkpoints hold a tensor that this model leaves out."""
        raise NotImplementedError

    def may_be_missing(self, name: str) -> bool:
        """True if a tensor keeps its value when a checkpoint does not hold it: of a PEG that starts
        at zero."""
        return self.peg_starts_at_zero and bool(PEG_KEY.match(name))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *others: Any) -> None:
        if not is_own_quantized_state(self, state_dict, prefix):
            self.log_load_report(prepare_state_dict(self, state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *others)

    def log_load_report(self, report: LoadReport) -> None:
        """Log what happened to the tensors of a checkpoint."""
        logging.getLogger(__name__).info('%s', report)


def prepare_state_dict(module: LoadsCheckpoints, state_dict: dict, prefix: str) -> LoadReport:
    """Convert a checkpoint to the names and shapes of a model, in place.

    The prefix is that of the module's names in the checkpoint: '' or, in a larger model, the
    module's name and a dot.

    Raises:
        ValueError: the checkpoint is damaged or of another architecture. Nothing is changed.
    """
    check_names(state_dict)
    ours = nn.Module.state_dict(module)
    theirs = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
    if not theirs:  # a checkpoint of something else: a neck, a head
        return compare(ours, {})
    inner, choice = unwrapped(theirs)
    theirs = to_ours(tensors_of(inner))
    if not any(BODY.match(name) for name in theirs):
        raise ValueError(
            f'the checkpoint has no tensor of this backbone, but {contents_of(inner)}. '
            f'Check the file and, in an init_cfg, the prefix'
        )
    ignored = [k for k in theirs if k not in ours and module.ignores_key(k)]
    theirs = {k: v for k, v in theirs.items() if k not in ignored}
    theirs, how = inflated(theirs, ours, module.rgb_weights)
    report = compare(ours, theirs)._replace(inflated=how, ignored=ignored, choice=choice)
    if objection := objection_to(ours, theirs, report):
        raise ValueError(objection)

    for name in report.kept:
        if module.may_be_missing(name):
            theirs[name] = start_of(name, ours[name], like=next(iter(theirs.values())))
    for name in [name for name in state_dict if name.startswith(prefix)]:
        del state_dict[name]
    state_dict.update({prefix + name: value for name, value in theirs.items()})
    return report


def start_of(name: str, ours: Tensor, like: Tensor) -> Tensor:
    """The value of a stage norm, or of a PEG that starts at zero, that a checkpoint lacks: the
    model's, or its initial one if the model is on the meta device."""
    if not ours.is_meta:
        return ours
    is_scale = name.startswith('norm_list.') and name.endswith('.weight')
    return torch.full(ours.shape, float(is_scale), dtype=like.dtype, device=like.device)


def is_own_quantized_state(module: nn.Module, state_dict: dict, prefix: str) -> bool:
    """True if the state of a quantized model, part of which is no tensors, returns to it.

    There is nothing to convert then.
    """
    ours = nn.Module.state_dict(module, prefix=prefix)
    is_quantized = not all(isinstance(value, Tensor) for value in ours.values())
    return is_quantized and ours.keys() <= state_dict.keys()


def check_rgb_weights(rgb_weights: Union[str, Sequence[str], None], in_channels: int) -> None:
    """Raise a ValueError unless weights for RGB can be made to fit `in_channels` in this way."""
    if rgb_weights is None:
        return
    if isinstance(rgb_weights, str):
        is_known = rgb_weights in ('mean', 'repeat')
    else:
        names = set(rgb_weights)
        is_known = len(rgb_weights) == len(names) == in_channels and not names.isdisjoint(RGB)
    if in_channels == 3 or not is_known:
        raise ValueError(
            f"rgb_weights needs in_channels other than 3, and must be 'mean', 'repeat' or the "
            f'different names of the bands, some of them {", ".join(RGB)}; got {rgb_weights!r} for '
            f'{in_channels} channels'
        )


def inflated(
    theirs: dict[str, Tensor], ours: dict[str, Tensor], rgb_weights: Union[str, Sequence[str], None]
) -> tuple[dict[str, Tensor], str]:
    """A checkpoint whose first convolution, of RGB, is made to fit a model's channels.

    Filters are scaled by 3 / channels, which keeps the scale of the features: with 'mean', those of
    an image with equal bands are what the RGB model computes for a grey image.

    Args:
        theirs: the checkpoint.
        ours: the model's tensors.
        rgb_weights: the filter of each channel. 'mean': the mean of red's, green's and blue's.
            'repeat': red's, green's, blue's, red's and so on. Names of the bands, such as ('blue',
            'green', 'red', 'nir'): their own for red, green and blue, the mean for others. None:
            the checkpoint is not changed.

    Returns:
        The checkpoint, and a line that says what was done, or ''.
    """
    name = next((name for name in ours if FIRST_CONV.match(name)), '')
    weight = theirs.get(name)
    if rgb_weights is None or weight is None or weight.dim() != 4 or weight.shape[1] != 3:
        return theirs, ''
    channels = ours[name].shape[1]
    bands = list(rgb_weights)
    if rgb_weights == 'mean':
        bands = ['mean'] * channels
    elif rgb_weights == 'repeat':
        bands = [RGB[i % 3] for i in range(channels)]
    filters = dict(zip(RGB, weight.unbind(1)))
    mean = weight.mean(1)
    made = torch.stack([filters.get(band, mean) for band in bands], dim=1) * (3 / channels)
    how = ', '.join(band if band in RGB else 'their mean' for band in bands)
    return theirs | {name: made}, f'{name} made for {channels} channels from RGB: {how}'


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> LoadReport:
    """Compare a model's state dict with a checkpoint under the same names."""
    shared = [name for name in ours if name in theirs]
    return LoadReport(
        loaded=[name for name in shared if theirs[name].shape == ours[name].shape],
        kept=[name for name in ours if name not in theirs],
        unused=[name for name in theirs if name not in ours],
        mismatched=[name for name in shared if theirs[name].shape != ours[name].shape],
    )


def objection_to(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], report: LoadReport
) -> Optional[str]:
    """Why a checkpoint does not fit the model, and what to do; None if it fits."""
    if any(a != b for a, b in zip(shape_of(ours), shape_of(theirs))):
        return (
            f'the checkpoint is of another architecture, {describe_arch(theirs)}; the model is '
            f'{describe_arch(ours)}. Set its arch, or load another file'
        )
    for name in report.mismatched:
        there, here = (tuple(tensors[name].shape) for tensors in (theirs, ours))
        advice = ''
        if FIRST_CONV.match(name) and there[2:] == here[2:]:
            advice = f'. in_channels={there[1]} fits the checkpoint'
            if there[1] == 3:
                advice += f"; or set rgb_weights='mean' to make it fit {here[1]} channels"
        if name.endswith('.table'):
            advice = (
                '. Build the model with the pretrain_img_size of the checkpoint (img_size in '
                'timm): at any other size of image the table is interpolated'
            )
        return f'{name} is {there} in the checkpoint and {here} in the model{advice}'
    # No position at all is a choice; a part of it is a damaged file.
    held = {name.split('.')[0] for name in filter(POSITION.match, theirs)}
    lacking = [name for name in report.kept if BODY.match(name) or name.split('.')[0] in held]
    if lacking:
        return f'the checkpoint is of another architecture or damaged: it lacks {listed(lacking)}'
    if besides := list(filter(BODY.match, report.unused)):
        return f'the checkpoint is of another architecture: the model has no {listed(besides)}'
    for name in report.loaded:
        if defect := defect_of(theirs[name], ours[name]):
            return f'the checkpoint is damaged: {name} {defect}'
    for name in report.loaded:
        if overflows(theirs[name], ours[name].dtype):
            return (
                f'{name} has values up to {theirs[name].abs().max():.3g}, which are infinite in '
                f"the model's dtype, {ours[name].dtype}"
            )
    return None


def defect_of(value: Tensor, ours: Tensor) -> Optional[str]:
    """Why a tensor of the right shape cannot be loaded; None if it can."""
    if type(value) not in (Tensor, nn.Parameter):  # sharded or fake: not ours to judge
        return None
    if value.dtype not in DTYPES:
        return f'has the dtype {value.dtype}; one of {", ".join(map(str, DTYPES))} loads'
    if value.is_meta:
        return None if ours.is_meta else 'is on the meta device and has no values'
    return None if value.isfinite().all() else 'has values that are not finite'


def overflows(value: Tensor, dtype: torch.dtype) -> bool:
    """True if a tensor, finite itself, is not finite in another dtype."""
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta:
        return False
    if torch.finfo(value.dtype).max <= torch.finfo(dtype).max:
        return False
    return not value.to(dtype).isfinite().all()


def shape_of(tensors: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """The channels and blocks of each stage of a pyramid's tensors under our names."""
    stages: list[tuple[int, ...]] = []
    while (patches := f'patch_embeds.{len(stages)}.proj.weight') in tensors:
        stage = f'blocks.{len(stages)}.'
        blocks = {name.split('.')[2] for name in tensors if name.startswith(stage)}
        stages.append((*tensors[patches].shape[:1], len(blocks)))
    return stages


def arch_of(tensors: dict[str, Tensor]) -> Optional[str]:
    """The key in `ARCHS` or `COLUMNAR_ARCHS` of the model with these tensors, or None."""
    if 'patch_embed.proj.weight' in tensors:
        dim = tensors['patch_embed.proj.weight'].shape[:1].numel()
        depth = len({name.split('.')[1] for name in tensors if name.startswith('blocks.')})
        for name, column in COLUMNAR_ARCHS.items():
            if (column.dim, column.depth) == (dim, depth):
                return name
        return None
    shape = shape_of(tensors)
    if not shape:
        return None
    fitting = [
        name
        for name, arch in ARCHS.items()
        if list(zip(arch.dims, arch.depths))[: len(shape)] == shape
    ]
    position = 'learned' if 'pos_embeds.0.table' in tensors else 'peg'
    for name in fitting:
        if ARCHS[name].position == position:
            return name
    return fitting[0] if fitting else None


def describe_arch(tensors: dict[str, Tensor]) -> str:
    """The name of an architecture, or its numbers if it has none."""
    dims = tuple(stage[0] for stage in shape_of(tensors))
    depths = tuple(stage[-1] for stage in shape_of(tensors))
    return arch_of(tensors) or f'of dims {dims} and depths {depths}'


def listed(names: Sequence[str], most: int = 6) -> str:
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(name[:100] for name in names[:most]) + more


def tensors_of(checkpoint: dict) -> dict[str, Tensor]:
    """The tensors of a model inside a checkpoint, without wrapper and prefix.

    Raises:
        ValueError: names or tensors are damaged, sparse or quantized.
    """
    checkpoint, _ = unwrapped(checkpoint)
    check_names(checkpoint)
    checkpoint = {k.replace(COMPILED, ''): v for k, v in checkpoint.items()}
    # DDP inside of an average gives two prefixes.
    while prefix := prefix_of(checkpoint):
        inner = {k[len(prefix) :]: v for k, v in checkpoint.items() if k.startswith(prefix)}
        # mmpretrain has the classifier next to the backbone.
        checkpoint = inner | {k: v for k, v in checkpoint.items() if k.startswith('head.')}
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
    """The dict of tensors inside a checkpoint, without wrappers; and, where it has several wrappers
    that hold something, a line that says which of them was taken, or ''."""
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
    """What a checkpoint holds that is none of ours, and how to load a part of it."""
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


def format_of(names: Iterable[str]) -> str:
    """The key in `FORMATS` of a checkpoint with these names, or 'ours'."""
    names = list(names)
    for key, form in FORMATS.items():
        if any(re.match(form.mark, name) for name in names):
            return key
    return 'ours'


def to_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `tensors_of` returns of any format, under our names, in our shapes. Nothing is lost."""
    key = format_of(tensors)
    if key == 'ours':
        return {name.replace('head.fc.', 'head.'): value for name, value in tensors.items()}
    form = FORMATS[key]
    pairs = [(theirs, ours) for ours, theirs in form.names]
    if key == 'mmpretrain' and 'norm_after_stage0.weight' not in tensors:
        pairs.insert(0, ('norm_after_stage3.', 'norm.'))  # the classifier's
    ours = {}
    for name, value in tensors.items():
        name = rename(name, pairs)
        stem, in_proj, kind = name.partition('.attn.attn.in_proj_')
        if in_proj:
            if value.dim() == 0 or len(value) % 3:
                raise ValueError(f'{name} must have rows of q, k and v, got {tuple(value.shape)}')
            dim = len(value) // 3
            ours[f'{stem}.attn.q.{kind}'], ours[f'{stem}.attn.kv.{kind}'] = value.split(
                [dim, 2 * dim]
            )
            continue
        name = name.replace('.attn.attn.out_proj.', '.attn.proj.')
        if form.pointwise and '.mlp.' in name and value.dim() == 4:
            value = value.flatten(1)
        if name.endswith('.table') and form.flat_tables:
            if value.dim() != 3:
                raise ValueError(f'{name} must have the shape (1, N, C), got {tuple(value.shape)}')
            side = math.isqrt(value.shape[1])
            if not side or value.shape[1] - side**2 not in (0, 1):
                raise ValueError(f'{name} must be square, got {value.shape[1]} entries')
            if value.shape[1] > side**2:
                ours['cls_pos'] = value[:, :1]
                value = value[:, 1:]
            value = value.unflatten(1, (side, side))
        ours[name] = value
    return ours


def to_format(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    """The reverse of `to_ours`: our names and shapes in one of `FORMATS`, or 'ours'. Tensors of a
    classifier keep our names where a format of backbones has none.

    Raises:
        ValueError: the format has no place for the architecture.
    """
    if key == 'ours':
        return tensors
    form = FORMATS[key]
    for name in tensors:
        if not re.match(form.holds, name) and not CLASSIFIER.match(name):
            raise ValueError(f'the format {key!r} has no place for {name}')
    pairs = list(form.names)
    if key == 'mmpretrain' and 'norm_list.0.weight' not in tensors:
        pairs.append(('norm.', 'norm_after_stage3.'))
    last_table = max((name for name in tensors if name.endswith('.table')), default=None)
    theirs = {}
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition('.attn.')
        if name == 'cls_pos' and form.class_entry and last_table:
            continue
        if form.in_proj and f'{stem}.attn.q.weight' in tensors:
            if leaf.startswith('kv.'):
                continue
            if leaf.startswith('q.'):
                kind = leaf[2:]
                value = joined(tensors, name, f'{stem}.attn.kv.{kind}', dim=0)
                name = f'{stem}.attn.attn.in_proj_{kind}'
            if leaf.startswith('proj.'):
                name = f'{stem}.attn.attn.out_{leaf}'
        if form.pointwise and '.mlp.' in name and value.dim() == 2:
            value = value[..., None, None]
        if name.endswith('.table') and form.flat_tables:
            value = value.flatten(1, 2)
            if form.class_entry and name == last_table and 'cls_pos' in tensors:
                value = joined({**tensors, name: value}, 'cls_pos', name, dim=1)
        prefix = '' if name.startswith('head.') else form.prefix
        theirs[prefix + rename(name, pairs)] = value
    return theirs


def joined(tensors: dict[str, Tensor], first: str, second: str, dim: int) -> Tensor:
    """Two tensors that are one in another format.

    Raises:
        ValueError: they have different dtypes.
    """
    dtypes = tensors[first].dtype, tensors[second].dtype
    if dtypes[0] != dtypes[1]:
        raise ValueError(
            f'{first} and {second} are one tensor in this format and must have one dtype, got '
            f'{dtypes[0]} and {dtypes[1]}'
        )
    return torch.cat([tensors[first], tensors[second]], dim)


def rename(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """A key after every row of pairs (from, to) of a `Format` that it matches."""
    for source, target in pairs:
        match = key_pattern(source).search(name)
        if match:
            for field, one in FIELD.findall(source):
                index = int(match[field]) - bool(one)
                target = target.replace(f'{{{field}}}', str(index))
                target = target.replace(f'{{{field}+1}}', str(index + 1))
            name = name[: match.start()] + target + name[match.end() :]
    return name


@functools.cache
def key_pattern(template: str) -> re.Pattern:
    """Compile a row of a `Format`: numbers at its fields, the rest literally."""
    start = '' if template.startswith('.') else '^'
    return re.compile(start + FIELD.sub(r'(?P<\1>\\d+)', template.replace('.', r'\.')))
