"""The pyramid of CPVTv2, Twins, PVT, PVTv2 and SegFormer's MiT, then its parts in the order in
which an image passes through them.

Four stages, each a map of half the resolution: patch embedding, blocks of attention and MLP, and
what gives them position. In CPVT that is a PEG after the first block (`PosCNN`), in PVT a table
before it, in PVTv2 and MiT zero-padded convolutions in the patch embedding and in every MLP.

Shapes: B batch, H x W map, C channels, N = H * W tokens, M keys, d = C / heads. Tokens are
(B, H, W, C) throughout; convolutions read them as (B, C, H, W) in channels-last memory. The maps
that leave are such views: call `.contiguous()` before code that reads raw NCHW memory.

Where padding is handled: `stage_maps` makes a `BatchPadding` of `valid`, which has the mask of each
map (`Padding.outside`), and zeroes the padding of the image. Each attention class makes a bias of
its scores of it, once for a stage (`describe`: `Grid.key_bias`, for windows
`Grid.windows.key_bias`), and `Attention.attend` adds it. What reads its neighbors sets the padding
to zero before it does:
`GlobalAttention.subsample`, `ConvMLP.forward` and `PosCNN.forward`; patch embeddings need not,
because `forward_stage` zeroes the padding of the map that it returns. The means of
`LinearAttention` (`Grid.means`) leave it out.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Optional, TypeVar, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .archs import Arch, Part, StageShape, check_rates, check_stages, find_arch
from .checkpoints.hook import convert_on_load
from .checkpoints.rgb import check_rgb_weights
from .grid import (
    POOLED,
    Grid,
    bias_of_keys,
    crop_to_multiple,
    from_windows,
    grid_of_windows,
    pad_to_multiple,
    to_windows,
    weights_of_means,
)
from .layers import (
    DropPath,
    LayerNorm,
    PointwiseConv2d,
    build_dropout,
    convolve,
    depthwise,
)
from .padding.mask import BatchPadding, Padding, check_image, fill_outside
from .plain_layers import is_plain_linear
from .position import NoPosition, PEGConfig, Site, check_image_size, parse_position, rotate
from .recompute import drops_nothing, gelu_linear
from .versions import is_compiling, is_exporting

# CUDA's fused attention kernels refuse a larger batch (of windows, here).
MAX_BATCH = 65_535


class CPVTPyramid(nn.Module):
    """Pyramid vision transformer with a PEG after the first block of each stage.

    Parameter names are those of the published checkpoints of Twins. `load_state_dict` also takes
    the state dict of a backbone in any other published format, see
    `cpvt_pyramid.checkpoints.hook`.

    Args:
        arch: a name from `ARCHS`, or an `Arch` (or a dict of its fields) of your own.
        position: where position comes from: 'peg' (CPVT), 'learned' (an embedding for each
            stage, interpolated to the map; PVT), 'sincos' (2-D sinusoidal), 'rope' (rotary, inside
            every attention) or 'none'; or one of them and a PEG, as in 'learned+peg'. A
            sub-sampled key is at the center of its patch. None: as published.
        position_options: a dict, of 'rope': `base`, nearly the ratio of largest to smallest
            frequency, and `normalized`, coordinates across the image instead of counts of tokens.
        peg: placement and structure of PEGs, a `PEGConfig` or a dict of its fields. None: as
            published. Indices of blocks that a stage does not have are ignored in that stage.
        pretrain_img_size: side of the image in pixels, or height and width, for which a learned
            position embedding has one entry for each token.
        in_channels: channels of the image.
        rgb_weights: how the first convolution is made from a checkpoint for RGB where `in_channels`
            is not 3. 'mean': for each band the mean of the filters of red, green and blue;
            'repeat': these filters in turn; or the names of the bands, such as ('red', 'green',
            'blue', 'nir'): red, green and blue get their filters, others the mean. Filters are
            scaled by 3 / `in_channels`. None: such a checkpoint is an error.
        out_indices: the stages, 0 to 3, whose maps are returned. Stages after the last of them
            are not built.
        drop_rate: dropout after the patch embeddings, the attentions and in the MLPs.
        attn_drop_rate: dropout on the attention weights.
        drop_path_rate: rate of stochastic depth at the last block; it grows linearly, from 0 at the
            first.
        stage_norm: a LayerNorm on each stage's output. None: as published.
        window_padding: what attention does in a window of SVT that reaches beyond the map. 'mask':
            it ignores the part outside the map; 'zero': it reads zeros there, as in timm; 'mmseg':
            it ignores that part only if the map needs padding both at the right and at the bottom,
            as in MMSegmentation.
        drop_border: the sub-sampling of keys ignores the last rows and columns of an image if they
            do not fill a patch, as in timm, the authors' code and OpenMMLab. By default, zeros
            fill them. If 32 divides the sides of the image, nothing differs.
        frozen_stages: number of stages, from the first, that do not train (patch embedding,
            blocks, PEG and norm). 0 or -1: none. In OpenMMLab's ResNet and Swin 0 freezes the
            stem; here the stem is part of the first stage. Parts that are added to frozen stages
            later, such as LoRA's adapters, train.
        with_cp: activation checkpointing: less memory in training, more time.
        recompute_gelu: training saves one of the two wide maps of each MLP and recomputes the
            other: less memory at the cost of one pass over it. MLPs with dropout, with hooks on
            their second layers (`mlp.fc2`) or with adapters in their place save both.

    Attributes:
        channels: channels of each returned map.
        strides: stride of each returned map, in pixels.

    Raises:
        ValueError: an unknown arch or position, an option that does not fit them or that nothing
            reads, or a number out of its range; the message says what to give instead.

    Examples:
        >>> model = CPVTPyramid('pcpvt_nano').eval()
        >>> [tuple(y.shape) for y in model(torch.rand(1, 3, 97, 130))]
        [(1, 32, 25, 33), (1, 64, 13, 17), (1, 128, 7, 9), (1, 192, 4, 5)]
        >>> valid = torch.tensor([[64, 96], [97, 130]])  # true sizes of padded images
        >>> maps = model(torch.rand(2, 3, 97, 130), valid=valid)
    """

    def __init__(
        self,
        arch: Union[str, Arch, dict] = 'pcpvt_small',
        *,
        position: Optional[str] = None,
        position_options: Optional[dict] = None,
        peg: Union[PEGConfig, dict, None] = None,
        pretrain_img_size: Union[int, Sequence[int]] = 224,
        in_channels: int = 3,
        rgb_weights: Union[str, Sequence[str], None] = None,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        stage_norm: Optional[bool] = None,
        window_padding: str = 'mask',
        drop_border: bool = False,
        frozen_stages: int = 0,
        with_cp: bool = False,
        recompute_gelu: bool = False,
    ) -> None:
        super().__init__()
        check_rgb_weights(rgb_weights, in_channels)
        self.in_channels = in_channels
        self.rgb_weights = rgb_weights
        convert_on_load(self)
        self.arch = arch = find_arch(arch, Arch)
        parts = find_parts(arch)
        check_stages(arch, out_indices, frozen_stages, window_padding)
        check_rates(drop_rate, attn_drop_rate, drop_path_rate)
        if position is None:
            position = arch.position
        encoding = parse_position(position, peg, position_options)
        if encoding.peg is not None and encoding.peg.qk_only:
            raise ValueError('peg.qk_only needs the columnar model (CPVT, DenseCPVT)')
        self.peg_config = encoding.peg
        self.out_indices = tuple(out_indices)
        self.frozen_stages = frozen_stages
        self.channels = tuple(arch.dims[i] for i in self.out_indices)
        self.strides = tuple(arch.strides[i] for i in self.out_indices)
        self.attentions = parts.attentions
        self.options = options = StageOptions(
            drop_rate=drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            window_padding=window_padding,
            drop_border=drop_border,
            with_cp=with_cp,
            recompute_gelu=recompute_gelu,
        )

        # Of the stages that are built:
        self.shapes = shapes = arch.stages(in_channels)[: max(self.out_indices) + 1]
        image_size = check_image_size(pretrain_img_size)
        sites = [
            Site(shape.dim, shape.heads, image_size, shape.stride, parts.attentions, drop_border)
            for shape in shapes
        ]
        self.patch_embeds = nn.ModuleList(
            parts.patch_embed.of_stage(shape, options) for shape in shapes
        )
        self.pos_embeds = nn.ModuleList(encoding.on_tokens(site) for site in sites)
        self.rotations = [encoding.rotation(site) for site in sites]
        depth = sum(arch.depths)
        self.blocks = nn.ModuleList(build_blocks(parts, shape, options, depth) for shape in shapes)
        for blocks, site in zip(self.blocks, sites):
            encoding.add_to_scores(blocks, site)
        has_norm = arch.stage_norm if stage_norm is None else stage_norm
        self.norm_list = nn.ModuleList(
            LayerNorm(shape.dim, eps=1e-6) if has_norm else nn.Identity() for shape in shapes
        )
        # The published checkpoints name the PEG after the first block of a stage `pos_block.i`.
        pegs = [build_pegs(shape, encoding.peg, max(arch.depths)) for shape in shapes]
        self.pos_block = nn.ModuleList(of_stage.pop(0, NoPosition()) for of_stage in pegs)
        self.more_pos_block = nn.ModuleList(
            nn.ModuleDict({str(j): peg for j, peg in of_stage.items()}) for of_stage in pegs
        )

        self.apply(init_weights)
        init_pegs(self, encoding.peg)
        self.first_conv = name_of_first_conv(self)
        self.built = [modules_of(stage.parts()) for stage in self.stages()]
        self.freeze()

    @staticmethod
    def with_all_parts(arch: Arch) -> 'CPVTPyramid':
        """A model with all stages, and with all that a published file of its kind may have."""
        peg = PEGConfig(after=range(-1, max(arch.depths)))
        return CPVTPyramid(arch, position='learned+peg', peg=peg, stage_norm=True)

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """The maps of an image.

        Args:
            image: (B, in_channels, H, W), of any size from 1 x 1.
            valid: (B, 2), the true height and width of each image in pixels, if the batch is
                padded at the right and bottom. Features inside an image then equal those of the
                image alone, and are zero outside. None: nothing is padding.

        Returns:
            For each of `out_indices` a map (B, C, ceil(H / stride), ceil(W / stride)).

        Raises:
            ValueError: the image is no batch or has other channels; `valid` has no size for each
                image or, where it is on the CPU, one that is not in the batch.
        """
        maps = self.stage_maps(image, valid, self.out_indices)
        return tuple(maps[i] for i in self.out_indices)

    def stage_maps(
        self, image: Tensor, valid: Optional[Tensor], stages: Collection[int]
    ) -> dict[int, Tensor]:
        """The maps (B, C, H, W) of some stages; those after the last of them do not run."""
        check_image(image, self.in_channels)
        batch = BatchPadding(image, valid)
        x = fill_outside(image.permute(0, 2, 3, 1), batch.at(1))  # (B, H, W, in_channels)
        maps = {}
        for i, stage in enumerate(self.stages()[: max(stages) + 1]):
            x = self.forward_stage(stage, x, batch)
            if i in stages:
                # Not after the loop: autograd would add gradients in an order that costs copies.
                maps[i] = x.permute(0, 3, 1, 2)
        return maps

    def stages(self) -> list['Stage']:
        """The parts of each stage, as they are now: any of them can be replaced."""
        parts = zip(
            self.patch_embeds,
            self.pos_embeds,
            self.blocks,
            self.norm_list,
            self.pos_block,
            self.more_pos_block,
        )
        return [Stage(i, *of_stage) for i, of_stage in enumerate(parts)]

    def forward_stage(self, stage: 'Stage', x: Tensor, batch: BatchPadding) -> Tensor:
        """From the tokens of the stage before, or the image, to those of a stage.

        Both are zero in the padding of the batch.
        """
        x = stage.patch_embed(x)
        grid = self.stage_grid(self.shapes[stage.number], x, batch)
        x = stage.pos_embed(x, grid)  # PVT: a table
        pegs = stage.pegs()
        if -1 in pegs:
            x = pegs[-1](x, grid)
        for j, block in enumerate(stage.blocks):
            x = block(x, grid)
            if j in pegs:
                x = pegs[j](x, grid)  # CPVT: after block 0
        return fill_outside(stage.norm(x), grid.padding)

    def stage_grid(self, shape: StageShape, x: Tensor, batch: BatchPadding) -> Grid:
        """The grid of the tokens of a stage, which is the same for all its blocks."""
        height, width = x.shape[1:3]
        grid = Grid(height, width, padding=batch.at(shape.stride, finer=shape.finer_stride))
        for attention in self.attentions:
            attention.describe(grid, x, batch, shape, self.options)
        rope = self.rotations[shape.number]
        if rope is not None:
            rope.describe(grid, shape.dim // shape.heads, x)
        return grid

    def train(self, mode: bool = True) -> 'CPVTPyramid':
        super().train(mode)
        self.freeze()
        return self

    def freeze(self) -> None:
        """Freeze the stages that do not train: what they were built of, and nothing added later."""
        # Not by their names in the model, which wrappers such as torch.compile change.
        for stage in self.built[: max(self.frozen_stages, 0)]:
            for module, names in stage:
                module.training = False
                for name, parameter in module.named_parameters(recurse=False):
                    if name in names:
                        parameter.requires_grad_(False)


def modules_of(parts: Iterable[nn.Module]) -> list[tuple[nn.Module, frozenset[str]]]:
    """All modules of parts of a model, each with the names of its own parameters."""
    found = []
    for part in parts:
        for module in part.modules():
            names = frozenset(name for name, _ in module.named_parameters(recurse=False))
            found.append((module, names))
    return found


class Stage(NamedTuple):
    """The parts of a stage, in the order of the data flow.

    Attributes:
        number: of the stage, from 0.
        patch_embed: from the image or the stage before to tokens.
        pos_embed: what adds position before the blocks.
        blocks: one after another.
        norm: of the map.
        first_peg: the PEG after block 0; `NoPosition` if there is none.
        more_pegs: the others, by the block that each follows; -1: before the first.
    """

    number: int
    patch_embed: nn.Module
    pos_embed: nn.Module
    blocks: Any  # a ModuleList, whose type names no items
    norm: nn.Module
    first_peg: nn.Module
    more_pegs: Any  # a ModuleDict

    def pegs(self) -> dict[int, nn.Module]:
        """All PEGs, by the block that each follows."""
        others = {int(name): peg for name, peg in self.more_pegs.items()}
        return {0: self.first_peg, **others}

    def parts(self) -> list[nn.Module]:
        """All of them, in this order."""
        return list(self[1:])


class StageOptions(NamedTuple):
    """The options of `CPVTPyramid` that the parts of its stages read; see there."""

    drop_rate: float
    attn_drop_rate: float
    drop_path_rate: float
    window_padding: str
    drop_border: bool
    with_cp: bool
    recompute_gelu: bool

    def drops_of_attention(self) -> dict[str, float]:
        """The arguments of `Attention` that are rates of dropout."""
        return dict(attn_drop=self.attn_drop_rate, drop=self.drop_rate)


# Attentions, MLPs and patch embeddings that an `Arch` can name, by the names of their classes.
PARTS: dict[str, Any] = {}
PartClass = TypeVar('PartClass', bound=type)


def part(cls: PartClass) -> PartClass:
    """Let rows of `ARCHS` name a class.

    Its method `of_stage` builds it. `reads`, if it has it, names the fields of `Arch` that have no
    meaning for other classes.
    """
    PARTS[cls.__name__] = cls
    return cls


class Parts(NamedTuple):
    """The classes that an `Arch` names."""

    attentions: tuple[type['Attention'], ...]
    mlp: type['MLP']
    patch_embed: Any


def find_parts(arch: Arch) -> Parts:
    """The classes that an `Arch` names.

    Raises:
        ValueError: one is unknown, or a field is given that none of them reads.
    """
    attentions = tuple(find_part(attention) for attention in arch.attentions)
    parts = Parts(attentions, find_part(arch.mlp), find_part(arch.patch_embed))
    read = {field for cls in (*attentions, *parts[1:]) for field in getattr(cls, 'reads', ())}
    for cls in PARTS.values():
        for field in getattr(cls, 'reads', ()):
            value = getattr(arch, field)
            if field not in read and value != arch._field_defaults[field]:
                raise ValueError(f'{field}={value!r} needs an arch that names {cls.__name__}')
    return parts


def find_part(name: Part) -> Any:
    """A class that an `Arch` names, or that it holds itself."""
    if isinstance(name, type):
        return name
    if name not in PARTS:
        raise ValueError(f'unknown part {name!r} of an arch; one of {", ".join(PARTS)}, or a class')
    return PARTS[name]


def build_blocks(
    parts: Parts, shape: StageShape, options: StageOptions, depth: int
) -> nn.ModuleList:
    """The blocks of a stage of a pyramid with `depth` blocks."""
    blocks = nn.ModuleList()
    for j in range(shape.depth):
        attention = parts.attentions[j % len(parts.attentions)]
        attn = attention.of_stage(shape, options)
        mlp = parts.mlp.of_stage(shape, options)
        drop_path = options.drop_path_rate * (shape.first_block + j) / max(depth - 1, 1)
        blocks.append(Block(shape.dim, attn, mlp, drop_path, options.with_cp))
    return blocks


def build_pegs(shape: StageShape, peg: Optional[PEGConfig], most: int) -> dict[int, nn.Module]:
    """The PEGs of a stage, by the block that each follows; -1: before the first.

    `most`: blocks of the longest stage, which `peg.after` may name.
    """
    if peg is None:
        return {}
    return {j: build_peg(peg, shape.dim) for j in peg.indices(shape.depth, most)}


def name_of_first_conv(model: nn.Module) -> str:
    """The name of the weight that reads the image."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            return f'{name}.weight'
    raise ValueError('the first patch embedding must have a convolution')


@part
class PatchEmbed(nn.Module):
    """One token for each patch of the image, or of the tokens of the stage before.

    A map whose sides are not multiples of the patch is padded with zeros at the right and bottom.

    Args:
        in_channels: channels of the input.
        dim: channels of the tokens.
        size: side of a patch.
        drop: dropout on the tokens.
        norm: a LayerNorm on the tokens; the columnar model has none.
    """

    def __init__(
        self, in_channels: int, dim: int, size: int, drop: float = 0.0, norm: bool = True
    ) -> None:
        super().__init__()
        self.size = size
        self.proj = nn.Conv2d(in_channels, dim, size, stride=size)
        # eps 1e-5 here and in the sub-sampling of keys, as published
        self.norm = LayerNorm(dim) if norm else nn.Identity()
        self.drop = build_dropout(drop)

    @classmethod
    def of_stage(cls, shape: StageShape, options: StageOptions) -> 'PatchEmbed':
        """The patch embedding of a stage."""
        return cls(shape.in_channels, shape.dim, shape.patch_size, options.drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C), which must be zero in the padding, to (B, H', W', dim), where H' and
        W' are H and W divided by `size`, rounded up."""
        x = pad_to_multiple(x, self.size)
        x = self.norm(convolve(self.proj, x))
        return x if self.drop is None else self.drop(x)


@part
class OverlapPatchEmbed(nn.Module):
    """Patches that overlap: a zero-padded convolution, from which position comes, too (PVTv2,
    section 3.2; SegFormer, section 3.1).

    Arguments are those of `PatchEmbed`; `size` is the stride, and the kernel is `2 * size - 1`.
    """

    def __init__(self, in_channels: int, dim: int, size: int, drop: float = 0.0) -> None:
        super().__init__()
        self.size = size
        self.proj = nn.Conv2d(in_channels, dim, 2 * size - 1, stride=size, padding=size - 1)
        self.norm = LayerNorm(dim)
        self.drop = build_dropout(drop)

    @classmethod
    def of_stage(cls, shape: StageShape, options: StageOptions) -> 'OverlapPatchEmbed':
        """The patch embedding of a stage."""
        return cls(shape.in_channels, shape.dim, shape.patch_size, options.drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, C), which must be zero in the padding, to (B, H', W', dim), where H' and
        W' are H and W divided by `size`, rounded up."""
        x = self.norm(convolve(self.proj, x))
        return x if self.drop is None else self.drop(x)


class Block(nn.Module):
    """Pre-norm transformer block: attention, then MLP, each added to its input.

    Args:
        dim: channels of the tokens.
        attn: the attention. Like the MLP, it is called with the tokens and their `Grid`.
        mlp: the MLP.
        drop_path: rate of stochastic depth of each of the two branches.
        with_cp: activation checkpointing: less memory in training, more time. The name is
            OpenMMLab's; `set_checkpointing` changes it.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        drop_path: float = 0.0,
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.norm2 = LayerNorm(dim, eps=1e-6)
        self.mlp = mlp
        self.drop_path = DropPath(drop_path) if drop_path else None
        self.with_cp = with_cp

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """The tokens after both branches, in the same shape."""
        if self.with_cp and self.training:
            return checkpoint(self.branches, x, grid, use_reentrant=False)
        return self.branches(x, grid)

    def branches(self, x: Tensor, grid: Grid) -> Tensor:
        """`forward` without checkpointing."""
        return self.add(x, self.attended(x, grid), grid)

    def attended(self, x: Tensor, grid: Grid) -> Tensor:
        """The first branch: the attention of the tokens."""
        attended = self.attn(self.norm1(x), grid)
        return attended if self.drop_path is None else self.drop_path(attended)

    def add(self, x: Tensor, attended: Tensor, grid: Grid) -> Tensor:
        """The tokens after both branches, the first of which is given."""
        x = x + attended
        mapped = self.normed_mlp(x, grid)
        if self.drop_path is not None:
            mapped = self.drop_path(mapped)
        return x + mapped

    def normed_mlp(self, x: Tensor, grid: Grid) -> Tensor:
        """The MLP of the layer norm of tokens, in the same shape."""
        return self.mlp(self.norm2(x), grid)

    def extra_repr(self) -> str:
        return f'with_cp={self.with_cp}'


class Attention(nn.Module):
    """Multi-head attention. Derived classes choose the keys.

    Their arguments:
        dim: channels of the tokens.
        heads: attention heads.
        attn_drop: rate of dropout on the attention weights.
        drop: rate of dropout on the output.

    Attributes:
        position: a module that is called with queries (B, heads, N, d), keys (B, heads, M, d) and
            their `Grid`, and returns queries, keys, and a bias of their scores, (B or 1, heads,
            N, M) or None. It can be set to one of your own. None: there is none.
    """

    position: Optional[nn.Module]

    # What encodings inside of it may rely on:
    queries_are_keys = False  # each token is both
    keys_have_places = False  # a key is at the center of a cell of `Grid.step` tokens
    sees_map = True  # and not windows alone

    def __init__(self, dim: int, heads: int, attn_drop: float = 0.0, drop: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.attn_drop = build_dropout(attn_drop)
        self.drop = build_dropout(drop)
        self.position = None

    @classmethod
    def of_stage(cls, shape: StageShape, options: StageOptions) -> 'Attention':
        """The attention of a block of a stage."""
        raise NotImplementedError

    @classmethod
    def describe(
        cls, grid: Grid, x: Tensor, batch: BatchPadding, shape: StageShape, options: StageOptions
    ) -> None:
        """Add what this attention reads to the grid of a stage.

        Args:
            grid: of the stage, which has the map and its padding.
            x: tokens (B, H, W, C).
            batch: the padding of the batch.
            shape: of the stage.
            options: of the model.
        """

    def by_head(self, x: Tensor) -> Tensor:
        """Queries, keys or values (B, ..., C), as (B, heads, N, d)."""
        b, *sides, _ = x.shape
        return x.reshape(b, math.prod(sides), self.heads, self.head_dim).transpose(1, 2)

    def split_by_head(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Queries, keys and values, (B, heads, N, d) each, out of (B, ..., parts * C)."""
        b, *sides, _ = x.shape
        x = x.reshape(b, math.prod(sides), parts, self.heads, self.head_dim)
        return x.permute(2, 0, 3, 1, 4).unbind(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """softmax(q k^T / sqrt(d)) v, (B, N, heads, d), of queries, keys and values by head."""
        bias = grid.key_bias
        if grid.rotations is not None:
            q = rotate(q, grid.rotations[0])
            k = rotate(k, grid.rotations[1])
        if self.position is not None:
            q, k, bias = self.position(q, k, grid)
            if bias is not None and grid.key_bias is not None:
                bias = bias + grid.key_bias
        if bias is not None:
            bias = bias.to(q.dtype)
        rate = 0.0
        if self.attn_drop is not None and self.attn_drop.training:
            rate = self.attn_drop.p
        return F.scaled_dot_product_attention(q, k, v, bias, rate).transpose(1, 2)


@part
class GlobalAttention(Attention):
    """Every token attends to the whole map, sub-sampled (PVT, section 3.3; Twins' GSA).

    Args:
        sr_ratio: side of the patches that have one key and one value each.
        drop_border: rows and columns that do not fill a patch are left out, see `CPVTPyramid`. In
            a padded batch, they are there, and `Grid.key_bias` must hide them.
    """

    keys_have_places = True

    def __init__(
        self, dim: int, heads: int, sr_ratio: int, drop_border: bool = False, **drops: float
    ) -> None:
        super().__init__(dim, heads, **drops)
        self.sr_ratio = sr_ratio
        self.drop_border = drop_border
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        if sr_ratio > 1:
            self.sr = nn.Conv2d(dim, dim, sr_ratio, stride=sr_ratio)
            self.norm = LayerNorm(dim)
        self.proj = nn.Linear(dim, dim)

    @classmethod
    def of_stage(cls, shape: StageShape, options: StageOptions) -> 'GlobalAttention':
        border = options.drop_border
        return cls(shape.dim, shape.heads, shape.sr_ratio, border, **options.drops_of_attention())

    @classmethod
    def describe(
        cls, grid: Grid, x: Tensor, batch: BatchPadding, shape: StageShape, options: StageOptions
    ) -> None:
        grid.step = shape.sr_ratio
        if grid.padding is not None and options.drop_border:
            keys: Optional[Padding] = grid.padding.whole_patches(grid.step)
        else:
            keys = batch.at(shape.stride * grid.step, finer=shape.stride)
        grid.key_bias = None if keys is None else bias_of_keys(keys, x)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, H, W, C), in the same shape."""
        q = self.by_head(self.q(x))  # (B, heads, N, d)
        k, v = self.split_by_head(self.kv(self.subsample(x, grid)), 2)  # (B, heads, M, d)
        x = self.proj(self.attend(q, k, v, grid).reshape(x.shape))
        return x if self.drop is None else self.drop(x)

    def subsample(self, x: Tensor, grid: Grid) -> Tensor:
        """One token for each patch, (B, H', W', C). The padding must look like zeros."""
        if self.sr_ratio == 1:
            return x
        x = fill_outside(x, grid.padding)
        if self.drop_border and grid.padding is None:
            x = crop_to_multiple(x, self.sr_ratio)
        x = pad_to_multiple(x, self.sr_ratio)
        return self.norm(convolve(self.sr, x))


@part
class LinearAttention(GlobalAttention):
    """Every token attends to 7 x 7 means of the map (PVTv2, section 3.1). Its `Grid` must have
    their weights."""

    keys_have_places = False

    def __init__(self, dim: int, heads: int, **drops: float) -> None:
        super().__init__(dim, heads, sr_ratio=1, drop_border=False, **drops)
        self.sr = PointwiseConv2d(dim, dim, 1)
        self.norm = LayerNorm(dim)

    @classmethod
    def of_stage(cls, shape: StageShape, options: StageOptions) -> 'LinearAttention':
        return cls(shape.dim, shape.heads, **options.drops_of_attention())

    @classmethod
    def describe(
        cls, grid: Grid, x: Tensor, batch: BatchPadding, shape: StageShape, options: StageOptions
    ) -> None:
        grid.means = weights_of_means(x, grid.padding)

    def subsample(self, x: Tensor, grid: Grid) -> Tensor:
        """Means of each image, (B, 7, 7, C), as `F.adaptive_avg_pool2d` computes them."""
        if grid.means is None:
            raise ValueError('linear attention needs the weights of its means, Grid.means')
        rows, columns = grid.means
        rows = rows.to(x.dtype)
        columns = columns.to(x.dtype)
        b, height, width, c = x.shape
        x = rows @ x.reshape(b, height, width * c)  # (B, 7, W * C)
        x = columns[:, None] @ x.view(b, POOLED, width, c)  # (B, 7, 7, C)
        return F.gelu(self.norm(convolve(self.sr, x)))


@part
class WindowAttention(Attention):
    """Tokens attend to their own window (Twins' LSA, section 3.2). Their `Grid` must have windows.

    A map whose sides are not multiples of the window is padded at the right and bottom.

    Args:
        window: side of a window, in tokens.
        window_padding: 'mask': tokens in the padding are not attended to. 'zero': they are, with
            the keys and values of a zero token, as in timm and in Twins' detection code. 'mmseg':
            they are unless the map has padding at the right and at the bottom, as in
            MMSegmentation and Twins' segmentation code.
    """

    reads = ('window',)
    queries_are_keys = True
    keys_have_places = True
    sees_map = False

    def __init__(
        self, dim: int, heads: int, window: int, window_padding: str = 'mask', **drops: float
    ) -> None:
        super().__init__(dim, heads, **drops)
        self.window = window
        self.window_padding = window_padding
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    @classmethod
    def of_stage(cls, shape: StageShape, options: StageOptions) -> 'WindowAttention':
        if shape.window is None or shape.window < 1:
            raise ValueError(f'window of WindowAttention must be at least 1, got {shape.window}')
        padding = options.window_padding
        return cls(shape.dim, shape.heads, shape.window, padding, **options.drops_of_attention())

    @classmethod
    def describe(
        cls, grid: Grid, x: Tensor, batch: BatchPadding, shape: StageShape, options: StageOptions
    ) -> None:
        assert shape.window is not None
        grid.windows = grid_of_windows(x, grid.padding, shape.window, options.window_padding)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, H, W, C), in the same shape."""
        if grid.windows is None:
            raise ValueError('window attention needs the grid of its windows, Grid.windows')
        if self.window_padding != 'mask':
            x = fill_outside(x, grid.padding)
        k = self.window
        shape = x.shape
        x = to_windows(pad_to_multiple(x, k), k, k)  # (B * n, k * k, C)
        query, key, value = self.split_by_head(self.qkv(x), 3)  # (B * n, heads, k * k, d)
        x = self.attend_inside(query, key, value, grid.windows)  # (B * n, k * k, heads, d)
        x = self.proj(from_windows(x, k, k, shape))
        return x if self.drop is None else self.drop(x)

    def attend_inside(self, q: Tensor, k: Tensor, v: Tensor, windows: Grid) -> Tensor:
        """`attend`, some windows at a time where there are more than a kernel takes."""
        if is_exporting() or q.shape[0] <= MAX_BATCH:
            return self.attend(q, k, v, windows)
        parts = []
        for start in range(0, q.shape[0], MAX_BATCH):
            part = slice(start, start + MAX_BATCH)
            bias = None if windows.key_bias is None else windows.key_bias[part]
            grid = Grid(windows.height, windows.width, key_bias=bias, rotations=windows.rotations)
            parts.append(self.attend(q[part], k[part], v[part], grid))
        return torch.cat(parts)


@part
class MLP(nn.Module):
    """Two linear layers with a GELU (erf) between them and dropout after each.

    Args:
        dim: channels of the tokens.
        width: channels between the two layers.
        drop: the rate of dropout.
        recompute_gelu: training saves one of the two wide maps, that before the GELU, and
            recomputes the other. A second layer that does more than to apply its own weight, an
            adapter or one with hooks for example, is called, and both maps are saved.
    """

    def __init__(
        self, dim: int, width: int, drop: float = 0.0, recompute_gelu: bool = False
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, width)
        self.fc2 = nn.Linear(width, dim)
        self.drop = build_dropout(drop)
        self.recompute_gelu = recompute_gelu

    @classmethod
    def of_stage(cls, shape: StageShape, options: StageOptions) -> 'MLP':
        """The MLP of a block of a stage."""
        return cls(shape.dim, shape.mlp_width, options.drop_rate, options.recompute_gelu)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, H, W, C) or (B, T, C), in the same shape."""
        return self.contract(self.fc1(x))

    def contract(self, x: Tensor) -> Tensor:
        """The second layer on the GELU of the wide map."""
        if self.recompute_gelu and self.recomputes() and is_plain_linear(self.fc2):
            return gelu_linear(x, self.fc2.weight, self.fc2.bias)
        x = F.gelu(x)
        if self.drop is not None:
            x = self.drop(x)
        x = self.fc2(x)
        return x if self.drop is None else self.drop(x)

    def recomputes(self) -> bool:
        """Whether the GELU can be recomputed: compilers choose themselves what they recompute."""
        if not torch.is_grad_enabled() or is_compiling():
            return False
        return drops_nothing(self.drop)


@part
class ConvMLP(MLP):
    """An MLP with a zero-padded depthwise convolution before the GELU, from which position comes
    (PVTv2, section 3.2; SegFormer's Mix-FFN, section 3.1).

    Args:
        relu: a ReLU before the convolution, as in PVTv2's model with linear attention.
    """

    reads = ('mlp_relu',)

    def __init__(
        self,
        dim: int,
        width: int,
        drop: float = 0.0,
        recompute_gelu: bool = False,
        relu: bool = False,
    ) -> None:
        super().__init__(dim, width, drop, recompute_gelu)
        self.dwconv = depthwise(width, 3, padding=1)
        self.relu = relu

    @classmethod
    def of_stage(cls, shape: StageShape, options: StageOptions) -> 'ConvMLP':
        rates = options.drop_rate, options.recompute_gelu
        return cls(shape.dim, shape.mlp_width, *rates, relu=shape.mlp_relu)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, H, W, C), in the same shape."""
        x = self.fc1(x)
        if self.relu:
            x = F.relu(x)
        x = convolve(self.dwconv, fill_outside(x, grid.padding))
        return self.contract(x)


class PosCNN(nn.Module):
    """Positional Encoding Generator, PEG (CPVT, section 3.2): a zero-padded depthwise convolution,
    added to the tokens.

    The zeros beyond the border are the source of absolute position. The padding of a batch must
    look like them.

    Args:
        dim: channels of the tokens.
        kernel_size: side of the kernel, odd; the paper's is 3.
        conv: 'depthwise', 'separable' or 'dense', see `PEGConfig`.
        layers: number of convolutions in a row, each added to its input.
        zero_padding: False replicates the border of each image instead (CPVT, table 3).

    Examples:
        >>> peg = PosCNN(64)
        >>> peg(torch.rand(2, 14, 20, 64)).shape
        torch.Size([2, 14, 20, 64])
    """

    def __init__(
        self,
        dim: int,
        kernel_size: int = 3,
        conv: str = 'depthwise',
        layers: int = 1,
        zero_padding: bool = True,
    ) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f'kernel_size of a PEG must be odd, got {kernel_size}')
        if conv not in ('depthwise', 'separable', 'dense'):
            raise ValueError(f'conv of a PEG must be depthwise, separable or dense, got {conv!r}')
        if layers < 1:
            raise ValueError(f'layers of a PEG must be at least 1, got {layers}')
        self.layers = layers
        self.border = 0 if zero_padding else kernel_size // 2
        padding = kernel_size // 2 - self.border

        def convolution() -> nn.Module:
            if conv == 'dense' and kernel_size == 1:
                return PointwiseConv2d(dim, dim, 1)
            if conv == 'dense':
                return nn.Conv2d(dim, dim, kernel_size, padding=padding)
            spatial = depthwise(dim, kernel_size, padding)
            if conv == 'depthwise':
                return spatial
            return nn.Sequential(spatial, PointwiseConv2d(dim, dim, 1))

        self.proj = nn.Sequential(*(convolution() for _ in range(layers)))  # proj.0, as published

    def forward(self, x: Tensor, grid: Optional[Grid] = None) -> Tensor:
        """Tokens (B, H, W, C) with their position added, in the same shape."""
        padding = None if grid is None else grid.padding
        convolutions: Iterable[nn.Module] = self.proj
        if self.layers == 1:
            convolutions = [self.proj]  # called as a module, so that hooks on it are called
        for convolution in convolutions:
            if self.border:
                near = repeat_border(x, padding, self.border)
            else:
                near = fill_outside(x, padding)
            x = x + convolve(convolution, near)
        return x


def repeat_border(x: Tensor, padding: Optional[Padding], border: int) -> Tensor:
    """Extend each image by its nearest tokens, to (B, H + 2 border, W + 2 border, C)."""
    b, h, w, _ = x.shape
    # The row and the column that each token of the result comes from.
    rows = torch.arange(-border, h + border, device=x.device).clamp(0, h - 1).expand(b, -1)
    columns = torch.arange(-border, w + border, device=x.device).clamp(0, w - 1).expand(b, -1)
    if padding is not None:
        height, width = padding.sizes()
        rows = rows.minimum(height[:, None] - 1).clamp(min=0)
        columns = columns.minimum(width[:, None] - 1).clamp(min=0)
    batch = torch.arange(b, device=x.device)[:, None, None]
    return x[batch, rows[:, :, None], columns[:, None]]


def build_peg(peg: PEGConfig, dim: int) -> PosCNN:
    """A PEG for tokens with `dim` channels."""
    return PosCNN(dim, peg.kernel_size, peg.conv, peg.layers, peg.zero_padding)


def init_weights(module: nn.Module) -> None:
    """Initial weights of the papers' code (Twins, PVT, DeiT)."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.out_channels * math.prod(module.kernel_size) // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def init_pegs(model: nn.Module, peg: Optional[PEGConfig]) -> None:
    """Zero and freeze the PEGs of a model, according to `zero_init` and `frozen`."""
    if peg is None:
        return
    for part in model.modules():
        if isinstance(part, PosCNN):
            part.requires_grad_(not peg.frozen)
            if peg.zero_init:
                for parameter in part.parameters():
                    nn.init.zeros_(parameter)


def set_checkpointing(model: nn.Module, enable: bool) -> None:
    """Switch activation checkpointing of all blocks of a model."""
    for module in model.modules():
        if isinstance(module, Block):
            module.with_cp = enable
