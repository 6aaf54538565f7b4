"""The pyramid of CPVTv2 and Twins: four stages, each a map of half the resolution.

Shapes: B batch, H x W map, C channels. Tokens are (B, H, W, C); the maps that leave are
(B, C, H, W) views of them, which is channels-last memory.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

from torch import Tensor, nn

from .archs import ARCHS, Arch
from .layers import (
    Block,
    GlobalAttention,
    LayerNorm,
    PatchEmbed,
    WindowAttention,
    ceil_div,
    run_block,
)
from .mask import fill_outside, inside_of
from .position import PEG, NoPosition, parse_position, position_table
from .weights import prepare_state_dict

PATCH_SIZES = (4, 2, 2, 2)


class Stage(NamedTuple):
    """The parts of a stage, in the order in which the tokens meet them."""

    patch_embed: nn.Module
    position: nn.Module  # what is added before the first block: a table, or nothing
    blocks: nn.ModuleList
    pegs: list[nn.Module]  # before the first block, then after each; in CPVT only the second is one
    norm: nn.Module


class CPVTPyramid(nn.Module):
    """Pyramid vision transformer with a PEG after the first block of each stage.

    Parameter names are those of the published checkpoints, which `load_state_dict` takes as
    they are (see `cpvt_pyramid.weights`).

    Args:
        arch: a name from `ARCHS`, or an `Arch` (or a dict of its fields) of your own.
        position: where position comes from: 'peg' (CPVT), 'learned' (a table for each stage,
            interpolated to the map; PVT), 'sincos' (2-D, computed at the map's size), 'none', or
            'learned+peg', 'sincos+peg'. None: as published, 'learned' for PVT, else 'peg'.
        peg: where PEG stands and what it is made of, a `PEG` or a dict of its fields. None: as
            published. A stage that has fewer blocks has no PEG where there is no block.
        pretrain_img_size: side of the image, in pixels, for which a learned table has one entry
            for each token.
        in_channels: channels of the image.
        out_indices: the stages, 0 to 3, whose maps are returned. Stages after the last of them
            are not built.
        drop_rate: dropout after the patch embeddings, the attentions and in the MLPs.
        attn_drop_rate: dropout on the attention weights.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        stage_norm: a LayerNorm on each stage's output. None: as published, which is for SVT.
        window_padding: how windows that the map does not fill are treated (SVT): 'mask' or
            'zero', see `WindowAttention`.
        frozen_stages: how many stages, from the first, do not train (patch embedding, blocks,
            PEG and norm). 0 or -1: none.
        norm_eval: keep the norm layers in evaluation mode while training. LayerNorm acts the
            same in both; this is for norms that collect statistics, should you put some in.
        with_cp: activation checkpointing: less memory in training, more time.

    Attributes:
        channels: channels of each returned map.
        strides: stride of each returned map, in pixels.
    """

    def __init__(
        self,
        arch: Union[str, Arch, dict] = 'pcpvt_small',
        *,
        position: Optional[str] = None,
        peg: Union[PEG, dict, None] = None,
        pretrain_img_size: int = 224,
        in_channels: int = 3,
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
        super().__init__()
        self.arch = arch = find_arch(arch)
        check_options(arch, out_indices, frozen_stages, window_padding)
        check_rates(drop_rate, attn_drop_rate, drop_path_rate)
        table, peg = parse_position(position or arch.position, peg)
        if peg:
            if peg.qk_only:
                raise ValueError('peg.qk_only is of the columnar model, CPVT; the pyramid has none')
            peg.check(max(arch.depths))
        self.in_channels = in_channels
        self.out_indices = tuple(out_indices)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.with_cp = with_cp

        strides = [math.prod(PATCH_SIZES[: i + 1]) for i in range(len(arch.dims))]
        self.channels = tuple(arch.dims[i] for i in self.out_indices)
        self.strides = tuple(strides[i] for i in self.out_indices)

        used = max(self.out_indices) + 1
        last_block = max(sum(arch.depths) - 1, 1)
        stage_norm = arch.stage_norm if stage_norm is None else stage_norm

        def attention(stage: int, index: int) -> nn.Module:
            dim, heads = arch.dims[stage], arch.heads[stage]
            if arch.window and index % 2 == 0:
                return WindowAttention(
                    dim, heads, arch.window, window_padding, attn_drop_rate, drop_rate
                )
            return GlobalAttention(dim, heads, arch.sr_ratios[stage], attn_drop_rate, drop_rate)

        def block(stage: int, index: int) -> Block:
            dim, mlp_ratio = arch.dims[stage], arch.mlp_ratios[stage]
            drop_path = drop_path_rate * (sum(arch.depths[:stage]) + index) / last_block
            return Block(dim, attention(stage, index), mlp_ratio, drop_rate, drop_path)

        dims = arch.dims[:used]
        self.patch_embeds = nn.ModuleList(
            PatchEmbed(*shape, drop_rate)
            for shape in zip((in_channels, *dims[:-1]), dims, PATCH_SIZES)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(block(stage, index) for index in range(arch.depths[stage]))
            for stage in range(used)
        )
        self.pos_embeds = nn.ModuleList(
            position_table(table, dim, ceil_div(pretrain_img_size, stride))
            for dim, stride in zip(dims, strides)
        )
        pegs = [
            {str(i): peg.build(dim) for i in peg.indices(depth)} if peg else {}
            for dim, depth in zip(dims, arch.depths)
        ]
        # The published PEG has a name to itself: the one after the first block of each stage.
        self.pos_block = nn.ModuleList(of_stage.pop('0', NoPosition()) for of_stage in pegs)
        self.more_pos_block = nn.ModuleList(nn.ModuleDict(of_stage) for of_stage in pegs)
        self.no_position = NoPosition()
        self.norm_list = nn.ModuleList(
            LayerNorm(dim, eps=1e-6) if stage_norm else nn.Identity() for dim in dims
        )

        self.apply(init_weights)
        if peg:
            peg.start(self)
        self.peg_starts_at_zero = bool(peg) and peg.zero_init
        self._register_load_state_dict_pre_hook(prepare_state_dict, with_module=True)
        self.train()

    def stages(self) -> list[Stage]:
        """The stages that are built."""
        stages = []
        for i, blocks in enumerate(self.blocks):
            pegs = {'0': self.pos_block[i], **self.more_pos_block[i]}
            pegs = [pegs.get(str(j), self.no_position) for j in range(-1, len(blocks))]
            table, norm = self.pos_embeds[i], self.norm_list[i]
            stages.append(Stage(self.patch_embeds[i], table, blocks, pegs, norm))
        return stages

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """The maps of an image.

        Args:
            image: (B, in_channels, H, W), of any size from 1 x 1.
            valid: (B, 2), the true height and width of each image in pixels, where the batch is
                padded at the right and bottom. Features inside are then those of the image
                alone, and zero outside. None: nothing is padding.

        Returns:
            For each of `out_indices` a map (B, C, ceil(H / stride), ceil(W / stride)).
        """
        return self.maps(image, inside_of(valid, image))

    def maps(self, image: Tensor, inside: Optional[Tensor]) -> tuple[Tensor, ...]:
        """`forward`, with (B, H, W, 1) booleans, True inside of each image, or None."""
        x = image.permute(0, 2, 3, 1)  # (B, H, W, in_channels)
        out = []
        for stage in self.stages():
            x, inside = self.run_stage(stage, x, inside)
            out.append(fill_outside(x, inside))
        return tuple(out[i].permute(0, 3, 1, 2) for i in self.out_indices)

    def run_stage(
        self, stage: Stage, x: Tensor, inside: Optional[Tensor] = None
    ) -> tuple[Tensor, Optional[Tensor]]:
        """The tokens that leave a stage, and which of them are `inside`."""
        patch_embed, position, blocks, (before, *pegs), norm = stage
        x, inside = patch_embed(x, inside)
        x = before(position(x, inside), inside)
        for block, peg in zip(blocks, pegs):
            x = peg(run_block(self, block, x, inside), inside)
        return norm(x), inside

    def train(self, mode: bool = True) -> 'CPVTPyramid':
        super().train(mode)
        for stage in self.stages()[: max(self.frozen_stages, 0)]:
            for part in (stage.patch_embed, stage.position, stage.blocks, *stage.pegs, stage.norm):
                part.eval().requires_grad_(False)
        if self.norm_eval:
            for module in self.modules():
                if isinstance(module, (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)):
                    module.eval()
        return self

    def has_no_use_for(self, name: str) -> bool:
        """Whether published checkpoints hold a tensor that this model leaves out: of a classifier
        or of a stage that is not built."""
        part, *rest = name.split('.')
        if part in ('norm', 'head', 'cls_token', 'cls_pos'):
            return True
        return part in self._modules and rest[0].isdigit() and int(rest[0]) >= len(self.blocks)

    def can_do_without(self, name: str) -> bool:
        """Whether a tensor keeps its value when a checkpoint does not hold it: the stage norms of
        SVT start as the identity, and so do PEGs that start at zero."""
        part = name.split('.')[0]
        is_peg = part in ('pos_block', 'more_pos_block')
        return part == 'norm_list' or (is_peg and self.peg_starts_at_zero)

    @property
    def num_layers(self) -> int:
        """Layers as `layer_of` counts them, with one more for what follows the backbone."""
        return sum(self.arch.depths) + 2

    def layer_of(self, name: str) -> int:
        """The depth of a parameter, for learning rates that grow layer by layer.

        Args:
            name: the parameter's name in this model.

        Returns:
            0 for the first patch embedding and its table, 1 for the first block and its PEG, and
            so on; between the stages each part counts with the block before or behind it.
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
        in_stem = stage == 0 and part in ('patch_embeds', 'pos_embeds')
        return 0 if in_stem else 1 + sum(self.arch.depths[:stage]) + block


def find_arch(
    arch: Union[str, tuple, dict], archs: dict[str, tuple] = ARCHS, kind: type = Arch
) -> tuple:
    """The row in a table of one `kind` by its name, by a dict of fields, or itself."""
    if isinstance(arch, dict):
        return kind(**arch)
    if isinstance(arch, kind):
        return arch
    if arch not in archs:
        raise ValueError(f'unknown arch {arch!r}; one of {", ".join(archs)}')
    return archs[arch]


def check_options(
    arch: Arch, out_indices: Sequence[int], frozen_stages: int, window_padding: str
) -> None:
    stages = len(arch.dims)
    for field in ('heads', 'mlp_ratios', 'depths', 'sr_ratios'):
        entries = len(getattr(arch, field))
        if entries != stages:
            raise ValueError(f'arch has {stages} dims but {entries} {field}; one for each stage')
    for dim, heads in zip(arch.dims, arch.heads):
        check_heads(dim, heads)
    if not out_indices or not all(0 <= i < stages for i in out_indices):
        raise ValueError(f'out_indices={tuple(out_indices)}; stages from 0 to {stages - 1}')
    if not -1 <= frozen_stages <= stages:
        raise ValueError(f'frozen_stages={frozen_stages}; a number of stages from -1 to {stages}')
    if window_padding not in ('mask', 'zero'):
        raise ValueError(f"window_padding={window_padding!r}; 'mask' or 'zero'")


def check_heads(dim: int, heads: int) -> None:
    if dim % heads:
        raise ValueError(f'{heads} heads in {dim} channels; the heads must divide them')


def check_rates(*rates: float) -> None:
    if not all(0 <= rate < 1 for rate in rates):
        raise ValueError(f'drop rates {rates}; each from 0 up to, but not, 1')


def init_weights(module: nn.Module) -> None:
    """Initial weights of the papers' code (Twins, PVT, DeiT)."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.out_channels * math.prod(module.kernel_size) // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        nn.init.zeros_(module.bias)
