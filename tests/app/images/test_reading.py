"""Images are read as the data pipelines of mm read them."""

import io
import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmcv.image import imfrombytes, rescale_size
from PIL import Image

from cpvt_pyramid.app.images import reading as images

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (23, 17, 3), dtype=np.uint8)
PICTURE = Image.fromarray(cv2.resize(NOISE, (97, 130), interpolation=cv2.INTER_CUBIC))


def test_sizes_are_those_of_mmcv():
    for h, w, short, long in RNG.integers(1, 2000, (500, 4)).tolist():
        width, height = rescale_size((w, h), (max(short, long), min(short, long)))
        expected = max(height, 1), max(width, 1)
        assert images.rescaled_size((h, w), *sorted((short, long))) == expected


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


OVERVIEW = PICTURE.resize((48, 65))  # of a cloud-optimized GeoTIFF
OVERVIEW.encoderinfo = {'tiffinfo': {254: 1}}
SIXTEEN = Image.fromarray(RNG.integers(0, 2**16, (30, 20), dtype=np.uint16))
FILES = {
    'jpeg': encoded(PICTURE, 'JPEG', quality=90),
    'progressive': encoded(PICTURE, 'JPEG', progressive=True, subsampling=1),
    'grey': encoded(PICTURE.convert('L'), 'JPEG'),
    'opaque alpha': encoded(PICTURE.convert('RGBA'), 'PNG'),
    'opaque alpha, tiff': encoded(PICTURE.convert('RGBA'), 'TIFF'),
    'grey and alpha': encoded(PICTURE.convert('LA'), 'PNG'),
    'palette': encoded(PICTURE.quantize(50), 'PNG'),
    'bits': encoded(PICTURE.convert('1'), 'PNG'),
    'bmp': encoded(PICTURE, 'BMP'),
    'webp': encoded(PICTURE, 'WEBP'),
    'overview': encoded(PICTURE, 'TIFF', save_all=True, append_images=[OVERVIEW]),
}


def test_images_are_upright():
    for orientation, turn in enumerate([None, 0, 3, 1, 5, 4, 6, 2], 1):
        # Nearest in JPEG: each pixel is a block of one colour.
        big = Image.fromarray(NOISE.repeat(16, 0).repeat(16, 1))
        Path('file').write_bytes(encoded(big, 'JPEG', exif=turned(orientation), quality=100))
        expected = big if turn is None else big.transpose(Image.Transpose(turn))
        assert images.size_of('file') == expected.size[::-1]  # from its header
        away = images.load_image('file').astype(int) - np.asarray(expected)
        assert np.abs(away)[8::16, 8::16].mean() < 12


@pytest.mark.parametrize('kind', FILES)
def test_files_are_read_as_mmcv_reads_them(kind):
    Path('file').write_bytes(FILES[kind])
    image = images.load_image('file')
    np.testing.assert_array_equal(image, imfrombytes(FILES[kind])[..., ::-1])
    assert images.size_of('file') == image.shape[:2]


def test_other_sources():
    np.testing.assert_array_equal(images.load_image(NOISE), NOISE)
    np.testing.assert_array_equal(images.load_image(PICTURE), np.array(PICTURE))
    upright = Image.open(io.BytesIO(encoded(PICTURE, 'PNG', exif=turned(6))))
    assert images.load_image(upright).shape == (97, 130, 3)
    for wrong in (NOISE[..., 0], NOISE.astype(float), NOISE[:0]):
        with pytest.raises(ValueError, match=r'\(height, width, 3\) RGB uint8, got'):
            images.load_image(wrong)
    hidden = PICTURE.convert('RGBA')
    hidden.putpixel((0, 0), (1, 2, 3, 0))
    for other in (SIXTEEN, SIXTEEN.convert('I'), PICTURE.convert('CMYK'), hidden):
        with pytest.raises(
            ValueError, match='must have 8 bits a channel, be grey or RGB, and hide'
        ):
            images.load_image(other)
    np.testing.assert_array_equal(images.load_image(PICTURE.convert('RGBA')), np.array(PICTURE))


def test_files_that_are_not_images():
    with pytest.raises(OSError, match='no such file'):
        images.load_image('file')
    for content, complaint in (
        (b'', 'the file is empty'),
        (b'text', 'not an image in one of the formats'),
        (FILES['jpeg'][:2000], 'not a complete image: image file is truncated'),
    ):
        Path('file').write_bytes(content)
        with pytest.raises(OSError, match=complaint):
            images.load_image('file')


def test_scores_are_resized_as_torch_does():
    import torch
    from torch.nn.functional import interpolate

    scores = RNG.random((9, 14)).astype(np.float32)
    for size in ((40, 33), (5, 4), (1, 30)):
        expected = interpolate(torch.from_numpy(scores)[None, None], size, mode='bilinear')[0, 0]
        np.testing.assert_allclose(images.resize_scores(scores, size), expected, atol=1e-5)


def test_an_image_of_too_many_pixels_is_told_what_works(monkeypatch):
    """Without torch, too."""
    Path('file').write_bytes(FILES['jpeg'])
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 5000)
    with pytest.raises(OSError, match='million pixels; cut or reduce it, or use .*--tile'):
        images.load_image('file')


def test_the_size_of_a_pipe():
    """Opening it would wait for a writer."""
    os.mkfifo('pipe.jpg')
    assert images.size_of(Path('pipe.jpg')) is None
