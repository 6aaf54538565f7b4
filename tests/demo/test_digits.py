"""Exact annotations, separate splits, and safety of a user's folder."""

import json
import shlex
import socket
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from sklearn.datasets import load_digits

from cpvt_pyramid.cli import demo_data
from cpvt_pyramid.config.check import check_data
from cpvt_pyramid.demo import digits
from cpvt_pyramid.demo.photographs import PHOTOGRAPHS, photographs_of
from cpvt_pyramid.tooling.command import UserError

COUNTS = {'train': 40, 'val': 20}
SPLITS = tuple(COUNTS)


@pytest.fixture(scope='module')
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('data') / 'sample'
    digits.make_dataset(path, **COUNTS)
    return path


def annotations(root: Path, split: str) -> dict:
    return json.loads((root / f'coco/annotations/instances_{split}2017.json').read_text())


def images_of(root: Path):
    """Each image of both splits: split, its record, its annotations and their decoded masks."""
    for split in SPLITS:
        content = annotations(root, split)
        for image in content['images']:
            own = [a for a in content['annotations'] if a['image_id'] == image['id']]
            yield split, image, own, [coco_mask.decode(a['segmentation']) for a in own]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob('*')
        if path.is_file()
    }


# What is in it


def test_annotations_and_maps_agree_with_each_other(root):
    """Boxes, areas and semantic maps are those of the masks, which are disjoint; both layouts have
    the same images, in which the digits stand out."""
    ade, difference, heights = root / 'ade/ADEChallengeData2016', [], []
    for split, image, own, masks in images_of(root):
        jpeg = root / f'coco/{split}2017' / image['file_name']
        name = f'{dict(train="training", val="validation")[split]}/ADE_{split}_{image["id"]:08d}'
        assert jpeg.name == f'{image["id"]:012d}.jpg'
        assert jpeg.read_bytes() == (ade / f'images/{name}.jpg').read_bytes()
        with Image.open(jpeg) as opened:
            assert opened.size == (image['width'], image['height'])
            pixels = np.asarray(opened, float)
        assert np.sum(masks, axis=0).max() == 1 and 1 <= len(masks) <= 6
        assert 128 <= min(image['width'], image['height']) <= 224
        heights += [annotation['bbox'][3] for annotation in own]
        expected = np.ones((image['height'], image['width']), np.uint8)  # background
        for annotation, mask in zip(own, masks):
            rows, columns = np.nonzero(mask)
            x, y, width, height = annotation['bbox']
            assert (x, y) == (columns.min(), rows.min())
            assert (x + width - 1, y + height - 1) == (columns.max(), rows.max())
            assert annotation['area'] == mask.sum() and annotation['iscrowd'] == 0
            expected[mask == 1] = 1 + annotation['category_id']
            box = np.s_[y : y + height, x : x + width]
            around = pixels[box][np.sum(masks, axis=0)[box] == 0]
            if len(around) > 20:  # a straight one can fill its box
                difference.append(np.linalg.norm(pixels[mask == 1].mean(0) - around.mean(0)))
        with Image.open(ade / f'annotations/{name}.png') as opened:
            assert opened.mode == 'L'
            np.testing.assert_array_equal(np.asarray(opened), expected)
    assert np.percentile(difference, 2) > 60  # of 441 from black to white
    assert 75 < max(heights) <= 108  # 96, and a rotation


def test_every_file_is_accounted_for(root):
    """Also by pycocotools; the splits share no scan and no photograph."""
    fixed = {
        'SOURCES.md',
        'sample.json',
        'ade/ADEChallengeData2016/objectInfo150.txt',
        *(f'coco/annotations/instances_{split}2017.json' for split in SPLITS),
    }
    files = set(contents(root))
    assert fixed <= files and len(files) == len(fixed) + 3 * sum(COUNTS.values())
    text = (root / 'SOURCES.md').read_text(encoding='utf-8')
    assert all(photograph.author in text for photograph in PHOTOGRAPHS.values())
    assert '"train": 40, "val": 20, "seed": 0' in text
    lines = (root / 'ade/ADEChallengeData2016/objectInfo150.txt').read_text().splitlines()
    names = ['Name', 'background', *digits.NAMES]
    assert lines == [f'{i}\t{name}' for i, name in zip(['Idx', *range(1, 12)], names)]
    labels, scans, photographs = load_digits().target, {}, {}
    for split in SPLITS:
        coco = COCO(root / f'coco/annotations/instances_{split}2017.json')
        assert len(coco.imgs) == COUNTS[split]
        assert {i: c['name'] for i, c in coco.cats.items()} == dict(enumerate(digits.NAMES, 1))
        scans[split] = {a['scan'] for a in coco.anns.values()}
        photographs[split] = {image['photograph'] for image in coco.imgs.values()}
        assert all(labels[a['scan']] == a['category_id'] - 1 for a in coco.anns.values())
    assert not scans['train'] & scans['val']
    assert photographs == {'train': {'astronaut', 'coffee', 'rocket'}, 'val': {'chelsea', 'retina'}}


def test_some_digits_are_partly_hidden(monkeypatch):
    """In thirty images, whose photographs need no network."""
    monkeypatch.setattr(socket, 'socket', lambda *_, **__: pytest.fail('asked for the network'))
    photographs = photographs_of('train') | photographs_of('val')
    assert min(min(photograph.size) for photograph in photographs.values()) >= 300
    generators, scans = map(np.random.default_rng, range(30)), np.arange(100)
    pictures = [digits.draw_picture(generator, photographs, scans) for generator in generators]
    visible = [
        np.count_nonzero(digit.visible) / digit.area
        for picture in pictures
        for digit in picture.instances
    ]
    assert 0.05 < np.mean(np.less(visible, 1)) < 0.35 and min(visible) >= 0.4


def test_what_the_arguments_decide(root, tmp_path):
    """The same arguments give the same files, a smaller set is the beginning of a larger one, and
    another seed gives other images."""
    for name, seed in (('small', 0), ('again', 0), ('other', 1)):
        digits.make_dataset(tmp_path / name, train=4, val=3, seed=seed)
    large, small = contents(root), contents(tmp_path / 'small')
    assert contents(tmp_path / 'again') == small
    for name, data in small.items():
        assert large[name] == data or not name.endswith(('.jpg', '.png'))
    for split in SPLITS:
        ours = [a['bbox'] for a in annotations(root, split)['annotations']]
        theirs = annotations(tmp_path / 'other', split)['annotations'][:5]
        assert not any(a['bbox'] in ours for a in theirs)


# The folder

SMALL = '--train', '2', '--val', '1'


def refusal(capsys, root: Path, *arguments: str) -> str:
    """The tool's one-line error."""
    assert demo_data.main(['digits', '--root', str(root), *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith('cpvt demo-data: ') and err.count('\n') == 1
    return err


def test_an_existing_set_is_kept(tmp_path, capsys):
    path = tmp_path / 'new' / 'folder'
    path.mkdir(parents=True)  # an empty folder is as good as none
    assert demo_data.main(['digits', '--root', str(path), *SMALL]) == 0
    assert 'created' in capsys.readouterr().out
    times = {file: file.stat().st_mtime_ns for file in path.rglob('*')}
    assert demo_data.main(['digits', '--root', str(path), *SMALL]) == 0
    assert 'already complete' in capsys.readouterr().out
    assert 'other arguments' in refusal(capsys, path, '--train', '3', '--val', '1')
    assert 'seed' in refusal(capsys, path / 'more', '--seed', '-1')
    assert {file: file.stat().st_mtime_ns for file in path.rglob('*')} == times
    assert [entry.name for entry in path.parent.iterdir()] == ['folder']


def test_a_folder_of_others_is_left_alone(tmp_path, capsys):
    file = tmp_path / 'sample.json'  # the name of our own
    file.write_bytes(b'{"mine": 1}\xff')
    for root in (tmp_path, file):
        assert 'has other files' in refusal(capsys, root, *SMALL)
    assert str(file) in refusal(capsys, file / 'sample', *SMALL)
    assert contents(tmp_path) == {'sample.json': b'{"mine": 1}\xff'}


@pytest.mark.parametrize('error, status', [(KeyboardInterrupt(), 130), (OSError(28, 'full'), 2)])
def test_an_interrupt_or_a_full_disk_leaves_nothing(error, status, tmp_path, capsys, monkeypatch):
    pictures = [digits.draw_picture] * 2  # and then the error

    def draw_picture(*args):
        if not pictures:
            raise error
        return pictures.pop()(*args)

    monkeypatch.setattr(digits, 'draw_picture', draw_picture)
    assert demo_data.main(['digits', '--root', str(tmp_path / 'sample'), *SMALL]) == status
    error = capsys.readouterr().err
    assert 'cpvt demo-data: ' in error and 'Traceback' not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('layout', ['coco', 'ade/ADEChallengeData2016'])
def test_the_error_of_a_missing_set_is_a_command_that_creates_it(layout, tmp_path, monkeypatch):
    """Where the config looks, whatever the current folder is."""
    missing = tmp_path / 'my data/sample'
    dataset = dict(type='CocoDataset', data_root=f'{missing}/{layout}', ann_file='a.json')
    cfg = Config(dict(train_dataloader=dict(dataset=dataset)))
    with pytest.raises(UserError, match='Create it with: cpvt demo-data digits --root ') as raised:
        check_data(cfg, 'train')
    command = shlex.split(str(raised.value).partition('Create it with: cpvt demo-data ')[2])
    monkeypatch.chdir(tmp_path)
    assert demo_data.main([*command, *SMALL]) == 0
    assert (missing / layout).is_dir()
