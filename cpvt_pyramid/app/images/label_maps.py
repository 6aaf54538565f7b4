"""Files of label maps: segmentation masks whose pixels are class indices, or colours. And how two
label maps differ."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import UnidentifiedImageError

from .formats import open_image
from .gate import is_tiff, read_only_page
from .rasters import ReadError

IGNORED = 255  # label of pixels that do not count
CHANNELS = 3  # of a colour
BLACK_AND_WHITE = np.array([[0, 0, 0], [255, 255, 255]], np.uint8)
NO_PALETTE = np.zeros((0, CHANNELS), np.uint8)


class StoredLabels(NamedTuple):
    """A label map as its file has it.

    Attributes:
        values: numbers (H, W), or colours (H, W, 3).
        palette: colours (N, 3) of the numbers from 0; N is 0 in a file without palette.
        is_jpeg: whether compression may have changed the values.
    """

    values: np.ndarray
    palette: np.ndarray = NO_PALETTE
    is_jpeg: bool = False

    @property
    def is_color(self) -> bool:
        return self.values.ndim == 3

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return self.values.dtype.kind in 'ui'

    def color_codes(self) -> np.ndarray:
        """The colours as 0xRRGGBB (H, W). Numbers without a palette are levels of grey."""
        channels = [self.values] * CHANNELS
        if self.is_color:
            channels = [self.values[..., i] for i in range(CHANNELS)]
        elif len(self.palette):
            palette = np.zeros((256, CHANNELS), np.uint8)
            palette[: len(self.palette)] = self.palette
            channels = [palette[self.values, i] for i in range(CHANNELS)]
        codes = np.zeros(self.values.shape[:2], np.uint32)
        for channel in channels:
            codes = codes << 8 | channel
        return codes


def read_label_map(path: Path) -> StoredLabels:
    """Read a label map, with Pillow as mmseg does.

    Raises:
        ReadError: not a complete image, or one of several pages or a kind that Pillow does not
            read.
    """
    try:
        if is_tiff(path):
            read_only_page(path)
        with open_image(path) as image:
            palette = NO_PALETTE
            if image.mode == '1':
                values = np.asarray(image).astype(np.uint8)
                palette = BLACK_AND_WHITE
            elif image.mode == 'P':
                values = np.asarray(image)
                palette = np.array(image.getpalette('RGB'), np.uint8).reshape(-1, CHANNELS)
            elif image.mode in ('L', 'F') or image.mode.startswith('I'):
                values = np.asarray(image)
            else:
                values = np.asarray(image.convert('RGB'))
            return StoredLabels(values, palette, image.format == 'JPEG')
    except ReadError:
        raise
    except UnidentifiedImageError as error:  # which shows a file object
        raise ReadError('not an image that Pillow reads, as training does') from error
    except Exception as error:  # Pillow raises many kinds on a truncated file, or on a large one
        raise ReadError(f'not an image that Pillow reads, as training does: {error}') from error


def pixel_confusion(truth: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Pixels by true class (row) and predicted class (column), without ignored ones."""
    valid = (truth != IGNORED) & (truth < classes) & (labels < classes)
    pairs = truth[valid].astype(np.int64) * classes + labels[valid]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def ious_of_classes(confusion: np.ndarray) -> np.ndarray:
    """The IoU of each class, from pixels by true and predicted class; nan for classes that do not
    occur."""
    hits = confusion.diagonal()
    with np.errstate(invalid='ignore'):
        return hits / (confusion.sum(0) + confusion.sum(1) - hits)


def nearest_at(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A label map or mask (H, W) at another (height, width), by copying."""
    rows, columns = (np.arange(new) * old // new for new, old in zip(size, labels.shape))
    return labels[rows][:, columns]
