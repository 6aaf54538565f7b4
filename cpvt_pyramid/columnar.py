"""The columnar CPVT: a ViT of one resolution, with a PEG or an encoding it is compared with.

Shapes: B batch, H x W map, C channels, N = H * W tokens. Between the patch embedding and the last
block, tokens are (B, T, C): a class token, if the model has one, then the map's, row by row.
Before and after, they are (B, H, W, C).
"""

from collections.abc import Collection, Sequence
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .archs import ColumnarArch, check_heads, check_out_indices, check_rates, find_arch
from .bfloat16 import corrected_bfloat16
from .checkpoints.hook import convert_on_load
from .checkpoints.rgb import check_rgb_weights
from .grid import Grid, bias_of_keys, crop
from .layers import LayerNorm, build_dropout, convolve
from .model import (
    MLP,
    Attention,
    Block,
    PatchEmbed,
    build_peg,
    init_pegs,
    init_weights,
    name_of_first_conv,
)
from .padding.batching import ceil_div
from .padding.mask import BatchPadding, Padding, check_image, fill_outside, mean_inside
from .position import PEGConfig, Site, check_image_size, parse_position


class Column(nn.Module):
    """The part common to classifier and dense backbone: from the image to the last block.

    Parameter names are those of DeiT's authors and of timm, whose checkpoints `load_state_dict`
    takes as they are (see `cpvt_pyramid.checkpoints.hook`).

    Arguments are those of `CPVT`, without `num_classes`.
    """

    reads_map = True  # whether the map is used where there is a class token

    def __init__(
        self,
        arch: Union[str, ColumnarArch, dict] = 'cpvt_small',
        *,
        position: str = 'peg',
        position_options: Optional[dict] = None,
        peg: Union[PEGConfig, dict, None] = None,
        class_token: bool = True,
        pretrain_img_size: Union[int, Sequence[int]] = 224,
        in_channels: int = 3,
        rgb_weights: Union[str, Sequence[str], None] = None,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        check_rgb_weights(rgb_weights, in_channels)
        self.in_channels = in_channels
        self.rgb_weights = rgb_weights
        convert_on_load(self)
        self.arch = arch = find_arch(arch, ColumnarArch)
        check_heads(arch.dim, arch.heads)
        check_rates(drop_rate, attn_drop_rate, drop_path_rate)
        encoding = parse_position(position, peg, position_options)
        self.peg_config = encoding.peg
        image_size = check_image_size(pretrain_img_size)
        attentions = (SelfAttention,)
        site = Site(arch.dim, arch.heads, image_size, arch.patch_size, attentions, mode='bicubic')
        # Nothing reads the map of a classifier's last block if there is a class token. A PEG after
        # that block would never train, and neither would its relative position.
        reads_last = self.reads_map or not class_token
        mapped = arch.depth if reads_last else arch.depth - 1  # blocks whose map is read

        self.patch_embed = PatchEmbed(in_channels, arch.dim, arch.patch_size, norm=False)
        self.pos_embed = encoding.on_tokens(site)
        self.rotation = encoding.rotation(site)
        self.cls_token = token(arch.dim) if class_token else None
        has_position = class_token and encoding.has_class_token
        self.cls_pos = token(arch.dim) if has_position else None
        self.pos_drop = build_dropout(drop_rate)
        self.blocks = nn.ModuleList()
        for i in range(arch.depth):
            attn = SelfAttention(arch.dim, arch.heads, attn_drop=attn_drop_rate, drop=drop_rate)
            mlp = MLP(arch.dim, int(arch.dim * arch.mlp_ratio), drop_rate)
            drop_path = drop_path_rate * i / max(arch.depth - 1, 1)
            self.blocks.append(Block(arch.dim, attn, mlp, drop_path, with_cp))
        self.pos_block = nn.ModuleDict()
        self.add_pegs(encoding.peg, mapped)
        encoding.add_to_scores(self.blocks[:mapped], site)

        self.apply(init_weights)
        init_pegs(self, encoding.peg)
        self.first_conv = name_of_first_conv(self)

    @staticmethod
    def with_all_parts(arch: ColumnarArch) -> 'Column':
        """A model with all that a published file of its kind may have, but its classifier."""
        return Column(arch, position='learned+peg', peg=PEGConfig(after=range(-1, arch.depth)))

    def add_pegs(self, peg: Optional[PEGConfig], mapped: int) -> None:
        """Build PEGs for the maps of the first `mapped` blocks, or for the queries and keys of the
        blocks after them."""
        if peg is None:
            return
        if not peg.qk_only:
            for i in peg.indices(mapped, mapped):
                self.pos_block[str(i)] = build_peg(peg, self.arch.dim)
            return
        followed = min(mapped, self.arch.depth - 1)  # the last block has none after it
        for i in peg.indices(followed, followed):
            block: Any = self.blocks[i + 1]
            block.attn.peg = build_peg(peg, self.arch.dim)

    def features(
        self, image: Tensor, valid: Optional[Tensor] = None
    ) -> tuple[Optional[Tensor], Tensor, BatchPadding]:
        """The output of the last block.

        Arguments are those of `CPVTPyramid.forward`.

        Returns:
            The class token (B, C), or None; the map (B, ceil(H / patch), ceil(W / patch), C), zero
            in the padding; and the padding of the batch.
        """
        batch = self.padding(image, valid)
        last = len(self.blocks) - 1
        first, x = self.block_outputs(image, batch, [last])[last]
        class_token = None if first is None else first[:, 0]
        return class_token, x, batch

    def padding(self, image: Tensor, valid: Optional[Tensor]) -> BatchPadding:
        """The padding of a batch, which is checked."""
        check_image(image, self.in_channels)
        return BatchPadding(image, valid)

    def block_outputs(
        self, image: Tensor, batch: BatchPadding, blocks: Collection[int]
    ) -> dict[int, tuple[Optional[Tensor], Tensor]]:
        """The outputs of some blocks, with the PEGs after them; those after the last of them do not
        run.

        Returns:
            For each, the class token (B, 1, C), or None, and the map (B, H, W, C), zero in the
            padding.
        """
        x, grid = self.embed(image, batch)
        found = {}
        for i in range(max(blocks) + 1):
            x = self.encode(self.blocks[i](x, grid), grid, after=i)
            if i in blocks:
                first, tokens = split_class_token(x, grid)
                class_token = first if grid.class_tokens else None
                found[i] = class_token, fill_outside(tokens, grid.padding)
        return found

    def embed(self, image: Tensor, batch: BatchPadding) -> tuple[Tensor, Grid]:
        """The input of the first block, and its grid."""
        x = fill_outside(image.permute(0, 2, 3, 1), batch.at(1))
        x = self.patch_embed(x)  # (B, H, W, C)
        grid = self.map_grid(x, batch)
        x = self.pos_embed(x, grid).flatten(1, 2)
        x = with_class_token(x, self.cls_token, self.cls_pos)  # (B, T, C)
        if self.pos_drop is not None:
            x = self.pos_drop(x)
        return self.encode(x, grid, after=-1), grid

    def map_grid(self, x: Tensor, batch: BatchPadding) -> Grid:
        """The grid of the map (B, H, W, C), which is the same for all blocks."""
        height, width = x.shape[1:3]
        padding = batch.at(self.arch.patch_size)
        class_tokens = int(self.cls_token is not None)
        bias = None if padding is None else bias_of_keys(padding, x, class_tokens)
        grid = Grid(height, width, padding=padding, class_tokens=class_tokens, key_bias=bias)
        if self.rotation is not None:
            self.rotation.describe(grid, self.arch.dim // self.arch.heads, x)
        return grid

    def encode(self, x: Tensor, grid: Grid, after: int) -> Tensor:
        """Apply the PEG after a block (-1: before the first), if there is one, to the tokens."""
        name = str(after)
        if name not in self.pos_block:
            return x
        return encode_map(self.pos_block[name], x, grid)


class SelfAttention(Attention):
    """Every token attends to every token, the class token included (ViT, DeiT).

    Attributes:
        peg: a PEG for queries and keys alone; the values are those of the tokens without it. None:
            there is none.
    """

    peg: Optional[nn.Module]
    queries_are_keys = True
    keys_have_places = True

    def __init__(self, dim: int, heads: int, **drops: float) -> None:
        super().__init__(dim, heads, **drops)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.peg = None
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, T, C), in the same shape."""
        q, k, v = self.split_by_head(self.qkv(x), 3)  # (B, heads, T, d)
        if self.peg is not None:
            q, k, _ = self.split_by_head(self.qkv(encode_map(self.peg, x, grid)), 3)
        x = self.proj(self.attend(q, k, v, grid).reshape(x.shape))
        return x if self.drop is None else self.drop(x)


def encode_map(position: nn.Module, x: Tensor, grid: Grid) -> Tensor:
    """Apply a position encoding to the map's tokens and not to the class token."""
    first, x = split_class_token(x, grid)
    x = position(x, grid).flatten(1, 2)
    return torch.cat([first, x], dim=1) if grid.class_tokens else x


def split_class_token(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Split tokens (B, T, C) into the class token (B, 0 or 1, C) and the map (B, H, W, C)."""
    first = x[:, : grid.class_tokens]
    return first, x[:, grid.class_tokens :].unflatten(1, (grid.height, grid.width))


class CPVT(Column):
    """The columnar CPVT as a classifier, and the models it is compared with.

    Parameter names are those of DeiT's authors and of timm, whose checkpoints `load_state_dict`
    takes as they are.

    Args:
        arch: a name from `COLUMNAR_ARCHS`, or your own `ColumnarArch` or dict of its fields.
        num_classes: classes of the classifier.
        **options: the keyword arguments below; unknown ones are an error.

    Keyword Args:
        position (str): as in `CPVTPyramid` ('learned' with a class token is DeiT), or 'relative'
            (learned, clipped to 8 rows and columns), or one of them and a PEG. Default: 'peg'.
        position_options (dict): `base` and `normalized` of 'rope', see `CPVTPyramid`; `reach` of
            'relative', at which distances are clipped. Default: as in its paper.
        peg (PEGConfig | dict): placement and structure of PEGs. Default: a 3x3 one after block 0.
            The paper's main models are `PEGConfig(after=range(6))`.
        class_token (bool): whether there is a class token in addition to the map's tokens. Without
            it the classifier reads the mean of the map (GAP; CPVT, section 4.4). Default: True.
        pretrain_img_size (int | Sequence[int]): side of the image in pixels, or height and width,
            for which a learned position embedding has one entry for each token. Default: 224.
        in_channels (int): channels of the image. Default: 3.
        rgb_weights (str | Sequence[str]): how the first convolution is made from a checkpoint for
            RGB, see `CPVTPyramid`. Default: such a checkpoint is an error.
        drop_rate (float): dropout after the position encoding, the attentions and in the MLPs.
        attn_drop_rate (float): dropout on the attention weights.
        drop_path_rate (float): rate of stochastic depth at the last block; it grows linearly, from
            0 at the first.
        with_cp (bool): activation checkpointing: less memory in training, more time.

    Raises:
        ValueError: as in `CPVTPyramid`.

    Examples:
        >>> model = CPVT('cpvt_tiny', peg=PEGConfig(after=range(6)))  # CPVT-Ti of the paper
        >>> model.eval()(torch.rand(1, 3, 224, 224)).shape
        torch.Size([1, 1000])
        >>> gap = CPVT('cpvt_tiny', peg=PEGConfig(after=range(6)), class_token=False)  # CPVT-Ti-GAP
        >>> deit = CPVT('cpvt_tiny', position='learned')  # DeiT-Ti
    """

    reads_map = False

    def __init__(
        self,
        arch: Union[str, ColumnarArch, dict] = 'cpvt_small',
        *,
        num_classes: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(arch, **options)
        self.norm = LayerNorm(self.arch.dim, eps=1e-6)
        self.head = nn.Linear(self.arch.dim, num_classes)
        init_weights(self.head)

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> Tensor:
        """The logits of an image, (B, num_classes). Arguments are those of `CPVTPyramid.forward`;
        with `valid`, an image's logits equal those of the image alone."""
        class_token, x, batch = self.features(image, valid)
        if class_token is not None:
            return self.head(self.norm(class_token))
        return self.head(mean_inside(self.norm(x), batch.at(self.arch.patch_size)))


class DenseCPVT(Column):
    """The columnar CPVT as a backbone: a simple feature pyramid from its last map.

    As in ViTDet (arXiv 2203.16527, section 3), where it takes the place of an FPN: the map at the
    patch's stride is resampled to a quarter, half and double that stride, and each level goes
    through a 1x1 and a 3x3 convolution with LayerNorm. All levels have the same channels.

    Args:
        arch: as in `CPVT`; the patch size must be a multiple of 4.
        out_indices: the levels, 0 to 3, that are returned. Others are not built.
        out_channels: channels of each level; 256 in ViTDet.
        **options: the keyword arguments of `CPVT`; unknown ones are an error.

    Attributes:
        channels: channels of each returned map.
        strides: stride of each returned map, in pixels: 4, 8, 16, 32 of a patch of 16.

    Examples:
        >>> model = DenseCPVT('cpvt_tiny').eval()
        >>> [tuple(y.shape) for y in model(torch.rand(1, 3, 64, 96))]
        [(1, 256, 16, 24), (1, 256, 8, 12), (1, 256, 4, 6), (1, 256, 2, 3)]
    """

    def __init__(
        self,
        arch: Union[str, ColumnarArch, dict] = 'cpvt_small',
        *,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        out_channels: int = 256,
        **options: Any,
    ) -> None:
        super().__init__(arch, **options)
        patch = self.arch.patch_size
        if patch % 4 or self.arch.dim % 4:
            raise ValueError(
                f'patch_size and dim of a feature pyramid must be multiples of 4, got {patch} and '
                f'{self.arch.dim}'
            )
        check_out_indices(out_indices, 'levels', 4)
        self.out_indices = tuple(out_indices)
        self.channels = (out_channels,) * len(self.out_indices)
        strides = (patch // 4, patch // 2, patch, 2 * patch)
        self.strides = tuple(strides[i] for i in self.out_indices)
        self.levels = nn.ModuleDict(
            {str(i): Level(self.arch.dim, out_channels, i) for i in self.out_indices}
        )
        self.levels.apply(init_weights)

    @staticmethod
    def with_all_parts(arch: ColumnarArch) -> 'DenseCPVT':
        """A model with all levels, and with all that a published file of its kind may have."""
        peg = PEGConfig(after=range(-1, arch.depth))
        return DenseCPVT(arch, position='learned+peg', peg=peg)

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """The maps of an image. Arguments and result are those of `CPVTPyramid.forward`."""
        _, x, batch = self.features(image, valid)
        padding = batch.at(self.arch.patch_size)
        out = []
        for i, stride in zip(self.out_indices, self.strides):
            size = ceil_div(image.shape[2], stride), ceil_div(image.shape[3], stride)
            out.append(self.levels[str(i)](x, padding, size, batch.at(stride)))
        return tuple(x.permute(0, 3, 1, 2) for x in out)


class Level(nn.Module):
    """A level of the simple feature pyramid, from tokens (B, H, W, C).

    Args:
        dim: channels of the tokens.
        out_channels: channels of the level.
        index: 0: the resolution is doubled twice, each time with half the channels; 1: it is
            doubled once; 2: it stays; 3: it is halved, by 2 x 2 max pooling.
    """

    def __init__(self, dim: int, out_channels: int, index: int) -> None:
        super().__init__()
        self.halve = index == 3
        self.up = nn.Sequential()
        if index <= 1:
            self.up.append(UnpatchConv(dim, dim // 2, 2, stride=2))
            dim = dim // 2
        if index == 0:
            second = UnpatchConv(dim, dim // 2, 2, stride=2)
            self.up.extend([LayerNorm(dim, eps=1e-6), nn.GELU(), second])
            dim = dim // 2
        self.proj = nn.Linear(dim, out_channels, bias=False)
        self.norm1 = LayerNorm(out_channels, eps=1e-6)
        self.conv = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = LayerNorm(out_channels, eps=1e-6)

    def forward(
        self,
        x: Tensor,
        padding: Optional[Padding],
        size: tuple[int, int],
        level_padding: Optional[Padding],
    ) -> Tensor:
        """Compute the level, (B, *size, out_channels), from tokens and their padding.

        It is zero in `level_padding`, the padding of the level itself.
        """
        if self.halve:
            x = fill_outside(x, padding, float('-inf'))
            x = F.max_pool2d(x.permute(0, 3, 1, 2), 2, ceil_mode=True).permute(0, 2, 3, 1)
        else:
            x = crop(self.up(x), *size)
        x = self.norm1(self.proj(fill_outside(x, level_padding)))
        # The kernel reads beyond the border of an image, where an image alone has zeros.
        x = convolve(self.conv, fill_outside(x, level_padding))
        return fill_outside(self.norm2(x), level_padding)


class UnpatchConv(nn.ConvTranspose2d):
    """A transposed convolution on tokens: (B, H, W, C) to (B, 2 H, 2 W, C')."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        with corrected_bfloat16(x.device.type):
            x = super().forward(x.permute(0, 3, 1, 2))
        return x.permute(0, 2, 3, 1)


def token(dim: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, dim), std=0.02))


def with_class_token(x: Tensor, cls_token: Optional[Tensor], cls_pos: Optional[Tensor]) -> Tensor:
    """Put the class token and its position, if there are any, before tokens (B, N, C)."""
    if cls_token is None:
        return x
    first = cls_token if cls_pos is None else cls_token + cls_pos
    return torch.cat([first.expand(x.shape[0], -1, -1), x], dim=1)
