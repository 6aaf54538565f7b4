"""The formats of images that this package reads, and how files of them are opened.

Pillow knows more formats than these. A file that begins with `%!PS`, whatever its name, is a
program to it, which it lets Ghostscript run. So all parts of this package open images here, and
only in these formats.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple, Union

from PIL import EpsImagePlugin, Image


class ImageFormat(NamedTuple):
    """A format under the names that others have for it."""

    driver: str  # of GDAL
    endings: tuple[str, ...]  # of the names of files


PRINTABLE = bytes([*range(0x20, 0x7F), *b'\t\r\n'])  # ASCII

# By Pillow's name.
FORMATS = {
    'AVIF': ImageFormat('AVIF', ('.avif',)),  # Pillow reads it from version 11.3 on
    'BMP': ImageFormat('BMP', ('.bmp',)),
    'GIF': ImageFormat('GIF', ('.gif',)),
    'HEIF': ImageFormat('HEIF', ('.heic', '.heif')),  # pillow-heif adds it to Pillow
    'JPEG': ImageFormat('JPEG', ('.jpg', '.jpeg', '.jfif')),
    'JPEG2000': ImageFormat('JP2OpenJPEG', ('.jp2',)),
    'PNG': ImageFormat('PNG', ('.png',)),
    'PPM': ImageFormat('PNM', ('.ppm', '.pgm')),
    'TIFF': ImageFormat('GTiff', ('.tif', '.tiff')),
    'WEBP': ImageFormat('WEBP', ('.webp',)),
}
# What files begin with that have the ending of an image and are none, and what to call it.
OTHER_CONTENTS = {
    b'%!PS': 'PostScript (EPS)',
    b'\xc5\xd0\xd3\xc6': 'PostScript (EPS)',
    b'%PDF': 'a PDF',
    b'8BPS': 'a Photoshop file',
    b'PK\x03\x04': 'a ZIP archive',
    b'\x1f\x8b': 'compressed by gzip',
    b'\x89HDF': 'an HDF5 file',
    b'version https://git-lfs': 'a pointer of Git LFS, whose file was not fetched (git lfs pull)',
    b'<!doctype html': 'a web page',
    b'<html': 'a web page',
    b'<svg': 'an SVG drawing',
    b'<?xml': 'XML',
}
HEIF_STARTS = b'ftypheic', b'ftypheix', b'ftypmif1'  # from the fifth byte on
IMAGE_ENDINGS = tuple(sorted(ending for kind in FORMATS.values() for ending in kind.endings))


@cache
def readable_formats() -> list[str]:
    """Those of `FORMATS` that the installed Pillow reads, with pillow-heif if that is there."""
    Image.init()
    if find_spec('pillow_heif'):
        from pillow_heif import register_heif_opener

        register_heif_opener(thumbnails=False)
    return [name for name in FORMATS if name in Image.OPEN]


def kind_of_content(path: Path) -> str:
    """What the content of a file looks like that is no image, in words; '' if it is unknown."""
    with path.open('rb') as file:
        beginning = file.read(512)
    for start, kind in OTHER_CONTENTS.items():
        if beginning.lstrip().lower().startswith(start.lower()):
            return kind
    if beginning[4:12] in HEIF_STARTS:
        return 'a HEIF photograph'
    if not beginning.strip(b'\0'):
        return 'filled with zeros'
    if not beginning.translate(None, PRINTABLE):
        return 'text'
    return ''


@contextmanager
def open_image(file: Union[str, Path, IO[bytes]]) -> Iterator[Image.Image]:
    """A context with `Image.open` of a file in one of `FORMATS`.

    Raises:
        PIL.UnidentifiedImageError: it is in none of them.
    """
    with ExitStack() as stack:
        if isinstance(file, (str, Path)):
            # Given a path, Pillow 12 maps an uncompressed TIFF into memory, and scrambles the
            # pixels if its EXIF data rotate it.
            file = stack.enter_context(Path(file).open('rb'))
        yield stack.enter_context(Image.open(file, formats=readable_formats()))


def without_ghostscript() -> None:
    """Keep Pillow from calling Ghostscript in this process, also for code that is not ours."""
    EpsImagePlugin.gs_binary = False
