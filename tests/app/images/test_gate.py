"""What passes the gate is the same to every reader; anything else is refused by one line."""

import io
from pathlib import Path

import cv2
import numpy as np
import pillow_heif
import pytest
import rasterio
from PIL import Image, ImageOps
from support import photograph

from cpvt_pyramid.app.data import defects
from cpvt_pyramid.app.data.images import HEADERS, inspect
from cpvt_pyramid.app.images import formats
from cpvt_pyramid.app.images.gate import RULE, read_header
from cpvt_pyramid.app.images.label_maps import read_label_map
from cpvt_pyramid.app.images.rasters import ReadError
from cpvt_pyramid.app.images.reading import load_image

RGB = photograph(37, 61)
PHOTO = Image.fromarray(RGB)
DEEP = RGB.astype(np.uint16) << 8 | 128
LOSSLESS = {'driver': 'JP2OpenJPEG', 'QUALITY': 100, 'REVERSIBLE': 'YES'}


def with_hole() -> Image.Image:
    image = PHOTO.convert('RGBA')
    image.putpixel((3, 3), (1, 2, 3, 0))
    return image


def write_heif(path: Path, kind: str = '', orientation: int = 1) -> None:
    """A photograph as a telephone writes it: its rotation is in the file and in the EXIF data."""
    if kind == '10 bits':
        data = (RGB.astype(np.uint16) << 8).tobytes()
        pillow_heif.from_bytes('RGB;16', PHOTO.size, data).save(path)
        return
    encoder = pillow_heif.misc.CtxEncode(pillow_heif.constants.HeifCompressionFormat.HEVC)
    tags = Image.Exif()
    tags[0x0112] = orientation
    turned = {'image_orientation': orientation, 'exif': tags.tobytes()}
    encoder.add_image(PHOTO.size, 'RGB', PHOTO.tobytes(), **turned)
    with path.open('wb') as file:
        encoder.save(file)


def exif(orientation: int = 6) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def write_raster(path: Path, image: np.ndarray, **options: object) -> None:
    height, width, count = image.shape
    size = {'width': width, 'height': height, 'count': count, 'dtype': image.dtype}
    with rasterio.open(path, 'w', **{'driver': 'GTiff', **size, **options}) as file:
        file.write(np.moveaxis(image, -1, 0))


def write_palette_of_16_bits(path: Path) -> None:
    options = {'driver': 'GTiff', 'width': 61, 'height': 37, 'count': 1, 'dtype': 'uint16'}
    with rasterio.open(path, 'w', **options, photometric='palette') as file:
        file.write(DEEP[..., 0], 1)
        file.write_colormap(1, {i: (i % 256, 0, 0, 255) for i in range(2**16)})


def write_thumbnail_first(path: Path) -> None:
    thumbnail = PHOTO.resize((30, 18))
    thumbnail.encoderinfo = {}
    thumbnail.save(path, tiffinfo={254: 1}, save_all=True, append_images=[PHOTO])


def frames(path: Path) -> None:
    PHOTO.save(path, save_all=True, append_images=[PHOTO.rotate(180)])


MORE = np.dstack([RGB, RGB[..., :1] // 2])
# By name of a file, a function that writes it, and a part of what it is called.
REFUSED = {
    'cmyk.jpg': (PHOTO.convert('CMYK').save, 'JPEG in CMYK'),
    'cmyk.tif': (PHOTO.convert('CMYK').save, 'CMYK'),
    'gray16.png': (Image.fromarray(DEEP[..., 0]).save, '16 bits'),
    'rgb16.png': (lambda path: cv2.imwrite(str(path), DEEP), '16 bits'),
    'rgb12.png': (lambda path: cv2.imwrite(str(path), DEEP >> 4), '16 bits'),
    'gray16.tif': (lambda path: write_raster(path, DEEP[..., :1]), '16 bits'),
    'rgb16.tif': (lambda path: write_raster(path, DEEP), '16 bits'),
    'planar16.tif': (
        lambda path: write_raster(path, DEEP, photometric='RGB', interleave='band'),
        '16 bits',
    ),
    'palette16.tif': (write_palette_of_16_bits, '16 bits'),
    'palette.tif': (PHOTO.quantize(50).save, 'a palette'),
    'bits.tif': (PHOTO.convert('1').save, '1 bits'),
    'float.tif': (lambda path: write_raster(path, RGB.astype(np.float32)), 'floating point'),
    'white.tif': (
        lambda path: write_raster(path, RGB[..., :1], photometric='MINISWHITE'),
        'white is zero',
    ),
    'lerc.tif': (lambda path: write_raster(path, RGB, compress='lerc'), 'LERC'),
    'four.tif': (lambda path: write_raster(path, MORE), 'alpha channel hides pixels'),
    'four plain.tif': (lambda path: write_raster(path, MORE, alpha='NO'), '4 bands'),
    'five.tif': (lambda path: write_raster(path, np.dstack([MORE, MORE[..., :1]])), '5 bands'),
    'two.tif': (lambda path: write_raster(path, RGB[..., :2], alpha='NO'), '2 bands'),
    'deep.jp2': (lambda path: write_raster(path, DEEP >> 4, **LOSSLESS, NBITS=12), 'JPEG 2000'),
    'gray15.jp2': (lambda path: write_raster(path, DEEP[..., :1] >> 1, **LOSSLESS, NBITS=15), '15'),
    'bands.jp2': (lambda path: write_raster(path, RGB, **LOSSLESS), 'not declared as grey or RGB'),
    'hole.png': (with_hole().save, 'alpha channel hides pixels'),
    'hole.webp': (with_hole().save, 'alpha channel hides pixels'),
    'hole.tif': (with_hole().save, 'alpha channel hides pixels'),
    'grey and opaque.tif': (PHOTO.convert('LA').save, 'alpha channel OpenCV leaves out'),
    'turned.png': (lambda path: PHOTO.save(path, exif=exif()), 'orientation turns'),
    'turned.webp': (lambda path: PHOTO.save(path, exif=exif()), 'orientation turns'),
    'turned.tif': (lambda path: PHOTO.save(path, exif=exif()), 'orientation turns'),
    'frames.png': (frames, 'several frames'),
    'frames.webp': (frames, 'several frames'),
    'frames.gif': (frames, 'GIF'),
    'pages.tif': (frames, 'several pages'),
    'thumbnail.tif': (write_thumbnail_first, 'first page is a thumbnail'),
    'deep.pgm': (Image.fromarray(DEEP[..., 0]).save, 'values up to 65535'),
    'dark.pgm': (
        lambda path: path.write_bytes(b'P5\n61 37\n100\n' + (RGB[..., 0] // 3).tobytes()),
        'values up to 100',
    ),
    'deep.heic': (lambda path: write_heif(path, '10 bits'), 'HEIF of 10 bits a channel'),
    'burst.heic': (frames, 'several frames'),
}


@pytest.mark.filterwarnings('ignore::rasterio.errors.NotGeoreferencedWarning')
@pytest.mark.parametrize('name', REFUSED)
def test_other_kinds_are_refused_by_one_line(name):
    """In prediction and in the check of data alike, with what the file is and a command."""
    write, what = REFUSED[name]
    path = Path(name)
    write(path)
    with pytest.raises(ReadError) as caught:
        load_image(path)
    line = str(caught.value)
    assert (
        what in line and RULE in line and f'magick {repr(name + "[0]")}' in line.replace('"', "'")
    )
    size, [(kind, more)] = inspect(path)
    assert size is None and kind is defects.OTHER_IMAGE and what in more and 'magick' in more
    if 'alpha' not in what:  # which pixels tell
        assert inspect(path, HEADERS)[1] == [(kind, more)]


@pytest.mark.filterwarnings('ignore::rasterio.errors.NotGeoreferencedWarning')
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'interleave': 'band'},
        {'compress': 'lzw', 'predictor': 2, 'tiled': True, 'blockxsize': 16, 'blockysize': 16},
        {'compress': 'deflate', 'bigtiff': 'YES'},
    ],
)
def test_tiffs_that_pass_are_the_same_to_all_readers(options):
    path = Path('a.tif')
    write_raster(path, RGB, **options)
    assert read_header(path).size == RGB.shape[:2]
    for pixels in (
        load_image(path),
        cv2.imread(str(path))[..., ::-1],
        np.asarray(Image.open(path)),
    ):
        np.testing.assert_array_equal(pixels, RGB)
    assert inspect(path) == (RGB.shape[:2], [])


@pytest.mark.parametrize('orientation', [0, 9])
@pytest.mark.parametrize('name', ['a.png', 'a.tif', 'a.webp'])
def test_an_orientation_without_meaning_turns_nothing(name, orientation):
    PHOTO.save(name, exif=exif(orientation), lossless=True)
    np.testing.assert_array_equal(load_image(name), RGB)


@pytest.mark.parametrize('kind', ['tif', 'png'])
def test_a_damaged_block(kind):
    """OpenCV reads a TIFF with a damaged block in part, without an error."""
    path = Path(f'a.{kind}')
    PHOTO.save(path, **({'compression': 'tiff_lzw'} if kind == 'tif' else {}))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 30] = np.random.default_rng(0).bytes(30)
    path.write_bytes(content)
    with pytest.raises(ReadError, match='not a complete image'):
        load_image(path)
    assert inspect(path)[1][0][0] is defects.TORN_IMAGE


def test_masks_that_training_cannot_read():
    """Of 64 bits, as numpy makes them, or compressed by LERC: mmseg reads masks with Pillow."""
    labels = (RGB[..., :1] > 100).astype(np.uint8)
    with rasterio.Env():
        write_raster(Path('long.tif'), labels.astype(np.int64))
        write_raster(Path('lerc.tif'), labels, compress='lerc')
        write_raster(Path('good.tif'), labels)
    Path('torn.png').write_bytes(b'\x89PNG')
    for name in ('long.tif', 'lerc.tif', 'torn.png'):
        with pytest.raises(ReadError, match='not an image that Pillow reads, as training') as error:
            read_label_map(Path(name))
        assert '<_io.' not in str(error.value)
    np.testing.assert_array_equal(read_label_map(Path('good.tif')).values, labels[..., 0])


@pytest.mark.parametrize('orientation', [1, 3, 6, 8])
def test_heic_is_turned_once(orientation):
    path = Path('a.heic')
    write_heif(path, orientation=orientation)
    upright = ImageOps.exif_transpose(with_orientation(PHOTO, orientation))
    header = read_header(path)
    assert header.size == upright.size[::-1] and not header.is_turned
    found = load_image(path)
    assert np.abs(found.astype(int) - np.asarray(upright)).mean() < 12  # which is lossy
    with Image.open(path) as image:
        np.testing.assert_array_equal(load_image(image), found)


def with_orientation(image: Image.Image, orientation: int) -> Image.Image:
    tags = Image.Exif()
    tags[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, 'PNG', exif=tags)
    return Image.open(file)


def test_heic_that_is_grey_or_opaque_or_hides_pixels():
    with_hole().save('hole.heic')
    with pytest.raises(ReadError, match='alpha channel hides pixels'):
        load_image('hole.heic')
    PHOTO.convert('L').save('grey.heic')
    PHOTO.convert('RGBA').save('opaque.heic')
    for name in ('grey', 'opaque'):
        assert load_image(f'{name}.heic').shape == RGB.shape


def test_heic_in_training_is_refused_with_a_command():
    write_heif(Path('a.heic'))
    assert cv2.imread('a.heic') is None  # as mmcv's loader would read it
    size, [(kind, more)] = inspect(Path('a.heic'))
    assert size is None and kind is defects.OTHER_IMAGE
    assert 'OpenCV does not read in training' in more and 'magick' in more


def test_damaged_heic():
    write_heif(Path('a.heic'))
    content = Path('a.heic').read_bytes()
    for length in range(0, len(content), len(content) // 25):
        Path('b.heic').write_bytes(content[:length])
        with pytest.raises(OSError):
            load_image('b.heic')


def test_heic_without_its_reader(monkeypatch):
    """Nothing is needed but for these files."""
    write_heif(Path('a.heic'))
    formats.readable_formats.cache_clear()
    monkeypatch.setattr(formats, 'find_spec', lambda name: None)
    monkeypatch.delitem(Image.OPEN, 'HEIF')
    try:
        with pytest.raises(ReadError, match='pip install pillow-heif, or convert it: magick'):
            load_image('a.heic')
        size, [(_, more)] = inspect(Path('a.heic'))
        assert size is None and 'magick' in more
    finally:
        formats.readable_formats.cache_clear()
