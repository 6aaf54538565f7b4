"""The models of the laboratory: tiny CPVTs that answer all questions about a picture at once.

A token of the columnar model is one cell of a picture, and so is a token of the pyramid's last
stage. Without position neither can know where a cell is: permuted cells give permuted tokens.
"""

from typing import NamedTuple, Optional

import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_pyramid.archs import Arch, ColumnarArch
from cpvt_pyramid.columnar import Column
from cpvt_pyramid.layers import LayerNorm
from cpvt_pyramid.padding.mask import mean_inside, pixel_mask, subsample
from cpvt_pyramid.position import PEGConfig
from cpvt_pyramid.pyramid import CPVTPyramid

from .scenes import LEFTMOST, NOTHING, OTHER
from .tasks import TASKS

PIXELS = 8  # the segmentor predicts 8 x 8 pixels for each token
PIXEL_CLASSES = len((NOTHING, LEFTMOST, OTHER))
READINGS = 11  # of a token: no digit, or 0 to 9


COLUMN = ColumnarArch(dim=48, heads=4, depth=4, mlp_ratio=2, patch_size=8)
PYRAMID = Arch((16, 32, 48, 48), (1, 2, 4, 4), (2, 2, 2, 2), (1, 1, 2, 2))
CELLS = {'column': 8, 'pyramid': 32}  # side of a token, in pixels


class Answers(NamedTuple):
    """What a model says about B pictures with h x w tokens."""

    logits: dict[str, Tensor]  # (B, classes) for each task
    readings: Tensor  # (B, h, w, READINGS), which digit a token shows
    boxes: Tensor  # (B, h, w, 4), x1 y1 x2 y2 of its ink, in tokens from the token's corner
    pixels: Tensor  # (B, PIXEL_CLASSES, PIXELS * h, PIXELS * w)


class LabModel(nn.Module):
    """A backbone and linear heads: a classifier for each task, a detector and a segmentor.

    Args:
        kind: 'column' or 'pyramid'.
        position: as in `Column` and `CPVTPyramid`.
        peg: as there.
        position_options: as there.
        class_token: whether the classifiers read a class token; else the mean of the map (GAP). The
            pyramid has none.
        side: of the pictures in training, in pixels.
    """

    def __init__(
        self,
        kind: str = 'column',
        position: str = 'peg',
        peg: Optional[PEGConfig] = None,
        position_options: Optional[dict] = None,
        class_token: bool = True,
        side: int = 48,
    ) -> None:
        super().__init__()
        options = dict(
            position=position, peg=peg, position_options=position_options, pretrain_img_size=side
        )
        if kind == 'column':
            self.backbone = Column(COLUMN, class_token=class_token, **options)
            dim = self.backbone.arch.dim
        else:
            self.backbone = CPVTPyramid(PYRAMID, **options)
            dim = self.backbone.channels[-1]
        self.cell = CELLS[kind]
        self.norm = LayerNorm(dim, eps=1e-6)
        self.tasks = nn.ModuleDict({name: nn.Linear(dim, t.classes) for name, t in TASKS.items()})
        self.read = nn.Linear(dim, READINGS)
        self.box = nn.Linear(dim, 4)
        self.segment = nn.Linear(dim, PIXEL_CLASSES * PIXELS**2)

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> Answers:
        """The answers for pictures (B, 3, H, W), with their `valid` sizes in a padded batch."""
        if isinstance(self.backbone, Column):
            summary, x, mask = self.backbone.features(image, valid)
        else:
            x = self.backbone(image, valid)[-1].permute(0, 2, 3, 1)
            summary = None
            mask = subsample(pixel_mask(valid, image), self.cell)
        x = self.norm(x)
        summary = mean_inside(x, mask) if summary is None else self.norm(summary)
        pixels = self.segment(x).permute(0, 3, 1, 2)
        return Answers(
            {name: head(summary) for name, head in self.tasks.items()},
            self.read(x),
            self.box(x),
            F.pixel_shuffle(pixels, PIXELS),
        )
