"""Files that are cut, misnamed or unusual: whole, in batches and in tiles, in threads and without,
each has the same verdict in the same words."""

import io
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import photograph, save_tiff

from cpvt_pyramid.app.commands.infer import main

SIZE = 70, 90  # height and width
PHOTO = Image.fromarray(photograph(*SIZE))
OTHER = Image.fromarray(photograph(*SIZE, seed=1))
GRAY = np.asarray(PHOTO.convert('L')).astype(np.uint16)
NOT_AN_IMAGE = 'not an image in one of the formats'
FORMATS = ('BMP', 'JPEG', 'JPEG2000', 'PNG', 'PPM', 'TIFF', 'WEBP')


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def huge_png() -> bytes:
    content = b'\x89PNG\r\n\x1a\n'
    for kind, part in (
        (b'IHDR', struct.pack('>IIBBBBB', 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)),
        (b'IDAT', zlib.compress(b'0' * 9)),
        (b'IEND', b''),
    ):
        content += struct.pack('>I', len(part)) + kind + part
        content += struct.pack('>I', zlib.crc32(kind + part))
    return content


# By name, an image's content; of most, the results have its height and width.
GOOD = {
    'bits.png': encoded(PHOTO.convert('1'), 'PNG'),
    'palette.png': encoded(PHOTO.quantize(50), 'PNG'),
    'gray and alpha.png': encoded(PHOTO.convert('LA'), 'PNG'),
    'alpha.png': encoded(PHOTO.convert('RGBA'), 'PNG'),
    'wrong ending.png': encoded(PHOTO, 'JPEG'),
    'wrong ending.jpg': encoded(PHOTO, 'TIFF'),
    'UPPER.JPG': encoded(PHOTO, 'JPEG'),
    '\u00fc \u4e2d\u6587 \U0001f333.png': encoded(PHOTO, 'PNG'),
    "a 'quoted' name; #1 %s {}.png": encoded(PHOTO, 'PNG'),
    os.fsdecode(b'not-utf8-\xff.png'): encoded(PHOTO, 'PNG'),
    **{f'turned-{i}.jpg': encoded(PHOTO, 'JPEG', exif=turned(i)) for i in range(1, 9)},
}
# By name, a file's content, and a part of the reason why it is skipped.
BAD = {
    'empty.png': (b'', 'the file is empty'),
    'zeros.png': (bytes(5000), 'it is filled with zeros'),
    'text.jpg': (b'a photograph\nof a tree\n', 'it is text'),
    'eps.png': (b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n', 'it is PostScript (EPS)'),
    'page.jpg': (b'<!DOCTYPE html>\n<html>404</html>', 'it is a web page'),
    'vector.png': (b'<svg xmlns="http://www.w3.org/2000/svg"/>', 'it is an SVG drawing'),
    'document.tif': (b'%PDF-1.7\n\xff\xfe', 'it is a PDF'),
    'pointer.jpg': (b'version https://git-lfs.github.com/spec/v1\n', 'it is a pointer of Git LFS'),
    'phone.jpg': (b'\0\0\0\x18ftypheic\0\0\0\0', 'a HEIF photograph'),
    'random.png': (bytes(np.random.default_rng(0).integers(128, 256, 999, 'B')), NOT_AN_IMAGE),
    'depth.tif': (encoded(PHOTO.convert('L').convert('F'), 'TIFF'), 'floating point values'),
    'integers.tif': (encoded(PHOTO.convert('L').convert('I'), 'TIFF'), 'of signed values'),
    'sixteen.png': (encoded(Image.fromarray(GRAY * 257), 'PNG'), '16 bits a channel'),
    'cmyk.jpg': (encoded(PHOTO.convert('CMYK'), 'JPEG'), 'JPEG in CMYK'),
    'turned.webp': (encoded(PHOTO, 'WEBP', exif=turned(6)), 'orientation turns'),
    'frames.gif': (encoded(PHOTO, 'GIF', save_all=True, append_images=[OTHER]), 'GIF'),
    'frames.webp': (encoded(PHOTO, 'WEBP', save_all=True, append_images=[OTHER]), 'frames'),
    'pages.tif': (encoded(PHOTO, 'TIFF', save_all=True, append_images=[OTHER]), 'pages'),
    'huge.png': (huge_png(), ''),
}


def write_inputs(folder: Path) -> dict[str, str]:
    """Write all files; returns a part of the reason for each that is to be skipped, by name."""
    folder.mkdir()
    reasons = {}
    for name, content in GOOD.items():
        (folder / name).write_bytes(content)
    for name, (content, reason) in BAD.items():
        (folder / name).write_bytes(content)
        reasons[name] = reason
    save_tiff(folder / 'five bands.tif', np.zeros((*SIZE, 5), np.uint8))
    reasons['five bands.tif'] = 'a TIFF of 5 bands'
    (folder / 'gone.png').symlink_to('nowhere.png')
    reasons['gone.png'] = 'a link to nowhere.png, which does not exist'
    (folder / 'loop.png').symlink_to('loop.png')
    reasons['loop.png'] = 'a link to loop.png'
    (folder / 'ring').mkdir()
    (folder / 'ring/link').symlink_to('..', target_is_directory=True)
    os.mkfifo(folder / 'pipe.jpg')
    reasons['pipe.jpg'] = 'a pipe or device, not a file'
    return reasons


def told(error: str) -> tuple[dict[str, str], list[str]]:
    """The reason for each input that was skipped, by its name, and the other lines, sorted."""
    lines = error.splitlines()
    skipped = {}
    others = []
    for line in lines:
        if match := re.fullmatch(r'cpvt infer: skipped in/(.*?\.\w+): (.*)', line):
            assert match[1] not in skipped
            skipped[match[1]] = match[2]
        else:
            others.append(line)
    return skipped, sorted(others)


VARIANTS = {
    'whole': [],
    'one thread': ['--workers', '0'],
    'batches': ['--batch-size', '4'],
    'tiles': ['--tile', '64'],
    'tiles of batches': ['--tile', '64', '--batch-size', '4'],
}


def test_all_ways_say_the_same(model, capfd, monkeypatch):
    """And a second run with --skip-existing says it again, and does nothing else."""
    reasons = write_inputs(Path('in'))
    path = str(model('detection'))
    count = len(GOOD) + len(reasons)
    expected = None
    for name, options in VARIANTS.items():
        command = [path, 'in', '--out-dir', f'out-{name}', '--skip-existing', *options]
        assert main(command) == 1, name
        said = capfd.readouterr()
        assert f'{count - len(reasons)} of {count} done' in said.out
        skipped, others = told(said.err)
        assert skipped.keys() == reasons.keys(), name
        for file, reason in reasons.items():
            assert reason in skipped[file], (name, file)
            assert 'traceback' not in skipped[file].lower()
        if 'tiles' in name:  # what it advises
            assert '--tile' not in skipped['huge.png']
        del skipped['huge.png']
        assert not others
        if expected is None:
            expected = skipped, others
        assert (skipped, others) == expected, name
        results = {p.name for p in Path(f'out-{name}').iterdir()}
        assert not [file for file in results if file.startswith('.')]
        written = [file for file in results if file.endswith('.json')]
        assert len(written) == count - len(reasons) + 2  # inputs.json and run.json

        assert main(command) == 1, name
        said = capfd.readouterr()
        assert f'{count - len(reasons)} of {count} are already done' in said.out
        again, others = told(said.err)
        del again['huge.png']
        assert (again, others) == (skipped, []), name


@pytest.mark.parametrize('kind', FORMATS)
def test_cut_files(kind, model, capfd):
    """At each tenth of their bytes: read completely, or skipped, in all ways alike."""
    try:
        content = encoded(PHOTO, kind)
    except (KeyError, OSError):
        pytest.skip(f'this Pillow writes no {kind}')
    Path('in').mkdir()
    for tenth in range(11):
        Path(f'in/{tenth:02}.{kind.lower()[:4]}').write_bytes(content[: len(content) * tenth // 10])
    path = str(model('detection'))
    expected = None
    for options in VARIANTS.values():
        shutil.rmtree('predictions', ignore_errors=True)
        words = [str(p) for p in sorted(Path('in').iterdir())]
        assert main([path, *words, *options]) == 1
        skipped, others = told(capfd.readouterr().err)
        assert len(skipped) == 10 and not others, (options, skipped)
        expected = expected or skipped
        assert skipped == expected, options


def test_fonts_are_found_before_threads_draw():
    """The import of matplotlib catches warnings: in a thread, also those of the others."""
    program = (
        'import sys\n'
        'from cpvt_pyramid.app.predict.options import InferOptions\n'
        'from cpvt_pyramid.app.predict.results import Results\n'
        "Results(InferOptions(), 'detections', ['tree'])\n"
        "assert 'matplotlib.ft2font' in sys.modules\n"
    )
    subprocess.run([sys.executable, '-c', program], check=True)
