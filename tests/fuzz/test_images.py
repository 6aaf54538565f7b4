"""Image files of every kind, whole and damaged: the pixels that the pipelines of mm see with
OpenCV, or an OSError that says why not."""

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from damage import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cpvt_pyramid.app.images.reading import load_image

FUZZ = settings.get_profile('fuzz')
# Modes that each format stores. Those that OpenCV and Pillow read differently are refused.
MODES = {
    'PNG': ['1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'I;16'],
    'JPEG': ['L', 'RGB', 'CMYK'],
    'BMP': ['1', 'L', 'P', 'RGB'],
    'TIFF': ['1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'CMYK', 'I;16', 'F'],
    'WEBP': ['RGB', 'RGBA'],
    'GIF': ['L', 'P'],
}
REFUSED = {('TIFF', mode) for mode in ('1', 'LA', 'P', 'CMYK', 'I;16', 'F')}
REFUSED |= {('PNG', 'I;16'), ('JPEG', 'CMYK'), ('GIF', 'L'), ('GIF', 'P')}
sides = st.sampled_from([1, 2, 3, 7, 16, 33, 64])


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@st.composite
def image_files(draw) -> tuple[bytes, tuple[int, int] | None]:
    """An image file and its upright (height, width); None if the gate refuses it."""
    kind = draw(st.sampled_from(list(MODES)))
    mode = draw(st.sampled_from(MODES[kind]))
    height, width = draw(sides), draw(sides)
    noise = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    if mode == 'I;16':
        image = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    else:
        image = Image.fromarray(noise).convert(mode)
    options, is_refused = {}, (kind, mode) in REFUSED
    size = height, width
    if kind in ('JPEG', 'PNG', 'WEBP', 'TIFF') and draw(st.booleans()):
        orientation = draw(st.integers(0, 9))  # 1 to 8 are orientations
        options['exif'] = exif_of(orientation)
        if 5 <= orientation <= 8:
            size = width, height
        if kind != 'JPEG':
            is_refused |= orientation in range(2, 9)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue(), None if is_refused else size


def pixels_or_error(path) -> np.ndarray | None:
    try:
        pixels = load_image(path)
    except OSError as error:
        assert '\n' not in str(error)[:-1] and len(str(error)) < 400
        return None
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size
    return pixels


@settings(FUZZ)
@given(drawn=image_files())
def test_whole_files(drawn, tmp_path_factory):
    content, size = drawn
    path = tmp_path_factory.mktemp('image', numbered=True) / 'image'
    path.write_bytes(content)
    pixels = pixels_or_error(path)
    assert (None if pixels is None else pixels.shape[:2]) == size
    if pixels is not None:
        decoded = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
        np.testing.assert_array_equal(decoded[..., ::-1], pixels)


@settings(FUZZ)
@given(data=st.data())
def test_damaged_files(data, tmp_path_factory):
    path = tmp_path_factory.mktemp('image', numbered=True) / 'image'
    path.write_bytes(data.draw(damaged(data.draw(image_files())[0])))
    pixels_or_error(path)


def chunk(kind: bytes, content: bytes) -> bytes:
    body = kind + content
    return struct.pack('>I', len(content)) + body + struct.pack('>I', zlib.crc32(body))


@pytest.mark.parametrize('width, height', [(100_000, 100_000), (2**31 - 1, 1), (0, 5)])
def test_a_file_that_declares_more_than_it_has(width, height, tmp_path):
    """No attempt to allocate what a header of 60 bytes promises."""
    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    chunks = (b'IHDR', header), (b'IDAT', zlib.compress(b'0' * 9)), (b'IEND', b'')
    content = b'\x89PNG\r\n\x1a\n' + b''.join(chunk(*each) for each in chunks)
    (tmp_path / 'bomb.png').write_bytes(content)
    assert pixels_or_error(tmp_path / 'bomb.png') is None
