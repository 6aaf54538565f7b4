"""Which images are taken: those that every reader reads alike, told by their headers.

Training reads images with OpenCV, masks with Pillow, and windows of large images with GDAL. They
differ in alpha, CMYK, palettes, more than 8 bits, white-is-zero, orientation, frames and pages. So
an image has 8 bits a channel, is grey or RGB, and hides nothing. Any other file is refused in a
line that says what it is, and how to convert it.

HEIC, the format of telephones, is for predictions alone: OpenCV does not know it. Pillow reads
it with pillow-heif, which turns it upright.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from .formats import kind_of_content, open_image, readable_formats
from .rasters import LONGEST, ReadError

ORIENTATION = 0x0112  # EXIF and TIFF tag
TURNED = range(2, 9)  # all but upright; others have no meaning
ON_THEIR_SIDE = range(5, 9)  # orientations that turn rows into columns
WITH_PALETTE = ('PNG', 'BMP')
TIFF_STARTS = b'II*\0', b'MM\0*', b'II+\0', b'MM\0+'
PAGES = 32  # of a TIFF that are looked at
PART = 0b101  # bits of a page's SUBFILE_TYPE: overviews and masks
# Tags of TIFF
SUBFILE_TYPE, WIDTH, LENGTH, BITS, COMPRESSION, PHOTOMETRIC = 254, 256, 257, 258, 259, 262
SAMPLES, EXTRA_SAMPLES, SAMPLE_FORMAT = 277, 338, 339
NO_SAMPLE_FORMATS = {2: 'signed', 3: 'floating point', 5: 'complex', 6: 'complex'}
COMPRESSIONS = {1, 5, 7, 8, 32773, 32946}  # none, LZW, JPEG, Deflate (twice), PackBits
COMPRESSION_NAMES = {6: 'old JPEG', 34712: 'JPEG 2000', 34887: 'LERC', 34925: 'LZMA', 50000: 'ZSTD'}
PHOTOMETRICS = {
    0: 'white is zero',
    1: 'grey',
    2: 'RGB',
    3: 'a palette',
    4: 'a transparency mask',
    5: 'CMYK',
    6: 'YCbCr',
    8: 'CIELab',
}
RULE = 'an image must have 8 bits a channel, be grey or RGB, and hide nothing'


class Header(NamedTuple):
    """What a header says of an image that is taken.

    Attributes:
        format: Pillow's name of it.
        size: height and width of the upright image in pixels.
        has_alpha: whether there is an alpha channel, which must be opaque.
        is_turned: whether an EXIF orientation turns it.
    """

    format: str
    size: tuple[int, int]
    has_alpha: bool = False
    is_turned: bool = False


class OtherImage(ReadError):
    """An image that is refused for its kind."""

    def __init__(self, path: Path, what: str, bands: bool = False) -> None:
        self.what = what
        advice = f'convert it: {conversion_of(path)}'
        if bands:
            advice += ', or declare its bands (docs/bands.md)'
        super().__init__(f'{what}; {RULE}; {advice}')


class TooManyPixels(ReadError):
    """An image with more pixels than are read as a whole."""


def check_for_training(path: Path, header: Header) -> None:
    """Raise an OtherImage for what predictions take, and OpenCV, with which training reads, does
    not."""
    if header.format == 'HEIF':
        raise OtherImage(path, 'a HEIF photograph, which OpenCV does not read in training')


def conversion_of(path: Path) -> str:
    """A command of ImageMagick that converts an image to one that is taken.

    The first page or frame; upright; without alpha; RGB of 8 bits.
    """
    source = shlex.quote(f'{path}[0]')
    target = shlex.quote(str(path.with_name(f'{path.stem}-rgb.png')))
    return f'magick {source} -auto-orient -alpha off -colorspace sRGB -depth 8 {target}'


def is_tiff(path: Path) -> bool:
    with path.open('rb') as file:
        return file.read(4) in TIFF_STARTS


def read_header(path: Path) -> Header:
    """What the header of an image says.

    Raises:
        OtherImage: it is of another kind than `RULE` says.
        TooManyPixels: of a format other than TIFF.
        ReadError: not an image.
    """
    if is_tiff(path):
        return _header_of_tiff(path)
    try:
        with open_image(path) as image:
            return _header_of(path, image)
    except ReadError:
        raise
    except Image.DecompressionBombError as error:
        raise TooManyPixels(str(error)) from error
    except UnidentifiedImageError as error:
        kind = kind_of_content(path)
        if kind == 'a HEIF photograph' and 'HEIF' not in readable_formats():
            raise ReadError(
                f'{kind}, which pillow-heif reads; pip install pillow-heif, or convert it: '
                f'{conversion_of(path)}'
            ) from error
        kinds = ', '.join(name for name in readable_formats() if name not in UNREAD)
        found = f'; it is {kind}' if kind else ''
        raise ReadError(f'not an image in one of the formats {kinds}{found}') from error
    except Exception as error:  # Pillow raises many kinds on a damaged file
        raise ReadError(f'not a complete image: {error}') from error


# Of JPEG 2000: sRGB and grey, with the number of channels. OpenCV reads others as grey.
COLOR_SPACES = {(16, 3), (16, 4), (17, 1), (17, 2)}
UNREAD = ('AVIF', 'GIF')  # that OpenCV's wheels do not read


def _header_of(path: Path, image: Image.Image) -> Header:
    """As `read_header`, of an image that Pillow has opened."""
    kind = {'MPO': 'JPEG'}.get(image.format or '', image.format or '')
    if kind in UNREAD:
        raise OtherImage(path, f'a file in the format {kind}')
    if kind != 'JPEG' and getattr(image, 'is_animated', False):
        raise OtherImage(path, 'an image of several frames')
    depth = image.info['bit_depth'] if kind == 'HEIF' else depth_of(path, kind)
    if depth not in (1, 2, 4, 8):
        raise OtherImage(path, f'{kind} of {depth} bits a channel', bands=depth > 8)
    mode = image.mode
    allowed = {'1', 'L', 'RGB', 'LA', 'RGBA', 'RGBX'}
    if kind in WITH_PALETTE:
        allowed |= {'P', 'PA'}
    if mode not in allowed:
        words = {'P': 'with a palette'}.get(mode, f'in {mode}')
        raise OtherImage(path, f'{kind} {words}')
    orientation = exif_orientation(image)
    if orientation != 1 and kind != 'JPEG':
        raise OtherImage(path, f'{kind} that its EXIF orientation turns, which few readers do')
    width, height = image.size
    if orientation in ON_THEIR_SIDE:
        width, height = height, width
    has_alpha = mode in ('LA', 'RGBA', 'PA') or 'transparency' in image.info
    return Header(kind, (height, width), has_alpha, orientation != 1)


def exif_orientation(image: Image.Image) -> int:
    """The orientation in the EXIF data of an open image, from 1 (upright) to 8.

    XMP data, in which Pillow would look, too, mean nothing to OpenCV.
    """
    content = image.info.get('exif')
    if not content:
        return 1
    exif = Image.Exif()
    try:
        exif.load(content)
    except Exception:  # damaged; OpenCV does not turn it either
        return 1
    orientation: Any = exif.get(ORIENTATION)
    return orientation if orientation in TURNED else 1


def depth_of(path: Path, kind: str) -> int:
    """Bits a channel of an image of a format, where Pillow's mode does not tell."""
    with path.open('rb') as file:
        if kind == 'PNG':
            return file.read(25)[24]
        if kind == 'BMP':
            return _depth_of_bmp(file.read(30))
        if kind == 'PPM':
            return _depth_of_ppm(path, file.read(2**16))
        if kind == 'JPEG2000':
            return _depth_of_jpeg2000(path, file)
    return 8


def _depth_of_bmp(head: bytes) -> int:
    if head[14:18] == b'\x0c\0\0\0':  # OS/2
        bits = int.from_bytes(head[24:26], 'little')
    else:
        bits = int.from_bytes(head[28:30], 'little')
    return 5 if bits == 16 else min(bits, 8)  # of 3 channels of 5 or 6


def _depth_of_ppm(path: Path, head: bytes) -> int:
    match = re.match(rb'P([1-6])((?:\s+|#[^\n]*\n)+\d+){2}(?:\s+|#[^\n]*\n)+(\d+)', head)
    if head[:2] in (b'P1', b'P4'):
        return 1
    if not match:
        raise ReadError('not a complete image: the header of the PPM file is damaged')
    if int(match[3]) != 255:
        raise OtherImage(path, f'PPM of values up to {int(match[3])}')
    return 8


def _depth_of_jpeg2000(path: Path, file: IO[bytes]) -> int:
    content = file.read()
    start = content.find(b'\xff\x4f\xff\x51')  # of the code stream, and the marker of its size
    count = int.from_bytes(content[start + 40 : start + 42], 'big')
    components = content[start + 42 : start + 42 + 3 * count]
    if start < 0 or not count or len(components) < 3 * count:
        raise ReadError('not a complete image: no sizes of the channels')
    color = content.rfind(b'colr', 0, start)
    space = int.from_bytes(content[color + 7 : color + 11], 'big')
    if color < 0 or content[color + 4] != 1 or (space, count) not in COLOR_SPACES:
        raise OtherImage(path, f'JPEG 2000 of {count} bands that are not declared as grey or RGB')
    depths = {(components[i] & 127) + 1 for i in range(0, 3 * count, 3)}
    is_signed = any(components[i] & 128 for i in range(0, 3 * count, 3))
    is_subsampled = {*components[1::3], *components[2::3]} != {1}
    if is_signed or is_subsampled:
        raise OtherImage(path, 'JPEG 2000 of signed values or of channels of several sizes')
    return max(depths)


# TIFF


def tiff_pages(file: IO[bytes]) -> Iterator[dict[int, Any]]:
    """The tags of the first pages of a TIFF."""
    head = file.read(8)
    if 43 in head[2:4]:  # BigTIFF
        head += file.read(8)
    directory = ImageFileDirectory_v2(head)
    seen: set[int] = set()
    while directory.next and directory.next not in seen and len(seen) < PAGES:
        seen.add(directory.next)
        file.seek(directory.next)
        directory.load(file)
        yield dict(directory)


def read_only_page(path: Path) -> dict[int, Any]:
    """The tags of the only page of a TIFF, besides overviews and masks.

    Raises:
        OtherImage: there are others, or the first is a thumbnail.
        ReadError: not a TIFF.
    """
    try:
        with path.open('rb') as file:
            pages = list(tiff_pages(file))
        first = pages[0]
    except Exception as error:  # Pillow raises many kinds on a damaged file
        raise ReadError(f'not a complete image: {error}') from error
    if first.get(SUBFILE_TYPE, 0) & PART:
        raise OtherImage(path, 'a TIFF whose first page is a thumbnail or a mask')
    if any(not page.get(SUBFILE_TYPE, 0) & PART for page in pages[1:]):
        raise OtherImage(path, 'a TIFF of several pages')
    return first


def _header_of_tiff(path: Path) -> Header:
    first = read_only_page(path)
    size = int(first.get(LENGTH, 0)), int(first.get(WIDTH, 0))
    if min(size) < 1 or max(size) > LONGEST:
        raise ReadError(f'not a complete image: its header says {size[1]} x {size[0]} pixels')
    has_alpha = _check_samples(path, first)
    if first.get(ORIENTATION) in TURNED:
        raise OtherImage(path, 'a TIFF that its orientation turns, which few readers do')
    return Header('TIFF', size, has_alpha)


def _check_samples(path: Path, page: dict[int, Any]) -> bool:
    """Whether a page of a TIFF has an alpha channel. Raises an OtherImage for other samples."""
    bits = {*as_tuple(page.get(BITS, 1))}
    formats = {*as_tuple(page.get(SAMPLE_FORMAT, 1))} - {1, 4}
    samples = int(page.get(SAMPLES, 1))
    extra = as_tuple(page.get(EXTRA_SAMPLES, ()))
    photometric = int(page.get(PHOTOMETRIC, -1))
    compression = page.get(COMPRESSION, 1)
    if formats:
        words = NO_SAMPLE_FORMATS.get(min(formats), 'unknown')
        raise OtherImage(path, f'a TIFF of {words} values', bands=True)
    if bits != {8}:
        raise OtherImage(path, f'a TIFF of {max(bits)} bits a channel', bands=True)
    colors = samples - len(extra)
    is_ycbcr = photometric == 6 and compression == 7
    is_rgb = colors == 3 and (photometric == 2 or is_ycbcr)
    is_grey = colors == 1 and photometric == 1
    if photometric not in (1, 2, 6) or (photometric == 6 and not is_ycbcr):
        words = PHOTOMETRICS.get(photometric, f'the photometric interpretation {photometric}')
        raise OtherImage(path, f'a TIFF with {words}')
    if not (is_rgb or is_grey) or len(extra) > 1 or (extra and extra[0] not in (1, 2)):
        raise OtherImage(path, f'a TIFF of {samples} bands', bands=True)
    if compression not in COMPRESSIONS:
        words = COMPRESSION_NAMES.get(compression, str(compression))
        raise OtherImage(path, f'a TIFF with the compression {words}')
    return bool(extra)


def as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)
