"""Reading and resizing equal OpenCV's, with which the data pipelines of mm work."""

import io
import os
import struct
import time
import warnings
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


def test_resizing_is_bit_identical_to_opencv():
    shapes = RNG.integers(1, 200, (150, 4)).tolist()
    shapes += [(64, 80, 32, 40), (64, 80, 32, 60), (50, 1, 7, 9), (1, 50, 9, 7), (3, 3, 3, 3)]
    for h, w, height, width in shapes:
        image = RNG.integers(0, 256, (h, w, 3), dtype=np.uint8)
        expected = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
        actual = images.resize_image(image, (height, width))
        assert actual.dtype == np.uint8 and (actual == expected).all(), (h, w, height, width)


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
    'alpha': encoded(Image.fromarray(np.dstack([NOISE, NOISE[..., :1]])), 'PNG'),
    'grey and alpha': encoded(PICTURE.convert('LA'), 'PNG'),
    'palette': encoded(PICTURE.quantize(50), 'PNG', transparency=3),
    'bits': encoded(PICTURE.convert('1'), 'PNG'),
    'sixteen bits': encoded(SIXTEEN, 'PNG'),
    'sixteen bits, tiff': encoded(SIXTEEN, 'TIFF'),
    'bmp': encoded(PICTURE, 'BMP'),
    'webp': encoded(PICTURE, 'WEBP'),
    'frames, png': encoded(PICTURE, 'PNG', save_all=True, append_images=[PICTURE.rotate(180)]),
    'frames, webp': encoded(PICTURE, 'WEBP', save_all=True, append_images=[PICTURE.rotate(180)]),
    'overview': encoded(PICTURE, 'TIFF', save_all=True, append_images=[OVERVIEW]),
    'pages': encoded(PICTURE, 'TIFF', save_all=True, append_images=[PICTURE.rotate(180)]),
    'twelve bits': encoded(Image.fromarray(np.asarray(SIXTEEN) >> 4), 'PNG'),
    'twelve bits, rgb': bytes(cv2.imencode('.png', RNG.integers(0, 2**12, (30, 20, 3), 'H'))[1]),
}


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'TIFF', 'WEBP'])
def test_images_are_upright(kind):
    """Whatever the format, which OpenCV ignores for WebP."""
    for orientation, turn in enumerate([None, 0, 3, 1, 5, 4, 6, 2], 1):
        # Nearest in JPEG and WebP: each pixel is a block of one colour.
        big = Image.fromarray(NOISE.repeat(16, 0).repeat(16, 1))
        Path('file').write_bytes(encoded(big, kind, exif=turned(orientation), quality=100))
        expected = big if turn is None else big.transpose(Image.Transpose(turn))
        assert images.size_of('file') == expected.size[::-1]  # from its header
        away = images.load_image('file').astype(int) - np.asarray(expected)
        assert np.abs(away)[8::16, 8::16].mean() < 12


def test_files_are_read_as_mmcv_reads_them():
    """With a warning of what is not shown as it is."""
    gif = encoded(PICTURE, 'GIF', save_all=True, append_images=[PICTURE.rotate(180)])
    for kind, content in [*FILES.items(), ('frames, gif', gif)]:
        Path('file').write_bytes(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always', UserWarning)
            image = images.load_image('file')
        if 'gif' not in kind:
            np.testing.assert_array_equal(image, imfrombytes(content)[..., ::-1], kind)
        several = 'frames' in kind or kind == 'pages'
        told = ['file: only the first of its frames is read'] * several
        told += ['file: its values fill at most 12 of 16 bits'] * ('twelve' in kind)
        assert len(caught) == len(told)
        assert all(str(w.message).startswith(text) for w, text in zip(caught, told)), kind


def test_other_sources():
    np.testing.assert_array_equal(images.load_image(NOISE), NOISE)
    np.testing.assert_array_equal(images.load_image(PICTURE), np.array(PICTURE))
    upright = Image.open(io.BytesIO(encoded(PICTURE, 'PNG', exif=turned(6))))
    assert images.load_image(upright).shape == (97, 130, 3)
    for wrong in (NOISE[..., 0], NOISE.astype(float), NOISE[:0]):
        with pytest.raises(ValueError, match=r'\(height, width, 3\) RGB uint8, got'):
            images.load_image(wrong)
    with pytest.raises(ValueError, match='must have 8 or 16 bits a channel, got 32'):
        images.load_image(SIXTEEN.convert('I'))


def test_files_that_are_not_images():
    with pytest.raises(OSError, match='no such file'):
        images.load_image('file')
    for content, complaint in (
        (b'', 'the file is empty'),
        (b'text', 'not an image in one of the formats'),
        (FILES['jpeg'][:2000], 'not a complete image: image file is truncated'),
        (encoded(SIXTEEN.convert('I'), 'TIFF'), 'must have 8 or 16 bits a channel, got 32'),
        (encoded(SIXTEEN.convert('F'), 'TIFF'), 'must have 8 or 16 bits a channel, got 32'),
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


def test_frames_are_not_counted():
    """Counting those of a file of a megabyte can take minutes."""
    head = b'GIF89a' + bytes([1, 0, 1, 0, 0x80, 0, 0, 0, 0, 0, 255, 255, 255])
    frame = bytes([0x2C, 0, 0, 0, 0, 1, 0, 1, 0, 0, 2, 2, 0x44, 1, 0])
    Path('many.gif').write_bytes(head + 50_000 * frame + b';')
    tags = [(256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 8), (278, 1), (279, 1)]
    page = struct.pack('<H', len(tags))
    page += b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags)
    pages = bytearray(b'II*\0' + struct.pack('<I', 8))
    for _ in range(5000):
        pages += page + struct.pack('<I', len(pages) + len(page) + 4)
    Path('many.tif').write_bytes(pages)
    start = time.process_time()
    for name in ('many.gif', 'many.tif'):
        with pytest.warns(UserWarning, match='only the first of its frames'):
            assert images.load_image(name).shape == (1, 1, 3)
    assert time.process_time() - start < 1


def test_the_size_of_a_pipe():
    """Opening it would wait for a writer."""
    os.mkfifo('pipe.jpg')
    assert images.size_of(Path('pipe.jpg')) is None
