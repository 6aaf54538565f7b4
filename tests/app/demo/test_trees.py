"""Tiles and boxes of a small package like deepforest, and packages that cannot be had."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from trees_package import SIZES, random_boxes, use_package

from cpvt_pyramid.app.commands import demo_data
from cpvt_pyramid.app.demo import trees


@pytest.fixture
def boxes() -> dict:
    return random_boxes()


@pytest.fixture
def package(tmp_path, monkeypatch, boxes) -> Path:
    return use_package(tmp_path / 'cache', boxes, monkeypatch)


def corners(annotation: dict) -> tuple:
    left, top, width, height = annotation['bbox']
    return left, top, left + width, top + height


def test_whole_photographs_have_the_boxes_of_the_package(package, boxes, tmp_path):
    assert trees.make_trees(tmp_path / 'trees')
    first, second, *others = SIZES
    for split, names in dict(whole=[first, second], test=others).items():
        coco = COCO(tmp_path / f'trees/annotations/instances_{split}.json')
        for image, name in zip(coco.dataset['images'], names, strict=True):
            found = coco.imgToAnns[image['id']]
            assert [corners(annotation) for annotation in found] == boxes[name]
            assert not any(annotation['iscrowd'] for annotation in found)
            with Image.open(tmp_path / 'trees' / split / image['file_name']) as opened:
                assert opened.size == SIZES[name] == (image['width'], image['height'])
    sources = (tmp_path / 'trees/SOURCES.md').read_text()
    assert all(name in sources for name in SIZES)


@pytest.mark.parametrize('split', ['train', 'val'])
def test_tiles_cover_the_photograph_and_mark_what_they_cut(split, package, boxes, tmp_path):
    """Each tile's pixels and boxes are those of the photograph at its place, and a tree that is not
    whole in it is ignored."""
    trees.make_trees(tmp_path / 'trees')
    name = list(SIZES)[('train', 'val').index(split)]
    scene = np.asarray(Image.open(tmp_path / f'trees/whole/{name}.png'))
    coco = COCO(tmp_path / f'trees/annotations/instances_{split}.json')
    seen = np.zeros(scene.shape[:2], int)
    whole = set()
    for image in coco.dataset['images']:
        top, left = map(int, Path(image['file_name']).stem.split('_'))
        bottom, right = top + image['height'], left + image['width']
        with Image.open(tmp_path / 'trees' / split / image['file_name']) as tile:
            assert (np.asarray(tile) == scene[top:bottom, left:right]).all()
        seen[top:bottom, left:right] += 1
        shown = set()
        for annotation in coco.imgToAnns[image['id']]:
            x1, y1, x2, y2 = corners(annotation)
            assert 0 <= x1 < x2 <= image['width'] and 0 <= y1 < y2 <= image['height']
            placed = x1 + left, y1 + top, x2 + left, y2 + top
            assert annotation['iscrowd'] == (placed not in boxes[name])
            shown.add(placed)
        whole |= {box for box in boxes[name] if box in shown}
        inside = [b for b in boxes[name] if left <= b[0] and top <= b[1]]
        inside = [b for b in inside if b[2] <= right and b[3] <= bottom]
        assert shown.issuperset(inside)
    if split == 'val':
        assert (seen == 1).all() and len(coco.dataset['images']) == 6
    else:
        assert (seen >= 1).all() and whole == set(boxes[name])


def refusal(capsys, *arguments: str) -> str:
    assert demo_data.main(['trees', *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith('cpvt demo-data: ') and err.count('\n') == 1
    return err


def test_the_command_creates_once(package, tmp_path, capsys):
    root = str(tmp_path / 'trees')
    assert demo_data.main(['trees', '--root', root]) == 0
    assert 'created' in capsys.readouterr().out
    assert demo_data.main(['trees', '--root', root]) == 0
    assert 'already complete' in capsys.readouterr().out
    assert 'take no --seed' in refusal(capsys, '--root', root, '--seed', '1')
    assert json.loads((tmp_path / 'trees/sample.json').read_text())['data'] == 'trees'


def test_another_file_of_that_name_is_refused(package, tmp_path, capsys):
    package.write_bytes(package.read_bytes()[:-100])
    assert f'{package} is not the file' in refusal(capsys, '--root', str(tmp_path / 'trees'))
    assert not (tmp_path / 'trees').exists()


@pytest.mark.parametrize('offered', [False, True], ids=['no such package', 'another file'])
def test_a_download_that_fails_is_one_line(offered, package, tmp_path, capsys, monkeypatch):
    """pip finds no such package, or one that does not have the hash that is pinned."""
    shelf = tmp_path / 'shelf'
    shelf.mkdir()
    package.rename(shelf / package.name)
    if not offered:
        (shelf / package.name).unlink()
    pinned = trees.DEEPFOREST._replace(sha256='0' * 64)
    monkeypatch.setattr(trees, 'DEEPFOREST', pinned)
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setenv('PIP_FIND_LINKS', str(shelf))
    error = refusal(capsys, '--root', str(tmp_path / 'new/trees'))
    assert 'cannot download deepforest-2.1.0-py3-none-any.whl' in error
    assert 'pip download --no-deps deepforest==2.1.0' in error
    assert list(package.parent.iterdir()) == []
    assert not (tmp_path / 'new').exists()
