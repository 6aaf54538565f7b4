"""Instance masks at the size of the image."""

import numpy as np

CELL = 4  # pixels of the model's input per cell of a mask over the whole image


def paste_masks(probabilities: np.ndarray, boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Masks (N, H, W) of an image from probabilities (N, h, w) inside boxes (N, 4)."""
    masks = np.zeros((len(boxes), *size), bool)
    for mask, grid, (x1, y1, x2, y2) in zip(masks, probabilities, boxes.astype(np.float64)):
        rows = np.arange(max(int(y1), 0), min(int(np.ceil(y2)), size[0]))
        columns = np.arange(max(int(x1), 0), min(int(np.ceil(x2)), size[1]))
        height, width = grid.shape
        v = (rows + 0.5 - y1) / max(y2 - y1, 1e-6) * height - 0.5
        u = (columns + 0.5 - x1) / max(x2 - x1, 1e-6) * width - 0.5
        mask[np.ix_(rows, columns)] = sample(grid, v, u) >= 0.5
    return masks


def enlarge_masks(
    probabilities: np.ndarray, scale: tuple[float, float], size: tuple[int, int]
) -> np.ndarray:
    """Masks (N, H, W) of an image from probabilities (N, h, w) of cells of the model's input, whose
    sides, without padding, are those of the image times a scale each."""
    rows = cells_of(size[0], scale[0])
    columns = cells_of(size[1], scale[1])
    masks = np.zeros((len(probabilities), *size), bool)
    for mask, grid in zip(masks, probabilities):
        mask[:] = sample(grid, rows, columns) > 0.5
    return masks


def cells_of(pixels: int, scale: float) -> np.ndarray:
    """The fractional cell of each pixel along an axis of the image. Cells of padding, which those
    of another batch may not have, are not read."""
    cells = (np.arange(pixels) + 0.5) * scale / CELL - 0.5
    last = np.ceil(pixels * scale / CELL) - 1
    return cells.clip(0, last)


def sample(grid: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Bilinear values of a grid (h, w), 0 outside, at fractional rows (R,) and columns (C,)."""

    def weights(positions: np.ndarray, length: int) -> np.ndarray:
        return np.maximum(1 - np.abs(positions[:, None] - np.arange(length)), 0).astype(np.float32)

    return weights(rows, grid.shape[0]) @ grid @ weights(columns, grid.shape[1]).T
