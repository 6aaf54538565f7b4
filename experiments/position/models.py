"""The models: a small column of blocks, with linear heads for every question.

A token is one cell of a picture. Without position a model cannot know where a cell is: permuted
cells give permuted tokens.
"""

from typing import NamedTuple, Optional

import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_pyramid.archs import ColumnarArch
from cpvt_pyramid.columnar import Column
from cpvt_pyramid.position import PEGConfig

from .biases import ALiBi, LookHere
from .scenes import LEFTMOST, NOTHING, OTHER
from .tasks import TASKS

PIXELS = 8  # the segmentor predicts 8 x 8 pixels for each token
PIXEL_CLASSES = len((NOTHING, LEFTMOST, OTHER))
READINGS = 11  # of a token: no digit, or 0 to 9
COLUMN = ColumnarArch(dim=48, heads=4, depth=4, mlp_ratio=2, patch_size=8)
CELL = COLUMN.patch_size  # side of a token, in pixels


class Answers(NamedTuple):
    """What a model says about B pictures with h x w tokens."""

    logits: dict[str, Tensor]  # (B, classes) for each task
    readings: Tensor  # (B, h, w, READINGS), which digit a token shows
    boxes: Tensor  # (B, h, w, 4), x1 y1 x2 y2 of its ink, in tokens from the token's corner
    pixels: Tensor  # (B, PIXEL_CLASSES, PIXELS * h, PIXELS * w)


class LabModel(nn.Module):
    """A backbone and linear heads: a classifier for each task, a detector and a segmentor.

    Args:
        position: as in `Column`; or 'alibi' or 'lookhere', which the package does not have.
        peg: as there.
        position_options: as there.
        class_token: whether the classifiers read a class token; else the mean of the map (GAP).
        side: of the pictures in training, in pixels.
    """

    def __init__(
        self,
        position: str = 'peg',
        peg: Optional[PEGConfig] = None,
        position_options: Optional[dict] = None,
        class_token: bool = True,
        side: int = 48,
    ) -> None:
        super().__init__()
        is_bias = position in ('alibi', 'lookhere')
        self.backbone = Column(
            COLUMN,
            position='none' if is_bias else position,
            peg=peg,
            position_options=position_options,
            pretrain_img_size=side,
            class_token=class_token,
        )
        for i, block in enumerate(self.backbone.blocks):
            if position == 'alibi':
                block.attn.position = ALiBi(COLUMN.heads)
            elif position == 'lookhere':
                block.attn.position = LookHere(COLUMN.heads, i / (COLUMN.depth - 1))
        dim = COLUMN.dim
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.tasks = nn.ModuleDict({name: nn.Linear(dim, t.classes) for name, t in TASKS.items()})
        self.read = nn.Linear(dim, READINGS)
        self.box = nn.Linear(dim, 4)
        self.segment = nn.Linear(dim, PIXEL_CLASSES * PIXELS**2)

    def forward(self, image: Tensor) -> Answers:
        """The answers for pictures (B, 3, H, W)."""
        summary, x, _ = self.backbone.features(image)
        x = self.norm(x)
        summary = x.mean((1, 2)) if summary is None else self.norm(summary)
        pixels = self.segment(x).permute(0, 3, 1, 2)
        return Answers(
            {name: head(summary) for name, head in self.tasks.items()},
            self.read(x),
            self.box(x),
            F.pixel_shuffle(pixels, PIXELS),
        )
