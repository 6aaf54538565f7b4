"""Images that are read in parts are those that are read whole."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import photograph, save_tiff

from cpvt_pyramid.app.images.rasters import ReadError, read_bands
from cpvt_pyramid.app.images.reading import load_image
from cpvt_pyramid.app.predict.large_images import line_reader, open_large

PHOTO = Image.fromarray(photograph(37, 61))
DEEP = np.random.default_rng(0).integers(0, 2**16, (37, 61, 3), np.uint16)
# Modes that Pillow writes in each format.
MODES = {
    'png': ('1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'I;16'),
    'tif': ('1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'I;16'),
    'jpg': ('L', 'RGB'),
    'bmp': ('1', 'L', 'P', 'RGB'),
    'webp': ('RGB', 'RGBA'),
    'gif': ('L', 'P'),
    'pgm': ('L',),
    'ppm': ('RGB',),
    'jp2': ('L', 'RGB'),
}


def read_in_parts(path: Path) -> np.ndarray:
    """The image, some lines at a time."""
    with open_large(path) as image:
        read = line_reader(image)
        return np.concatenate([read(0, 5), read(5, 6), read(6, image.height)])


@pytest.mark.parametrize(
    'ending, mode', [(ending, mode) for ending, modes in MODES.items() for mode in modes]
)
def test_all_kinds_of_images(ending, mode):
    path = Path(f'a.{ending}')
    image = Image.fromarray(DEEP[..., 0]) if mode == 'I;16' else PHOTO.convert(mode)
    image.save(path)
    whole = load_image(path)
    assert whole.max() > 200
    np.testing.assert_array_equal(read_in_parts(path), whole)


@pytest.mark.parametrize('bits', [1, 2, 4])
@pytest.mark.parametrize('driver', ['PNG', 'GTiff'])
def test_gray_of_few_bits(bits, driver):
    import rasterio

    values = np.random.default_rng(0).integers(0, 2**bits, (37, 61), np.uint8)
    path = Path('a.png' if driver == 'PNG' else 'a.tif')
    options = {'driver': driver, 'width': 61, 'height': 37, 'count': 1, 'dtype': 'uint8'}
    with rasterio.open(path, 'w', **options, nbits=bits) as file:
        file.write(values, 1)
    whole = load_image(path)
    assert whole.max() == 255
    np.testing.assert_array_equal(whole[..., 0], values * (255 // (2**bits - 1)))
    np.testing.assert_array_equal(read_in_parts(path), whole)


@pytest.mark.parametrize('channels', [1, 3])
def test_sixteen_bits(channels):
    path = save_tiff('a.tif', DEEP[..., :channels])
    expected = np.broadcast_to(DEEP[..., :channels] >> 8, DEEP.shape)
    np.testing.assert_array_equal(read_in_parts(Path(path)), expected)


def test_other_images_are_refused():
    """And not read as something else."""
    save_tiff('bands.tif', np.zeros((8, 8, 5), np.uint8))
    save_tiff('float.tif', np.zeros((8, 8, 1), np.float32))
    PHOTO.convert('CMYK').save('cmyk.tif')
    for kind in ('jpg', 'png', 'tif', 'webp'):  # GDAL does not turn them
        exif = Image.Exif()
        exif[0x0112] = 6
        PHOTO.save(f'turned.{kind}', exif=exif)
    Path('gone.png').symlink_to('nowhere.png')
    for name, message in (
        ('bands.tif', 'must have up to 4 bands, grey, RGB or with a palette, got'),
        ('cmyk.tif', 'must have up to 4 bands, grey, RGB or with a palette, got CMYK'),
        ('float.tif', 'must have 8 or 16 bits a channel, got 32'),
        *((f'turned.{kind}', 'rotated by an EXIF tag') for kind in ('jpg', 'png', 'tif', 'webp')),
        ('gone.png', 'a link to nowhere.png, which does not exist'),
        ('none.png', 'no such file'),
    ):
        with pytest.raises(ReadError, match=re.escape(message)):
            read_in_parts(Path(name))


def test_bands_that_a_file_does_not_have():
    """Without the path, which the command tells."""
    save_tiff('a.tif', np.zeros((8, 8, 2), np.float32))
    with open_large(Path('a.tif')) as image, pytest.raises(ReadError, match=r'got \(3,\)$'):
        line_reader(image, (3,))


def test_bands_in_parts():
    path = save_tiff('a.tif', np.random.default_rng(0).normal(size=(50, 30, 4)).astype(np.float32))
    whole = read_bands(path, [4, 1])
    with open_large(Path(path)) as image:
        read = line_reader(image, (4, 1))
        np.testing.assert_array_equal(np.concatenate([read(0, 20), read(20, 50)]), whole)


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
    with pytest.raises(ReadError, match='not a complete image'):
        read_in_parts(path)
    with pytest.raises(ReadError, match='not a complete image'):
        read_bands(path, [1])
    with pytest.raises(ReadError, match='no such file'):  # an address, to GDAL
        read_bands(f'/vsisubfile/0,{Path("secret.png").resolve()}', [1])


def test_a_name_that_gdal_does_not_take():
    path = Path(os.fsdecode(b'a\xff.png'))
    with path.open('wb') as file:
        PHOTO.save(file, 'PNG')
    with pytest.raises(ReadError, match='GDAL needs a name in UTF-8'):
        read_in_parts(path)
