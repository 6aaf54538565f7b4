"""Images that are read in parts are those that are read whole."""

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import numpy as np
import pytest
from PIL import Image
from support import photograph, save_tiff

from cpvt_pyramid.app.images import large
from cpvt_pyramid.app.images.large import georeference_of, open_large
from cpvt_pyramid.app.images.rasters import ReadError, read_bands
from cpvt_pyramid.app.images.reading import load_image

PHOTO = Image.fromarray(photograph(37, 61))
# Modes that Pillow writes in each format, and that GDAL reads as OpenCV does.
MODES = {
    'png': ('L', 'LA', 'RGB', 'RGBA'),
    'tif': ('L', 'RGB', 'RGBA'),
    'jpg': ('L',),  # GDAL enlarges colours by copying
    'bmp': ('RGB',),
    'webp': ('RGB', 'RGBA'),
    'pgm': ('L',),
    'ppm': ('RGB',),
    'jp2': ('L', 'RGB'),
}


def read_in_parts(path: Path, bands: Optional[Sequence[int]] = None) -> np.ndarray:
    """The image, some lines at a time."""
    with open_large(path, bands) as image:
        stops = (5, 6, image.shape[0])
        return np.concatenate([image.read(a, b) for a, b in zip((0, *stops), stops)])


@pytest.mark.parametrize(
    'ending, mode', [(ending, mode) for ending, modes in MODES.items() for mode in modes]
)
def test_all_kinds_of_images(ending, mode, monkeypatch):
    path = Path(f'a.{ending}')
    PHOTO.convert(mode).save(path)
    whole = load_image(path)
    assert whole.max() > 200
    np.testing.assert_array_equal(read_in_parts(path), whole)
    monkeypatch.setattr(large, 'needs_parts', lambda path: True)  # as if it were large
    np.testing.assert_array_equal(read_in_parts(path), whole)


def test_other_images_are_refused():
    """And not read as something else."""
    save_tiff('bands.tif', np.zeros((8, 8, 5), np.uint8))
    save_tiff('float.tif', np.zeros((8, 8, 1), np.float32))
    save_tiff('floats.tif', np.zeros((8, 8, 3), np.float32))
    Path('gone.png').symlink_to('nowhere.png')
    for name, message in (
        ('bands.tif', 'a TIFF of 5 bands'),
        ('float.tif', 'a TIFF of floating point values'),
        ('floats.tif', 'a TIFF of floating point values'),
        ('gone.png', 'a link to nowhere.png, which does not exist'),
        ('none.png', 'no such file'),
    ):
        for read in (load_image, read_in_parts):
            with pytest.raises(OSError, match=re.escape(message)):
                read(Path(name))


def test_georeference():
    """That of an image that is read whole, too; none of one that its EXIF data turn."""
    from rasterio.crs import CRS
    from rasterio.transform import from_origin

    place = {'crs': CRS.from_epsg(32633), 'transform': from_origin(500_000, 5_000_000, 2, 2)}
    path = Path(save_tiff('a.tif', np.zeros((37, 61, 3), np.uint8), **place))
    PHOTO.save('a.png')
    exif = Image.Exif()
    exif[0x0112] = 6
    PHOTO.save('turned.jpg', exif=exif)
    for name, expected in ((path, place), ('a.png', {'crs': None}), ('turned.jpg', {})):
        with open_large(Path(name)) as image:
            assert georeference_of(image) == expected


def test_an_image_of_a_side_that_none_has():
    """A file of some bytes could take all memory."""
    save_tiff('a.tif', np.zeros((8, 8, 2), np.float32))
    content = bytearray(Path('a.tif').read_bytes())
    place = content.index(struct.pack('<HHIHxx', 257, 3, 1, 8))
    content[place : place + 12] = struct.pack('<HHII', 257, 4, 1, 2**31 - 1)
    Path('a.tif').write_bytes(content)
    with pytest.raises(ReadError, match='8 x 2147483647 pixels, which is too large'):
        read_in_parts(Path('a.tif'), [1])


def test_bands_that_a_file_does_not_have():
    """Without the path, which the command tells."""
    save_tiff('a.tif', np.zeros((8, 8, 2), np.float32))
    with pytest.raises(ReadError, match=r'got \(3,\)$'):
        read_in_parts(Path('a.tif'), (3,))


def test_bands_in_parts():
    path = save_tiff('a.tif', np.random.default_rng(0).normal(size=(50, 30, 4)).astype(np.float32))
    whole = read_bands(path, [4, 1])
    np.testing.assert_array_equal(read_in_parts(Path(path), (4, 1)), whole)


def test_bands_of_a_cut_png():
    """GDAL alone reads what is missing as zeros."""
    PHOTO.save('a.png')
    content = Path('a.png').read_bytes()
    assert read_bands('a.png', [1, 2]).shape == (37, 61, 2)
    for damaged in (content[:-12], content[: len(content) // 2], content[:40]):
        Path('b.png').write_bytes(damaged)
        with pytest.raises(ReadError, match='not a complete image'):
            read_bands('b.png', [1, 2])


VRT = """
<VRTDataset rasterXSize="61" rasterYSize="37"><VRTRasterBand dataType="Byte" band="1">
<SimpleSource><SourceFilename>{}</SourceFilename><SourceBand>1</SourceBand></SimpleSource>
</VRTRasterBand></VRTDataset>
"""


@pytest.mark.filterwarnings('ignore:Dataset has no geotransform')
def test_no_file_names_another_file():
    """GDAL recognizes formats by their content, and some are lists of files and addresses."""
    import rasterio

    PHOTO.convert('L').save('secret.png')
    path = Path('photo.tif')
    path.write_text(VRT.format(Path('secret.png').resolve()))
    with rasterio.open(path) as image:  # the check can fail
        assert image.read(1).any()
    with pytest.raises(ReadError, match='not an image in one of the formats'):
        read_in_parts(path)
    with pytest.raises(ReadError, match='not a complete image'):
        read_bands(path, [1])
    with pytest.raises(ReadError, match='no such file'):  # an address, to GDAL
        read_bands(f'/vsisubfile/0,{Path("secret.png").resolve()}', [1])


def test_a_name_that_gdal_does_not_take():
    path = Path(os.fsdecode(b'a\xff.png'))
    with path.open('wb') as file:
        PHOTO.save(file, 'PNG')
    np.testing.assert_array_equal(read_in_parts(path), np.asarray(PHOTO))
    with pytest.raises(ReadError, match='GDAL needs a name in UTF-8'):
        read_in_parts(path, [1])
