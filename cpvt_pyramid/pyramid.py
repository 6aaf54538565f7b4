"""The pyramid of CPVTv2 and Twins: four stages, each a map of half the resolution.

Shapes: B batch, H x W map, C channels. Tokens are (B, H, W, C). The maps that leave are
(B, C, H, W) views of them, in channels-last memory: call `.contiguous()` before code that reads raw
NCHW memory.
"""

import math
from collections.abc import Sequence
from typing import Any, Optional, Union

from torch import Tensor, nn

from .archs import PATCH_SIZES, Arch, check_rates, check_stages, find_arch
from .checkpoints import LoadsCheckpoints
from .layers import Block, GlobalAttention, LayerNorm, PatchEmbed, WindowAttention
from .padding.mask import fill_outside, pixel_mask
from .position import (
    Grid,
    NoPosition,
    PEGConfig,
    attention_position,
    parse_position,
    position_table,
)

# Lists with an entry for each stage. `more_pos_block` exists only if PEGs follow other blocks than
# the first.
STAGE_PARTS = ('patch_embeds', 'pos_embeds', 'blocks', 'pos_block', 'norm_list', 'more_pos_block')
NORMS = (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class CPVTPyramid(LoadsCheckpoints):
    """Pyramid vision transformer with a PEG after the first block of each stage.

    Parameter names are those of the published checkpoints, which `load_state_dict` takes as
    they are (see `cpvt_pyramid.checkpoints`).

    Args:
        arch: a name from `ARCHS`, or an `Arch` (or a dict of its fields) of your own.
        position: where position comes from: 'peg' (CPVT), 'learned' (an embedding for each
            stage, interpolated to the map; PVT), 'sincos' (2-D sinusoidal), 'none', or,
            inside every attention, 'rope' or 'rope-mixed' (rotary) or 'alibi' (a penalty
            proportional to distance); or one of them and a PEG, as in 'learned+peg'. A sub-sampled
            key is at the centre of its patch. None: as published, 'learned' for PVT, else 'peg'.
        position_options: a dict, of 'rope' and 'rope-mixed': `base`, nearly the ratio of largest to
            smallest frequency, and `normalized`, coordinates across the image instead of
            counts of tokens. None: as in their paper.
        peg: placement and structure of PEGs, a `PEGConfig` or a dict of its fields. None: as
            published. Indices of blocks that a stage does not have are ignored in that stage.
        pretrain_img_size: side of the image in pixels, or height and width, for which a learned
            position embedding has one entry for each token.
        in_channels: channels of the image.
        rgb_weights: how the first convolution is made from a checkpoint for RGB where `in_channels`
            is not 3. 'mean': for each band the mean of the filters of red, green and blue;
            'repeat': these filters in turn; or the names of the bands, such as ('red', 'green',
            'blue', 'nir'), of which others than these three get the mean. Filters are scaled by
            3 / `in_channels`. None: such a checkpoint is an error.
        out_indices: the stages, 0 to 3, whose maps are returned. Stages after the last of them
            are not built.
        drop_rate: dropout after the patch embeddings, the attentions and in the MLPs.
        attn_drop_rate: dropout on the attention weights.
        drop_path_rate: rate of stochastic depth at the last block; it grows linearly, from 0 at the
            first.
        stage_norm: a LayerNorm on each stage's output. None: as published, only SVT has them.
        window_padding: how windows that the map does not fill are treated (SVT): 'mask': padded
            tokens are not attended to; 'zero': they are, as in timm.
        frozen_stages: number of stages, from the first, that do not train (patch embedding,
            blocks, PEG and norm). 0 or -1: none. In OpenMMLab's ResNet and Swin 0 freezes the
            stem; here the stem is part of the first stage.
        norm_eval: keep norm layers in evaluation mode in training; LayerNorms are the same in both.
        with_cp: activation checkpointing: less memory in training, more time.

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
        frozen_stages: int = 0,
        norm_eval: bool = False,
        with_cp: bool = False,
    ) -> None:
        super().__init__(in_channels, rgb_weights)
        self.arch = arch = find_arch(arch, Arch)
        check_stages(arch, out_indices, frozen_stages, window_padding)
        check_rates(drop_rate, attn_drop_rate, drop_path_rate)
        if position is None:
            position = arch.position
        encoding = parse_position(position, peg, position_options, columnar=False)
        peg = encoding.peg
        if encoding.options.get('normalized') and arch.window:
            raise ValueError(
                f'normalized coordinates need attention over the whole map, got an arch with '
                f'window={arch.window}'
            )
        if peg and peg.qk_only:
            raise ValueError('peg.qk_only needs the columnar model (CPVT, DenseCPVT)')
        self.out_indices = tuple(out_indices)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval

        strides = [math.prod(PATCH_SIZES[: i + 1]) for i in range(len(arch.dims))]
        self.channels = tuple(arch.dims[i] for i in self.out_indices)
        self.strides = tuple(strides[i] for i in self.out_indices)
        if stage_norm is None:
            stage_norm = arch.stage_norm

        def depth(stage: int, index: int) -> float:
            """From 0 for the first block of the pyramid to 1 for the last."""
            before = sum(arch.depths[:stage]) + index
            return before / max(sum(arch.depths) - 1, 1)

        def attention(stage: int, index: int) -> nn.Module:
            dim = arch.dims[stage]
            heads = arch.heads[stage]
            inside = attention_position(encoding, heads, dim // heads, depth(stage, index))
            drops = dict(attn_drop=attn_drop_rate, drop=drop_rate)
            if arch.window and index % 2 == 0:
                return WindowAttention(
                    dim, heads, arch.window, window_padding, position=inside, **drops
                )
            return GlobalAttention(dim, heads, arch.sr_ratios[stage], position=inside, **drops)

        def block(stage: int, index: int) -> Block:
            return Block(
                arch.dims[stage],
                attention(stage, index),
                arch.mlp_ratios[stage],
                drop_rate,
                drop_path=drop_path_rate * depth(stage, index),
                with_cp=with_cp,
            )

        def pegs(stage: int) -> dict[str, nn.Module]:
            """The PEGs of a stage, by the index of the block that they follow."""
            if peg is None:
                return {}
            after = peg.indices(arch.depths[stage], max(arch.depths))
            return {str(index): peg.build(arch.dims[stage]) for index in after}

        dims = arch.dims[: max(self.out_indices) + 1]  # of the stages that are built
        self.patch_embeds = nn.ModuleList()
        for stage, dim in enumerate(dims):
            inputs = dims[stage - 1] if stage else in_channels
            self.patch_embeds.append(PatchEmbed(inputs, dim, PATCH_SIZES[stage], drop_rate))
        self.pos_embeds = nn.ModuleList(
            position_table(encoding.kind, dim, pretrain_img_size, stride)
            for dim, stride in zip(dims, strides)
        )
        self.blocks = nn.ModuleList()
        for stage in range(len(dims)):
            blocks = [block(stage, index) for index in range(arch.depths[stage])]
            self.blocks.append(nn.ModuleList(blocks))
        # The published checkpoints name the PEG after the first block of each stage `pos_block.i`.
        self.pos_block = nn.ModuleList()
        after_others: list[dict[str, nn.Module]] = []
        for stage in range(len(dims)):
            stage_pegs = pegs(stage)
            self.pos_block.append(stage_pegs.pop('0', NoPosition()))
            after_others.append(stage_pegs)
        if any(after_others):
            self.more_pos_block = nn.ModuleList(nn.ModuleDict(each) for each in after_others)
        self.no_peg = NoPosition()
        self.norm_list = nn.ModuleList()
        for dim in dims:
            self.norm_list.append(LayerNorm(dim, eps=1e-6) if stage_norm else nn.Identity())

        self.apply(init_weights)
        if peg:
            peg.start(self)
        self.peg_starts_at_zero = peg is not None and peg.zero_init
        self.train()

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """The maps of an image.

        Args:
            image: (B, in_channels, H, W), of any size from 1 x 1.
            valid: (B, 2), the true height and width of each image in pixels, if the batch is
                padded at the right and bottom. Features inside an image then equal those of the
                image alone, and are zero outside. None: nothing is padding.

        Returns:
            For each of `out_indices` a map (B, C, ceil(H / stride), ceil(W / stride)).
        """
        x = image.permute(0, 2, 3, 1)  # (B, H, W, in_channels)
        mask = pixel_mask(valid, image)
        maps = []
        for i in range(len(self.blocks)):
            x, mask = self.forward_stage(i, x, mask)
            maps.append(fill_outside(x, mask).permute(0, 3, 1, 2))
        return tuple(maps[i] for i in self.out_indices)

    def forward_stage(
        self, i: int, x: Tensor, mask: Optional[Tensor] = None
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Run stage i; returns its tokens and mask."""
        x, mask = self.patch_embeds[i](x, mask)
        x = self.pos_embeds[i](x, mask)  # PVT's table; CPVT has none
        x = self.peg(i, -1)(x, mask)
        height, width = x.shape[1:3]
        grid = Grid(height, width, mask)
        blocks: Any = self.blocks[i]  # a ModuleList, whose type names no items
        for j, block in enumerate(blocks):
            x = self.peg(i, j)(block(x, grid), mask)  # CPVT: a PEG after block 0
        return self.norm_list[i](x), mask

    def peg(self, stage: int, block: int) -> nn.Module:
        """The PEG after a block of a stage (-1: before the first), or the identity."""
        if block == 0:
            return self.pos_block[stage]
        if not hasattr(self, 'more_pos_block'):
            return self.no_peg
        pegs: Any = self.more_pos_block[stage]  # a ModuleDict
        return pegs[str(block)] if str(block) in pegs else self.no_peg

    def train(self, mode: bool = True) -> 'CPVTPyramid':
        super().train(mode)
        for name in STAGE_PARTS:
            if self.frozen_stages > 0 and hasattr(self, name):
                for part in getattr(self, name)[: self.frozen_stages]:
                    part.eval().requires_grad_(False)
        if self.norm_eval:
            for module in self.modules():
                if isinstance(module, NORMS):
                    module.eval()
        return self

    def ignores_key(self, name: str) -> bool:
        """True if published checkpoints hold a tensor that this model leaves out: of a classifier
        or of a stage that is not built."""
        part, *rest = name.split('.')
        if part in ('norm', 'head', 'cls_token', 'cls_pos'):
            return True
        stage = rest[0] if rest else ''
        return part in STAGE_PARTS and stage.isdecimal() and int(stage) >= len(self.blocks)

    @property
    def num_layers(self) -> int:
        """The number of layers that `layer_of` counts, and one for all after the backbone."""
        return sum(self.arch.depths) + 2

    def layer_of(self, name: str) -> int:
        """The depth of a parameter, for learning rates that grow layer by layer.

        0 is the first patch embedding and its table, 1 the first block and its PEG, and so on.
        A later stage's patch embedding counts with its first block, a stage norm with the last.
        """
        part, *rest = name.split('.')
        stage = int(rest[0])
        if part == 'blocks':
            block = int(rest[1])
        elif part == 'more_pos_block':
            block = max(int(rest[1]), 0)
        elif part == 'norm_list':
            block = self.arch.depths[stage] - 1
        else:  # patch_embeds, pos_embeds, pos_block
            block = 0
        if stage == 0 and part in ('patch_embeds', 'pos_embeds'):
            return 0
        return 1 + sum(self.arch.depths[:stage]) + block


def init_weights(module: nn.Module) -> None:
    """Initial weights of the papers' code (Twins, PVT, DeiT)."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.out_channels * math.prod(module.kernel_size) // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
