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
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..columnar import Column
from ..padding.mask import fill_outside, pixel_mask
from ..position import PosCNN

KINDS = ('noise', 'constant', 'natural')
PENALTIES = (1e-4, 1e-2, 1.0)  # of the ridge regression, for a sample and standardized features
RINGS = 4  # from the border to the center
SAMPLES = 6000  # tokens of a regression
HIGH_NORM = 4.0  # times the median
BORDER = 0.25  # share of a map's side that counts as border, at each end
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
            sequences and dicts. Of a columnar model of this package, the maps after each block are
            measured.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        self.model = model
        model.eval()  # not in one statement: that of mm's ResNet returns None
        parameters = inspect.signature(model.forward).parameters
        self.masks = 'valid' in parameters or isinstance(model, Column)

    @torch.no_grad()
    def maps(self, image: Tensor, valid: Optional[Tensor] = None) -> list[Tensor]:
        """The maps (B, C, h, w) of images, 8 at a time."""
        parts = []
        for start in range(0, len(image), 8):
            some = slice(start, start + 8)
            parts.append(self.call(image[some], None if valid is None else valid[some]))
        maps = [torch.cat(stage).float() for stage in zip(*parts)]
        if any(channels_last(map_, image) for map_ in maps):
            return [map_.permute(0, 3, 1, 2) for map_ in maps]
        return maps

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
        maps = maps_in(found)
        wrong = [map_ for map_ in maps if not is_batch_of_maps(map_, len(image))]
        if wrong or not maps:
            shape = tuple(getattr(wrong[0], 'shape', ())) if wrong else ()
            raise ValueError(
                f'{self.name} must return maps (B, C, h, w) of finite numbers, got {shape}'
            )
        return maps


def maps_in(output: Any) -> list[Any]:
    """What nested sequences and dicts hold, without None."""
    if output is None:
        return []
    if isinstance(output, Mapping):
        output = list(output.values())
    if not isinstance(output, (list, tuple)):
        return [output]
    return [leaf for part in output for leaf in maps_in(part)]


def is_batch_of_maps(value: Any, images: int) -> bool:
    """True for finite maps of this number of images."""
    if not isinstance(value, Tensor) or value.dim() != 4 or len(value) != images:
        return False
    return bool(value.isfinite().all())


def channels_last(map_: Tensor, image: Tensor) -> bool:
    """True if a map is (B, h, w, C): only in this reading are its sides in the ratio of the
    image's."""
    size = image.shape[2:]
    return in_ratio(map_.shape[1:3], size) and not in_ratio(map_.shape[2:], size)


def in_ratio(tokens: Sequence[int], pixels: Sequence[int]) -> bool:
    """True if the sides of a map are in the ratio of those of an image, up to a token."""
    h, w = tokens
    height, width = pixels
    return abs(h * width - w * height) <= max(height, width)


def maps_of(model: nn.Module, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
    """Run a model and return its maps.

    A columnar model returns none: its maps are (B, C, h, w) after each block, zero in the padding.
    """
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
        y = int(rng.integers(source.shape[1] - length + 1))
        x = int(rng.integers(source.shape[2] - length + 1))
        crop = source[None, :, y : y + length, x : x + length]
        crop = F.interpolate(crop, (side, side), mode='bilinear', antialias=True)[0]
        # Photographs have a top and a bottom. What a crop shows must not tell its position.
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
        if pixels.ndim == 2:  # gray
            found.append(pixels.expand(3, -1, -1))
        else:
            found.append(pixels.permute(2, 0, 1))
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
    rows = (2 * torch.arange(h) + 1) / h - 1
    columns = (2 * torch.arange(w) + 1) / w - 1
    grid = torch.stack(torch.meshgrid(rows, columns, indexing='ij'), dim=-1)
    return grid.double().expand(b, -1, -1, -1)


def fit_probe(map_: Tensor, seed: int = 0) -> Probe:
    """Ridge regression; the penalty is the best of `PENALTIES` on a third of the images."""
    x = map_.permute(0, 2, 3, 1)
    y = positions_like(map_)
    third = max(1, len(x) // 3)

    def score(penalty: float) -> float:
        probe = solve(x[third:], y[third:], penalty, seed)
        return r_squared(probe(x[:third]), y[:third])

    return solve(x, y, max(PENALTIES, key=score), seed)


def solve(x: Tensor, y: Tensor, penalty: float, seed: int) -> Probe:
    """The ridge regression of positions (..., 2) on features (..., C)."""
    x = x.reshape(-1, x.shape[-1]).double()
    y = y.reshape(-1, 2)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:SAMPLES]
    x = x[order]
    y = y[order]
    mean = x.mean(0)
    spread = x.std(0)
    varies = spread > 1e-6 * (1e-12 + spread.max())
    scale = torch.where(varies, 1 / spread.clamp(min=1e-30), 0)
    x = (x - mean) * scale
    gram = x.T @ x + penalty * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    return Probe(mean, scale, torch.linalg.solve(gram, x.T @ y), penalty)


def r_squared(predicted: Tensor, target: Tensor) -> float:
    """1 - squared error / variance, of rows and columns together; NaN if nothing varies."""
    predicted = predicted.reshape(-1, 2)
    target = target.reshape(-1, 2)
    total = (target - target.mean(0)).square().sum()
    if total == 0:
        return math.nan
    return float(1 - (predicted - target).square().sum() / total)


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
    chance: float  # the `mae` of this number of images if there is no pattern
    snr: float  # energy of the pattern / variance of the rest of the difference
    map: Tensor  # (h, w), its norm over the channels / that of the features' deviation


def padding_pattern(subject: Subject, images: Tensor, margin: int) -> list[Pattern]:
    """PPP (arXiv 2206.01202): the mean over images of the difference that padding makes.

    The model sees the center of an image, which it pads in its own way, and the whole image, where
    real pixels take the place of the padding. The difference is that of the features at the same
    place. With global attention the whole image also has other keys, and with an absolute encoding
    other values: then the pattern holds more than padding. How we read the paper's two metrics, MAE
    and SNR, is in experiments/position/findings/protocol.md.

    Args:
        subject: the model.
        images: (B, 3, H, W), at least 2.
        margin: pixels on all sides by which the images are larger than their center, a multiple of
            every stride.
    """
    height = images.shape[2] - 2 * margin
    width = images.shape[3] - 2 * margin
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
        pattern = difference.mean(0)
        noise = difference.var(0)
        spread = real.std().clamp(min=1e-12)
        # The mean absolute value of normal noise is sqrt(2 / pi) deviations.
        chance = (noise * 2 / math.pi / len(images)).sqrt().mean() / spread
        mae = pattern.abs().mean() / spread
        snr = signal_to_noise(pattern, noise, len(images))
        map_ = pattern.square().mean(0).sqrt() / spread
        results.append(Pattern(float(mae), float(chance), snr, map_))
    return results


def signal_to_noise(pattern: Tensor, noise: Tensor, images: int) -> float:
    """Energy of the pattern / energy of the noise.

    The pattern is a mean over images. What noise of this variance adds to its energy is subtracted.
    """
    energy = (pattern.square().sum() - noise.sum() / images).clamp(min=0)
    if noise.sum() > 0:
        return float(energy / noise.sum())
    return math.inf if energy > 0 else 0.0


def stride_of(side: int, tokens: int) -> int:
    """Pixels from one token to the next.

    It is the nearest power of 2 if that gives this number of tokens or if the tokens do not divide
    the side (convolutions without padding). Otherwise it is side / tokens, as in a ViT with patches
    of 14 pixels.
    """
    power = 2 ** round(math.log2(side / tokens))
    power_fits = tokens in (side // power, math.ceil(side / power))
    if power_fits or side % tokens:
        return power
    return side // tokens


def with_replicated_borders(model: nn.Module) -> nn.Module:
    """A copy whose padded convolutions repeat the border instead of adding zeros.

    A `PosCNN` repeats the border of each image of a padded batch.
    """
    model = copy.deepcopy(model)
    for module in model.modules():  # a PEG comes before its convolutions
        if isinstance(module, PosCNN):
            convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
            module.border = convolutions[0].kernel_size[0] // 2
            for convolution in convolutions:
                convolution.padding = (0, 0)
        elif isinstance(module, nn.Conv2d) and is_zero_padded(module):
            module.padding_mode = 'replicate'
    return model


def has_padded_convolutions(model: nn.Module) -> bool:
    """True if `with_replicated_borders` changes anything."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return any(map(is_zero_padded, convolutions))


def is_zero_padded(conv: nn.Conv2d) -> bool:
    """True if a convolution adds zeros at the border."""
    if conv.padding_mode != 'zeros' or conv.padding == 'valid':
        return False
    return conv.padding == 'same' or any(conv.padding)


class Drift(NamedTuple):
    """What batch padding does to a stage's features inside the images."""

    features: float  # mean norm of the change / mean norm
    displacement: float  # mean distance between the probed positions, in shares of the side


def canvas_size(size: tuple[int, int], share: float, step: int) -> tuple[int, int]:
    """Height and width of a padded batch of which about this share of the area is padding.

    Sides grow by multiples of `step`, because many models take only multiples of their stride.
    """
    area = math.prod(size)
    candidates = []
    for steps in range(8 * size[0] // step):
        height = size[0] + step * steps
        width = size[1] + step * steps
        candidates += [(height, width), (height, width + step)]
    return min(candidates, key=lambda padded: abs(1 - area / math.prod(padded) - share))


def padding_drift(
    subject: Subject, images: Tensor, size: tuple[int, int], masked: bool, probes: Sequence[Probe]
) -> list[Drift]:
    """How batch padding at the right and bottom changes features, stage by stage.

    Args:
        subject: the model.
        images: (B, 3, H, W).
        size: height and width of the padded batch.
        masked: whether the model is told what is padding.
        probes: of each stage, fitted without padding.
    """
    if masked and not subject.masks:
        raise ValueError(f'{subject.name} does not take the valid sizes of padded images')
    height, width = images.shape[2:]
    padded = F.pad(images, (0, size[1] - width, 0, size[0] - height))
    valid = torch.tensor([[height, width]] * len(images)) if masked else None
    results = []
    for alone, inside, probe in zip(subject.maps(images), subject.maps(padded, valid), probes):
        inside = inside[:, :, : alone.shape[2], : alone.shape[3]]
        change = (inside - alone).norm(dim=1).mean() / alone.norm(dim=1).mean().clamp(min=1e-12)
        before = probe(alone.permute(0, 2, 3, 1))
        after = probe(inside.permute(0, 2, 3, 1))
        # Positions go from -1 to 1: half of a distance is a share of the side.
        moved = (after - before).norm(dim=-1).mean() / 2
        results.append(Drift(float(change), float(moved)))
    return results


class ShiftDrift(NamedTuple):
    """How features that should move with the picture differ."""

    interior: float  # mean norm of the difference / mean norm, away from the border
    border: float  # the same within `BORDER` of the border


def shift_drift(subject: Subject, images: Tensor, side: int, shift: int) -> list[ShiftDrift]:
    """Compare the features of two crops of the same images, where both see the same pixels.

    Where the shift is no multiple of a stride, the first crop's map is interpolated bilinearly at
    the shifted positions: then the drift contains what sub-sampling loses.

    Args:
        subject: the model.
        images: (B, 3, H, W).
        side: height and width of the crops in pixels.
        shift: pixels by which the second crop is lower and further right.
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
        moved = read_at(a, offset, common)
        b = b[:, :, :common, :common]
        difference = (moved - b).norm(dim=1)  # (B, common, common)
        size = b.norm(dim=1)
        # Its distance from the nearest border of either crop, in shares of the side.
        at = torch.arange(common)
        near = torch.minimum(at, cells - 1 - at - offset)
        near = torch.minimum(near[:, None], near) / cells
        border = (near < BORDER).expand_as(size)
        # The mean of no token is NaN.
        interior_drift = difference[~border].mean() / size[~border].mean()
        border_drift = difference[border].mean() / size[border].mean()
        results.append(ShiftDrift(float(interior_drift), float(border_drift)))
    return results


def read_at(map_: Tensor, offset: float, count: int) -> Tensor:
    """(B, C, count, count): a map from `offset` tokens on, interpolated bilinearly."""
    whole = int(offset)
    part = offset % 1
    for axis in (2, 3):
        low = map_.narrow(axis, whole, count)
        if part:
            high = map_.narrow(axis, whole + 1, count)
            map_ = low * (1 - part) + high * part
        else:
            map_ = low
    return map_


class AttentionRecorder(TorchFunctionMode):
    """Inside this context, `found` collects the weights (B, heads, queries, keys) of every
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

    The signal is the mean over images of the features at a place, less the mean over all places. It
    does not depend on what the images show. For a model with a table before its first block this
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
    """High-norm tokens (Darcet et al., arXiv 2309.16588).

    The paper calls a token an outlier if its norm is above a value between the two modes of DINOv2.
    Models have different scales: here it is an outlier above `HIGH_NORM` medians.
    """
    results = []
    for map_ in subject.maps(images):
        norms = map_.norm(dim=1)
        ratio = norms / norms.median().clamp(min=1e-12)
        high = torch.where(ratio.isnan(), ratio, (ratio > HIGH_NORM).float())
        results.append(Norms(norms, float(ratio.max()), float(high.mean())))
    return results
