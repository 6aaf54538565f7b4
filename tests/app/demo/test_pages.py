"""Boxes that hold the ink of one part of a page and nothing else."""

import socket
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image, ImageDraw
from pycocotools.coco import COCO

from cpvt_pyramid.app.config.check import check_data
from cpvt_pyramid.app.demo import pages
from cpvt_pyramid.app.tooling.command import UserError

COUNTS = {'train': 4, 'val': 2}


@pytest.fixture(scope='module')
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('data') / 'pages'
    pages.make_pages(path, **COUNTS)
    return path


@pytest.fixture(scope='module')
def drawn() -> list:
    """24 pages with their parts, which need no network."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(socket, 'socket', lambda *_, **__: pytest.fail('asked for the network'))
        return [pages.draw_page(np.random.default_rng(seed), 'train') for seed in range(24)]


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob('*') if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_all_ink_of_a_page_is_in_boxes_that_fit_it(drawn):
    """In pixels: outside the boxes is paper, and each side of a box has ink."""
    for page, parts in drawn:
        pixels = np.asarray(page)
        paper = pixels[0, 0]
        has_ink = (pixels != paper).any(axis=2)
        seen = np.zeros(has_ink.shape, int)
        for part in parts:
            x1, y1, x2, y2 = map(int, part.box())
            assert 0 < x1 < x2 < page.width and 0 < y1 < y2 < page.height
            seen[y1:y2, x1:x2] += 1
            inside = has_ink[y1:y2, x1:x2]
            if part.category != 'figure':  # which can have pixels like paper at its border
                assert inside[0].any() and inside[-1].any()
                assert inside[:, 0].any() and inside[:, -1].any()
        assert seen.max() == 1, 'parts overlap'
        assert not has_ink[seen == 0].any()


def test_pages_differ(drawn):
    """In size, colors and columns; every category is common."""
    assert {page.size for page, _ in drawn} == set(pages.SIZES)
    assert len({page.getpixel((0, 0)) for page, _ in drawn}) >= 4
    parts = [part for _, of_page in drawn for part in of_page]
    counts = [sum(part.category == name for part in parts) for name in pages.CATEGORIES]
    assert min(counts) >= 10 and 5 <= len(parts) / len(drawn) <= 12
    lefts = [
        len({part.left for part in of_page if part.category != 'title'}) for _, of_page in drawn
    ]
    assert {1, 2, 3} <= set(lefts)


def test_lines_of_text_are_not_cut():
    """The last line of a paragraph has its descenders."""
    style = pages.random_style(np.random.default_rng(0))
    for text in ('gypq', 'gypq ' * 60):
        drawing = pages.draw_paragraphs([text], style.regular, style.ink, 200)
        count = len(pages.wrapped_lines(text, style.regular, 200))
        alone = Image.new('RGBA', (200, 100))
        ImageDraw.Draw(alone).text((0, 0), 'gypq', style.ink, style.regular)
        height = (count - 1) * pages.line_height(style.regular) + alone.getbbox()[3]
        assert drawing.height == height


def test_words_fit_into_a_column():
    assert max(len(word) for text in pages.sentences() for word in text.split()) == 16


def test_the_files(root):
    """pycocotools reads them; images have the sizes, boxes and masks that are stated, and the label
    maps are these masks."""
    for split, count in COUNTS.items():
        coco = COCO(root / f'annotations/instances_{split}.json')
        assert len(coco.imgs) == count == len(list((root / split).iterdir()))
        assert tuple(category['name'] for category in coco.cats.values()) == pages.CATEGORIES
        for image in coco.imgs.values():
            with Image.open(root / split / image['file_name']) as opened:
                assert opened.size == (image['width'], image['height'])
        for number, image in coco.imgs.items():
            labels = np.zeros((image['height'], image['width']), np.uint8)
            for annotation in coco.imgToAnns[number]:
                mask = coco.annToMask(annotation)
                assert mask.sum() == annotation['area']
                labels[mask == 1] = annotation['category_id']
            label_map = np.asarray(Image.open(root / 'masks' / split / image['file_name']))
            np.testing.assert_array_equal(label_map, labels)
            seed = 0, pages.SPLITS.index(split), number
            _, parts = pages.draw_page(np.random.default_rng(seed), split)
            found = coco.imgToAnns[number]
            assert [a['category_id'] - 1 for a in found] == [
                pages.CATEGORIES.index(part.category) for part in parts
            ]
            for annotation, part in zip(found, parts):
                x1, y1, x2, y2 = part.box()
                assert annotation['bbox'] == [x1, y1, x2 - x1, y2 - y1]
                assert annotation['area'] == (x2 - x1) * (y2 - y1)
    sources = (root / 'SOURCES.md').read_text(encoding='utf-8')
    assert 'Rachel Michetti' in sources and 'DejaVu' in sources and '"train": 4' in sources


def test_what_the_arguments_decide(root, tmp_path):
    """The same arguments give the same files, whatever the user's settings of matplotlib are; a
    smaller set is the beginning of a larger one, and another seed gives other pages."""
    import matplotlib

    with matplotlib.rc_context({'font.size': 30, 'axes.facecolor': 'red'}):
        pages.make_pages(tmp_path / 'small', train=2, val=1)
    pages.make_pages(tmp_path / 'other', train=2, val=1, seed=1)
    large, small, other = map(contents, (root, tmp_path / 'small', tmp_path / 'other'))
    images = [name for name in small if name.endswith('.png') and 'masks' not in name]
    assert len(images) == 3
    for name in images:
        assert large[name] == small[name] != other[name]


@pytest.mark.parametrize('name', ['pages', 'trees'])
def test_the_error_of_a_missing_set_is_a_command_that_creates_it(name, tmp_path):
    dataset = dict(type='CocoDataset', data_root=f'{tmp_path}/data/{name}', ann_file='a.json')
    with pytest.raises(UserError) as raised:
        check_data(Config(dict(train_dataloader=dict(dataset=dataset))), 'train')
    command = f'. Create it with: cpvt demo-data {name} --root {tmp_path}/data/{name}'
    assert str(raised.value).endswith(command)
