"""Measurements of where a model knows about position, for any module that returns maps.

A map is (B, C, h, w). Images are (B, 3, H, W), normalized to mean 0 and deviation 1.

Examples:
    >>> from cpvt_pyramid.lab.probes import Subject, images_of, probe_position
    >>> subject = Subject('PCPVT-nano', CPVTPyramid('pcpvt_nano'))
    >>> results = probe_position(subject, images_of('noise', 8, 64))
    >>> [stage.r2 < 1 for stage in results]  # 1: the position of every token can be read
    [True, True, True, True]
"""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from ..columnar import Column
from ..padding.mask import fill_outside, pixel_mask
from ..position import PosCNN

KINDS = ('noise', 'constant', 'natural')
PENALTIES = (1e-4, 1e-2, 1.0)  # of the ridge regression, for a sample and standardized features
RINGS = 4  # from the border to the center
SAMPLES = 6000  # tokens of a regression
HIGH_NORM = 4.0  # times the median
BORDER = 0.25  # share of a map's side that is border, on each side
PHOTOGRAPHS = {  # of scikit-image
    'train': ('astronaut', 'coffee', 'rocket', 'brick'),
    'tuning': ('chelsea', 'gravel'),
    'test': ('camera', 'hubble_deep_field', 'grass'),
}


class Subject:
    """A model to be measured.

    Args:
        name: for tables.
        model: returns a map or several, (B, C, h, w) or, as Swin's, (B, h, w, C), in any nesting of
            sequences and dicts. A columnar model of ours gives the map after each block.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self.model = model
        model.eval()  # of mm's ResNet it returns None
        parameters = inspect.signature(model.forward).parameters
        self.masks = 'valid' in parameters or isinstance(model, Column)

    @torch.no_grad()
    def maps(self, image: Tensor, valid: Optional[Tensor] = None) -> list[Tensor]:
        """The maps (B, C, h, w) of images, 8 at a time."""
        sizes = [None] * len(image) if valid is None else valid.split(8)
        parts = map(self.call, image.split(8), sizes)
        maps = [torch.cat(stage).float() for stage in zip(*parts)]
        last = any(channels_last(map_, image) for map_ in maps)
        return [map_.permute(0, 3, 1, 2) for map_ in maps] if last else maps

    def call(self, image: Tensor, valid: Optional[Tensor]) -> list[Tensor]:
        """Run the model on a batch and check that it returns maps."""
        try:
            found = maps_of(self.model, image, valid)
        except Exception as error:  # a model from elsewhere can fail in any way
            size = 'x'.join(map(str, image.shape[2:]))
            raise ValueError(
                f'{self.name} fails on images of {size} pixels ({error}); a measured model must '
                'take images of several sizes'
            ) from error
        maps = [map_ for map_ in tree_flatten(found)[0] if map_ is not None]
        for map_ in maps or [None]:
            shape = tuple(map_.shape) if isinstance(map_, Tensor) else ()
            if len(shape) != 4 or len(map_) != len(image) or not map_.isfinite().all():
                raise ValueError(
                    f'{self.name} must return maps (B, C, h, w) of finite numbers, got {shape}'
                )
        return maps


def channels_last(map_: Tensor, image: Tensor) -> bool:
    """True if a map must be (B, h, w, C): read as (B, C, h, w) its sides are not in the ratio of
    the image's, up to a token, and read as (B, h, w, C) they are."""
    height, width = image.shape[2:]
    first, last = (
        abs(h * width - w * height) <= max(height, width)
        for h, w in (map_.shape[2:], map_.shape[1:3])
    )
    return last and not first


def maps_of(model: nn.Module, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
    """The maps (B, C, h, w) of a columnar model, one after each block and zero in the padding, or
    of any other model, which returns them itself."""
    if not isinstance(model, Column):
        return model(image) if valid is None else model(image, valid)
    x, grid = model.embed(image, pixel_mask(valid, image))
    maps = []
    for i in range(len(model.blocks)):
        x = model.forward_block(i, x, grid)
        maps.append(fill_outside(grid.split(x)[1], grid.mask).permute(0, 3, 1, 2))
    return tuple(maps)


def images_of(kind: str, count: int, side: int, seed: int = 0, split: str = 'test') -> Tensor:
    """Images (count, 3, side, side) of 'noise', of one color each, or from photographs."""
    if kind == 'natural':
        return photographs(count, side, seed, split)
    draw = torch.Generator().manual_seed(seed)
    if kind == 'noise':
        return torch.randn(count, 3, side, side, generator=draw)
    return torch.randn(count, 3, 1, 1, generator=draw).expand(-1, -1, side, side).contiguous()


@lru_cache(8)  # models are compared on the same images
def photographs(count: int, side: int, seed: int, split: str) -> Tensor:
    """Random square crops of photographs, mirrored at random, normalized."""
    rng = np.random.default_rng([seed, 1])
    sources = whole_photographs(split)
    crops = []
    for i in range(count):
        source = sources[i % len(sources)]
        least = min(source.shape[1:])
        length = int(rng.integers(least // 2, least + 1))
        y, x = (int(rng.integers(s - length + 1)) for s in source.shape[1:])
        crop = source[None, :, y : y + length, x : x + length]
        crop = F.interpolate(crop, (side, side), mode='bilinear', antialias=True)[0]
        # Photographs have a top and a bottom; what a picture shows must not tell where.
        crop = torch.rot90(crop, int(rng.integers(4)), (1, 2))
        crops.append(crop.flip(2) if rng.random() < 0.5 else crop)
    image = torch.stack(crops)
    return (image - image.mean((2, 3), keepdim=True)) / image.std((2, 3), keepdim=True)


@lru_cache
def whole_photographs(split: str) -> list[Tensor]:
    """The photographs of a split, (3, H, W) from 0 to 1."""
    import skimage.data

    found = []
    for name in PHOTOGRAPHS[split]:
        pixels = torch.tensor(getattr(skimage.data, name)()) / 255
        found.append(pixels.expand(3, -1, -1) if pixels.ndim == 2 else pixels.permute(2, 0, 1))
    return found


class Probe(NamedTuple):
    """A linear map from standardized features to row and column, each from -1 to 1."""

    mean: Tensor
    scale: Tensor
    weight: Tensor  # (C, 2)
    penalty: float

    def __call__(self, x: Tensor) -> Tensor:
        """Positions (..., 2) of features (..., C)."""
        return ((x.double() - self.mean) * self.scale) @ self.weight


class ProbeResult(NamedTuple):
    """How well a stage's features tell positions, on held-out images."""

    r2: float  # of rows and columns together
    rings: list[float]  # the same at growing distance from the border; NaN where nothing varies
    probe: Probe


def positions_like(map_: Tensor) -> Tensor:
    """(B, h, w, 2), row and column of each token of a map, from -1 to 1 at its borders."""
    b, _, h, w = map_.shape
    rows, columns = ((2 * torch.arange(n) + 1) / n - 1 for n in (h, w))
    grid = torch.stack(torch.meshgrid(rows, columns, indexing='ij'), dim=-1)
    return grid.double().expand(b, -1, -1, -1)


def fit_probe(map_: Tensor, seed: int = 0) -> Probe:
    """Ridge regression; the penalty is the best of `PENALTIES` on a third of the images."""
    x, y = map_.permute(0, 2, 3, 1), positions_like(map_)
    third = max(1, len(x) // 3)

    def score(penalty: float) -> float:
        return r_squared(solve(x[third:], y[third:], penalty, seed)(x[:third]), y[:third])

    return solve(x, y, max(PENALTIES, key=score), seed)


def solve(x: Tensor, y: Tensor, penalty: float, seed: int) -> Probe:
    """The ridge regression of positions (..., 2) on features (..., C)."""
    x, y = x.reshape(-1, x.shape[-1]).double(), y.reshape(-1, 2)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:SAMPLES]
    x, y = x[order], y[order]
    mean, spread = x.mean(0), x.std(0)
    scale = torch.where(spread > 1e-6 * (1e-12 + spread.max()), 1 / spread.clamp(min=1e-30), 0)
    x = (x - mean) * scale
    gram = x.T @ x + penalty * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    return Probe(mean, scale, torch.linalg.solve(gram, x.T @ y), penalty)


def r_squared(predicted: Tensor, target: Tensor) -> float:
    """1 - squared error / variance, of rows and columns together; NaN if nothing varies."""
    predicted, target = predicted.reshape(-1, 2), target.reshape(-1, 2)
    total = (target - target.mean(0)).square().sum()
    return float(1 - (predicted - target).square().sum() / total) if total > 0 else math.nan


def probe_position(subject: Subject, images: Tensor, seed: int = 0) -> list[ProbeResult]:
    """Where position can be read from a model, stage by stage; half of the images are held out."""
    half = len(images) // 2
    results = []
    for map_ in subject.maps(images):
        probe = fit_probe(map_[:half], seed)
        held_out = map_[half:]
        predicted = probe(held_out.permute(0, 2, 3, 1))
        target = positions_like(held_out)
        # 0 at the border and 1 in the center; the same for a map of any size
        depth = 1 - target.abs().amax(-1)
        ring = (depth * RINGS).long().clamp(max=RINGS - 1)
        rings = [r_squared(predicted[ring == i], target[ring == i]) for i in range(RINGS)]
        results.append(ProbeResult(r_squared(predicted, target), rings, probe))
    return results


class Pattern(NamedTuple):
    """What padding adds to a stage's features wherever it is, whatever the image shows."""

    mae: float  # mean size of the pattern / standard deviation of the features
    chance: float  # `mae` to expect of so few images if there is no pattern
    snr: float  # energy of the pattern / variance of what it hides in
    map: Tensor  # (h, w), its norm over the channels / that of the features' deviation


def padding_pattern(subject: Subject, images: Tensor, margin: int) -> list[Pattern]:
    """PPP (arXiv 2206.01202): the mean over images of the difference that padding makes.

    The features of an image's center, cropped, so that the model pads it in its own way, minus the
    features at the same place of the whole image, where real pixels are in place of the padding.
    With global attention the whole image has other keys, too, and an absolute encoding other
    values: then the pattern holds more than padding. experiments/position/findings/protocol.md says
    how we read the paper's two metrics, MAE and SNR. The images (B, 3, H, W), at least 2, are
    larger than the crop by `margin` pixels on all sides, a multiple of every stride.
    """
    height, width = (side - 2 * margin for side in images.shape[2:])
    if len(images) < 2 or min(height, width) < 1:
        raise ValueError(
            f'a pattern needs at least 2 images, larger than twice the margin {margin}; got '
            f'{tuple(images.shape)}'
        )
    crop = images[..., margin : margin + height, margin : margin + width]
    results = []
    for padded, whole in zip(subject.maps(crop), subject.maps(images)):
        stride = stride_of(height, padded.shape[2])
        at, rest = divmod(margin, stride)
        if rest or whole.shape[2] != padded.shape[2] + 2 * at:
            raise ValueError(
                f'{subject.name}: margin={margin} must be a multiple of the stride, {stride}, and '
                f'larger images must have larger maps, got {padded.shape[2]} and {whole.shape[2]} '
                'tokens'
            )
        real = whole[:, :, at : at + padded.shape[2], at : at + padded.shape[3]]
        difference = padded - real
        pattern, noise = difference.mean(0), difference.var(0)
        spread = real.std().clamp(min=1e-12)
        energy = (pattern.square().sum() - noise.sum() / len(images)).clamp(min=0)
        snr = float(energy / noise.sum()) if noise.sum() > 0 else (math.inf if energy > 0 else 0.0)
        of_place = pattern.square().mean(0).sqrt() / spread
        # The mean absolute value of normal noise is sqrt(2 / pi) deviations.
        chance = (noise * 2 / math.pi / len(images)).sqrt().mean() / spread
        mae = pattern.abs().mean() / spread
        results.append(Pattern(float(mae), float(chance), snr, of_place))
    return results


def stride_of(side: int, tokens: int) -> int:
    """Pixels from one token to the next: the nearest power of 2 where it gives this number of
    tokens, else what divides the side, as in a ViT of patches of 14. Convolutions without padding
    leave some pixels over: then the power of 2 again."""
    power = 2 ** round(math.log2(side / tokens))
    if tokens in (side // power, -(-side // power)) or side % tokens:
        return power
    return side // tokens


def with_replicated_borders(model: nn.Module) -> nn.Module:
    """A copy whose padded convolutions repeat the border instead of adding zeros."""
    model = copy.deepcopy(model)
    for module in model.modules():  # a PEG comes before its convolutions
        if isinstance(module, PosCNN):
            convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
            module.border = convolutions[0].kernel_size[0] // 2
            for convolution in convolutions:
                convolution.padding = (0, 0)
        elif is_zero_padded(module):
            module.padding_mode = 'replicate'
    return model


def has_padded_convolutions(model: nn.Module) -> bool:
    """True if `with_replicated_borders` changes anything."""
    return any(map(is_zero_padded, model.modules()))


def is_zero_padded(module: nn.Module) -> bool:
    """True for a convolution that adds zeros at the border."""
    is_plain = isinstance(module, nn.Conv2d) and module.padding_mode == 'zeros'
    return is_plain and module.padding != 'valid' and any(np.atleast_1d(module.padding) != 0)


class Drift(NamedTuple):
    """What batch padding does to a stage's features inside the images."""

    features: float  # mean norm of the change / mean norm
    displacement: float  # mean distance between the probed positions, in shares of the side


def canvas_size(size: tuple[int, int], share: float, step: int) -> tuple[int, int]:
    """Height and width of a padded batch of which this share of the area, or nearly, is padding.

    Many models take no size that their stride does not divide: sides grow by multiples of `step`.
    """
    area = math.prod(size)
    candidates = [
        (size[0] + step * down, size[1] + step * right)
        for down in range(8 * size[0] // step)
        for right in (down, down + 1)
    ]
    return min(candidates, key=lambda padded: abs(1 - area / math.prod(padded) - share))


def padding_drift(
    subject: Subject, images: Tensor, size: tuple[int, int], masked: bool, probes: Sequence[Probe]
) -> list[Drift]:
    """How batch padding at the right and bottom, up to this height and width, changes features,
    stage by stage. `masked`: the model is told what is padding. The probes are those of each stage,
    fitted without padding."""
    if masked and not subject.masks:
        raise ValueError(f'{subject.name} does not take the valid sizes of padded images')
    height, width = images.shape[2:]
    padded = F.pad(images, (0, size[1] - width, 0, size[0] - height))
    valid = torch.tensor([[height, width]] * len(images)) if masked else None
    results = []
    for alone, inside, probe in zip(subject.maps(images), subject.maps(padded, valid), probes):
        inside = inside[:, :, : alone.shape[2], : alone.shape[3]]
        change = (inside - alone).norm(dim=1).mean() / alone.norm(dim=1).mean().clamp(min=1e-12)
        before, after = (probe(m.permute(0, 2, 3, 1)) for m in (alone, inside))
        # Positions go from -1 to 1: half of a distance is a share of the side.
        moved = (after - before).norm(dim=-1).mean() / 2
        results.append(Drift(float(change), float(moved)))
    return results


class ShiftDrift(NamedTuple):
    """How features that should move with the picture differ."""

    interior: float  # mean norm of the difference / mean norm, away from the border
    border: float  # the same within `BORDER` of the border


def shift_drift(subject: Subject, images: Tensor, side: int, shift: int) -> list[ShiftDrift]:
    """Features of two crops, `side` pixels high and wide, of the same images (B, 3, H, W), one
    `shift` pixels lower and further right, compared where both see the same pixels.

    Where the shift is no multiple of a stride, the first crop's map is interpolated bilinearly at
    the shifted positions: then the drift contains what sub-sampling loses.
    """
    if min(images.shape[2:]) < side + shift or shift < 0:
        raise ValueError(
            f'images must be at least side + shift = {side + shift} pixels high and wide, got '
            f'{images.shape[2]} x {images.shape[3]}'
        )
    first = subject.maps(images[..., :side, :side])
    second = subject.maps(images[..., shift : side + shift, shift : side + shift])
    results = []
    for a, b in zip(first, second):
        cells = a.shape[2]
        offset = shift / stride_of(side, cells)  # in tokens
        common = math.floor(cells - offset)
        if common < 1:
            results.append(ShiftDrift(math.nan, math.nan))
            continue
        moved, b = read_at(a, offset, common), b[:, :, :common, :common]
        difference, size = (moved - b).norm(dim=1), b.norm(dim=1)  # (B, common, common)
        # Its distance from the nearest border of either crop, in shares of the side.
        at = torch.arange(common)
        near = torch.minimum(at, cells - 1 - at - offset)
        near = torch.minimum(near[:, None], near) / cells
        border = (near < BORDER).expand_as(size)
        # The mean of no token is NaN.
        ratios = (difference[part].mean() / size[part].mean() for part in (~border, border))
        results.append(ShiftDrift(*map(float, ratios)))
    return results


def read_at(map_: Tensor, offset: float, count: int) -> Tensor:
    """(B, C, count, count): a map from `offset` tokens on, interpolated bilinearly."""
    whole, part = int(offset), offset % 1
    for axis in (2, 3):
        low = map_.narrow(axis, whole, count)
        map_ = low * (1 - part) + map_.narrow(axis, whole + 1, count) * part if part else low
    return map_


class AttentionRecorder(TorchFunctionMode):
    """Inside this context, `found` gets the weights (B, heads, queries, keys) of every
    `scaled_dot_product_attention`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            # The weights are the result for one-hot values.
            query, key, _, *others = args
            values = torch.eye(key.shape[-2]).to(key).expand(*key.shape[:-1], -1)
            self.found.append(function(query, key, values, *others, **kwargs))
        return function(*args, **kwargs)


def attention_weights(subject: Subject, image: Tensor) -> list[Tensor]:
    """The attention weights (heads, queries, keys) of each global attention, for one image.

    Attentions in windows fold their windows into the batch and are left out.
    """
    with torch.no_grad(), AttentionRecorder() as recorder:
        subject.call(image, None)
    return [weights[0] for weights in recorder.found if len(weights) == 1]


def position_similarity(map_: Tensor) -> Tensor:
    """(h, w, h, w): cosine similarity of each place's position signal with every other's.

    The signal is the mean over images of the features at a place, less the mean over all places:
    what a place has whatever the image shows. For a model with a table before its first block this
    is the figure of ViT (arXiv 2010.11929, figure 7), for a PEG that of CPVT.
    """
    signal = map_.mean(0)
    signal = signal - signal.mean((1, 2), keepdim=True)
    flat = F.normalize(signal.flatten(1), dim=0)
    h, w = map_.shape[2:]
    return (flat.T @ flat).view(h, w, h, w)


class Norms(NamedTuple):
    """Sizes of a stage's tokens."""

    norms: Tensor  # (B, h, w)
    largest: float  # largest / median
    share: float  # of tokens above HIGH_NORM medians


def token_norms(subject: Subject, images: Tensor) -> list[Norms]:
    """High-norm tokens (Darcet et al., arXiv 2309.16588): they call a token an outlier above a
    norm that divides the two modes of DINOv2. Models have different scales: here, above 4 medians.
    """
    results = []
    for map_ in subject.maps(images):
        norms = map_.norm(dim=1)
        ratio = norms / norms.median().clamp(min=1e-12)
        high = torch.where(ratio.isnan(), ratio, (ratio > HIGH_NORM).float())
        results.append(Norms(norms, float(ratio.max()), float(high.mean())))
    return results
