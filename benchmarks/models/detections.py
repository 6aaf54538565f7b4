"""What a detector of MMDetection finds in the first image of a batch, and whether that changes."""

from typing import Any

import numpy as np
import torch
from mmdet.structures import DetDataSample
from torch import Tensor, nn

PIXELS, SCORE = 0.5, 0.005  # a smaller change of a box is none


@torch.no_grad()
def detect(model: nn.Module, *images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The boxes (N, 4) and scores (N,) of the first image of a batch.

    Args:
        model: whose `test_step` forms the batch.
        images: (H, W, 3) uint8 each, RGB, which are not resized.
    """
    samples: list[Any] = []
    tensors: list[Tensor] = []
    for image in images:
        shape = image.shape[:2]
        meta = dict(img_shape=shape, ori_shape=shape, scale_factor=(1.0, 1.0))
        samples.append(DetDataSample(metainfo=meta))
        bgr = np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1))
        tensors.append(torch.from_numpy(bgr))
    found = model.test_step(dict(inputs=tensors, data_samples=samples))[0].pred_instances
    return found.bboxes.numpy(), found.scores.numpy()


def found_alone(
    boxes: np.ndarray, scores: np.ndarray, alone: np.ndarray, alone_scores: np.ndarray
) -> np.ndarray:
    """Which boxes are the same when the image is alone, (N,): at the same place, to `PIXELS`, with
    the same score, to `SCORE`."""
    moved = np.abs(boxes[:, None] - alone).max(2)
    rescored = np.abs(scores[:, None] - alone_scores)
    return ((moved <= PIXELS) & (rescored <= SCORE)).any(1)
