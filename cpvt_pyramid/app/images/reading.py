"""Reading images as training does: with OpenCV, in the way of mmcv's loader."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Optional, Union

import numpy as np
from PIL import Image, ImageOps

from ..tooling import memory
from ..tooling.command import optional_package
from .formats import open_image
from .gate import RULE, Header, OtherImage, TooManyPixels, read_header
from .rasters import ReadError, check_png, read_bands

Source = Union[str, Path, Image.Image, np.ndarray]  # an array is (H, W, 3) RGB uint8

OVERVIEW = 2048  # pixels, longer side of a picture that is only looked at
OPAQUE = 255


def import_cv2() -> ModuleType:
    """OpenCV, which reads and resizes images; a UserError says how to install it.

    It would print what is wrong with damaged files, which the readers here say.
    """
    cv2 = optional_package('cv2', 'reading images', "'opencv-python-headless<4.13'")
    cv2.setLogLevel(0)
    return cv2


def load_image(source: Source) -> np.ndarray:
    """An image as (H, W, 3) RGB uint8. All commands read images with this function.

    Its pixels are those that mmcv's `LoadImageFromFile` gives to a training, in the order RGB. See
    `gate` for what is taken. A JPEG is turned as its EXIF data say.

    Raises:
        OSError: not a complete image, one that the gate refuses, or that does not fit into memory.
        ValueError: an array of another shape or dtype, or a Pillow image of another mode.
        TypeError: neither a path nor a Pillow image nor an array.
    """
    if isinstance(source, np.ndarray):
        if source.ndim != 3 or source.shape[2] != 3 or source.dtype != np.uint8 or not source.size:
            raise ValueError(
                'an image array must be (height, width, 3) RGB uint8, '
                f'got {source.shape} {source.dtype}'
            )
        return source
    if isinstance(source, Image.Image):
        return rgb_of_pillow(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            'an image must be a path, a Pillow image or an array (height, width, 3) RGB uint8, got '
            f'{type(source).__name__}; PIL.Image.open reads bytes in io.BytesIO and open files'
        )
    path = Path(source)
    try:
        check_readable(path)
        header = read_header(path)
        if header.size[0] * header.size[1] > pixel_limit():
            raise TooManyPixels
        check_whole_file(path, header)
        return decode(path, header)
    except TooManyPixels as error:
        raise ReadError(too_large_text()) from error
    except PermissionError as error:
        raise ReadError('permission denied') from error
    except MemoryError as error:
        raise ReadError(no_memory_text(path)) from error


def rgb_of_pillow(image: Image.Image) -> np.ndarray:
    """A Pillow image as (H, W, 3) RGB uint8, turned as its EXIF data say."""
    raw = ''.join(str(tile) for tile in getattr(image, 'tile', ()))
    has_alpha = image.mode in ('LA', 'RGBA', 'PA') or 'transparency' in image.info
    if image.mode not in ('1', 'L', 'P', 'PA', 'LA', 'RGB', 'RGBA') or ';16' in raw:
        raise ValueError(f'{RULE}, got a Pillow image of mode {image.mode}')
    if has_alpha:
        lowest, _ = image.convert('RGBA').getchannel('A').getextrema()
        if lowest != OPAQUE:
            raise ValueError(f'{RULE}, got a Pillow image whose alpha channel hides pixels')
    return np.array(ImageOps.exif_transpose(image).convert('RGB'))


def check_whole_file(path: Path, header: Header) -> None:
    """Raise a ReadError unless a file is complete, where OpenCV reads damaged files in part."""
    if header.format == 'PNG':
        check_png(path)
    if header.format not in ('JPEG', 'TIFF'):
        return
    try:
        with open_image(path) as image:
            image.draft('L', (1, 1))  # a JPEG: at an eighth of its size
            image.load()
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises many kinds on a damaged file
        raise ReadError(f'not a complete image: {error}') from error


def decode(path: Path, header: Header) -> np.ndarray:
    """The pixels (H, W, 3) RGB uint8 of a file, as OpenCV reads them; of HEIC, as Pillow does.

    Raises:
        ReadError: OpenCV does not read it, or it has hidden pixels.
    """
    if header.format == 'HEIF':
        return decode_heif(path, header)
    cv2 = import_cv2()
    content = np.fromfile(path, np.uint8)
    try:
        if header.has_alpha:
            check_opaque(path, cv2.imdecode(content, cv2.IMREAD_UNCHANGED))
        pixels = cv2.imdecode(content, cv2.IMREAD_COLOR)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError from error
        raise ReadError('not a complete image: OpenCV cannot read it') from error
    if pixels is None:
        raise ReadError('not a complete image: OpenCV cannot read it')
    if pixels.shape[:2] != header.size:
        raise ReadError(
            f'its header says {header.size[1]} x {header.size[0]} pixels, and OpenCV reads '
            f'{pixels.shape[1]} x {pixels.shape[0]}; save it again'
        )
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels)


def check_opaque(path: Path, pixels: Optional[np.ndarray]) -> None:
    """Raise an OtherImage unless the alpha channel of what OpenCV reads of a file hides nothing.

    `pixels`: (H, W, 4), or of another shape without the channel. None: OpenCV reads nothing.
    """
    if pixels is None:
        return
    if pixels.shape[2:] != (4,):
        raise OtherImage(path, 'an image whose alpha channel OpenCV leaves out', bands=True)
    if pixels[..., 3].min() != OPAQUE:
        raise OtherImage(path, 'an image whose alpha channel hides pixels', bands=True)


def decode_heif(path: Path, header: Header) -> np.ndarray:
    """As `decode`; pillow-heif has turned the pixels."""
    try:
        with open_image(path) as image:
            if header.has_alpha and image.convert('RGBA').getchannel('A').getextrema()[0] != OPAQUE:
                raise OtherImage(path, 'an image whose alpha channel hides pixels')
            return np.array(image.convert('RGB'))
    except (ReadError, MemoryError):
        raise
    except Exception as error:  # pillow-heif raises several kinds on a damaged file
        raise ReadError(f'not a complete image: {error}') from error


def too_large_text() -> str:
    return (
        f'more than {pixel_limit() // 10**6} million pixels; cut or reduce it, or use cpvt infer '
        '--tile'
    )


def no_memory_text(path: Path) -> str:
    size = size_of(path)
    pixels = 'its pixels' if size is None else f'{size[1]} x {size[0]} pixels'
    return f'{pixels} do not fit into memory ({memory.free_text()}); reduce the image'


def pixel_limit() -> int:
    """The pixels of the largest image that Pillow reads."""
    return 2 * (Image.MAX_IMAGE_PIXELS or 2**40)


def check_readable(path: Path) -> None:
    """Raise an OSError unless there is a file that can be read to its end."""
    if path.is_symlink() and not path.exists():
        raise OSError(f'a link to {path.readlink()}, which does not exist')
    if not path.exists():
        raise OSError('no such file')
    if path.is_dir():
        with os.scandir(path):  # raises the reason if it cannot be read
            raise OSError('a folder, not a file')
    if not path.is_file():
        raise OSError('a pipe or device, not a file')
    if not path.stat().st_size:
        raise OSError('the file is empty')


def read_image(path: Union[str, Path], bands: Optional[Sequence[int]] = None) -> np.ndarray:
    """The image at `path`, see `load_image`, or, with their numbers, bands of it, (H, W, N) in
    float32.

    Raises:
        ReadError: not a complete image.
    """
    try:
        if bands:
            check_readable(Path(path))
            return read_bands(path, bands)
        return load_image(path)
    except MemoryError as error:  # of bands
        raise ReadError(no_memory_text(Path(path))) from error
    except OSError as error:
        raise ReadError(str(error)) from error


def picture(image: np.ndarray) -> np.ndarray:
    """An image, see `read_image`, as (H, W, 3) RGB uint8 to draw on.

    Of bands, the first three are red, green and blue, or else the first is grey, each stretched
    from its 2nd to its 98th percentile.
    """
    if image.dtype == np.uint8:
        return image
    shown = image[..., [0, 1, 2] if image.shape[2] >= 3 else [0, 0, 0]]
    some = shown[:: math.ceil(len(shown) / OVERVIEW)]
    low, high = np.percentile(some, (2, 98), axis=(0, 1))
    return (255 * ((shown - low) / np.maximum(high - low, 1e-12)).clip(0, 1)).astype(np.uint8)


def size_of(source: Source) -> Optional[tuple[int, int]]:
    """Height and width of an image, of a file those in its header; None if it cannot be read."""
    if isinstance(source, np.ndarray):
        return source.shape[:2]
    if isinstance(source, Image.Image):
        return ImageOps.exif_transpose(source).size[::-1]
    try:
        check_readable(Path(source))
        return read_header(Path(source)).size
    except OSError:  # `load_image` tells what is wrong
        return None


def rescaled_size(size: tuple[int, int], short: float, long: float) -> tuple[int, int]:
    """The largest (height, width) of the same aspect ratio with sides up to `short` and `long`, as
    mmcv's `rescale_size` computes it."""
    scale = min(long / max(size), short / min(size))
    return max(int(size[0] * scale + 0.5), 1), max(int(size[1] * scale + 0.5), 1)


def resize_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear resizing of an image (H, W, C) uint8 to (height, width), as the data pipelines of mm
    do it."""
    return _resized(image, size)


def resize_scores(scores: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear resizing of a map (H, W) float32 to (height, width)."""
    return _resized(scores, size)


def _resized(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if values.shape[:2] == tuple(size):
        return values
    cv2 = import_cv2()
    try:
        return cv2.resize(values, (size[1], size[0]), interpolation=cv2.INTER_LINEAR)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError from error
        raise
