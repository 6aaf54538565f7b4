"""Exact annotations, separate splits, and safety of a user's folder."""

import json
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from sklearn.datasets import load_digits
from support import ROOT, load_tool, run

TOOL = ROOT / 'tools/demo/sample_dataset.py'
tool = load_tool('demo/sample_dataset')

COUNTS = {'train': 40, 'val': 20}
SPLITS = tuple(COUNTS)


@pytest.fixture(scope='module')
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('data') / 'sample'
    tool.sample_dataset(root=str(path), **COUNTS)
    return path


def annotations(root: Path, split: str) -> dict:
    return json.loads((root / f'coco/annotations/instances_{split}2017.json').read_text())


def images_and_masks(root: Path):
    """Each image of both splits: split, its record, its annotations and their decoded masks."""
    for split in SPLITS:
        content = annotations(root, split)
        for image in content['images']:
            own = [a for a in content['annotations'] if a['image_id'] == image['id']]
            yield split, image, own, [coco_mask.decode(a['segmentation']) for a in own]


def coco_image(root: Path, split: str, image: dict) -> Path:
    return root / f'coco/{split}2017' / image['file_name']


def ade_files(root: Path, split: str, image: dict) -> tuple[Path, Path]:
    ade, name = root / 'ade/ADEChallengeData2016', f'ADE_{split}_{image["id"]:08d}'
    folder = {'train': 'training', 'val': 'validation'}[split]
    return ade / 'images' / folder / f'{name}.jpg', ade / 'annotations' / folder / f'{name}.png'


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob('*')
        if path.is_file()
    }


# ---- what is in it ------------------------------------------------------------------------------


def test_annotations_and_maps_agree_with_each_other(root):
    """Boxes, areas and semantic maps are those of the masks, which are disjoint; both layouts have
    the same images."""
    for split, image, own, masks in images_and_masks(root):
        jpeg, (ade_jpeg, png) = coco_image(root, split, image), ade_files(root, split, image)
        assert jpeg.name == f'{image["id"]:012d}.jpg'
        assert jpeg.read_bytes() == ade_jpeg.read_bytes()
        with Image.open(jpeg) as opened:
            assert opened.size == (image['width'], image['height'])
        assert np.sum(masks, axis=0).max() == 1
        expected = np.ones((image['height'], image['width']), np.uint8)  # background
        for annotation, mask in zip(own, masks):
            rows, columns = np.nonzero(mask)
            x, y, width, height = annotation['bbox']
            assert (x, y) == (columns.min(), rows.min())
            assert (x + width - 1, y + height - 1) == (columns.max(), rows.max())
            assert annotation['area'] == mask.sum() and annotation['iscrowd'] == 0
            expected[mask == 1] = 1 + annotation['category_id']
        with Image.open(png) as opened:
            assert opened.mode == 'L'
            np.testing.assert_array_equal(np.asarray(opened), expected)


def test_every_file_is_accounted_for(root, capsys):
    fixed = {
        'SOURCES.md',
        'sample.json',
        'ade/ADEChallengeData2016/objectInfo150.txt',
        *(f'coco/annotations/instances_{split}2017.json' for split in SPLITS),
    }
    files = set(contents(root))
    assert fixed <= files and len(files) == len(fixed) + 3 * sum(COUNTS.values())
    text = (root / 'SOURCES.md').read_text(encoding='utf-8')
    assert all(photograph.author in text for photograph in tool.PHOTOGRAPHS.values())
    assert '"train": 40, "val": 20, "seed": 0' in text
    lines = (root / 'ade/ADEChallengeData2016/objectInfo150.txt').read_text().splitlines()
    names = ['Name', 'background', *tool.NAMES]
    assert lines == [f'{i}\t{name}' for i, name in zip(['Idx', *range(1, 12)], names)]
    for split in SPLITS:
        coco = COCO(root / f'coco/annotations/instances_{split}2017.json')
        assert len(coco.imgs) == COUNTS[split]
        assert {i: c['name'] for i, c in coco.cats.items()} == dict(enumerate(tool.NAMES, 1))


def test_splits_share_no_scan_and_no_photograph(root):
    labels, scans, photographs = load_digits().target, {}, {}
    for split in SPLITS:
        content = annotations(root, split)
        scans[split] = {a['scan'] for a in content['annotations']}
        photographs[split] = {image['photograph'] for image in content['images']}
        for annotation in content['annotations']:
            assert labels[annotation['scan']] == annotation['category_id'] - 1
    assert not scans['train'] & scans['val']
    assert photographs == {'train': {'astronaut', 'coffee', 'rocket'}, 'val': {'chelsea', 'retina'}}


def test_digits_stand_out_from_what_is_around_them(root):
    difference = []
    for split, image, own, masks in images_and_masks(root):
        with Image.open(coco_image(root, split, image)) as opened:
            pixels = np.asarray(opened, float)
        ground = np.sum(masks, axis=0) == 0
        for annotation, mask in zip(own, masks):
            x, y, width, height = annotation['bbox']
            box = np.s_[y : y + height, x : x + width]
            around = pixels[box][ground[box]]
            if len(around) > 20:  # a straight one can fill its box
                difference.append(np.linalg.norm(pixels[mask == 1].mean(0) - around.mean(0)))
    assert np.percentile(difference, 2) > 60  # of 441 from black to white


@pytest.fixture(scope='module')
def pictures() -> list:
    """Sixty images, with what the tool knows of each digit."""
    photographs = {name: tool.load_photograph(name) for name in ('coffee', 'rocket')}
    return [
        tool.draw_picture(np.random.default_rng(seed), photographs, np.arange(100))
        for seed in range(60)
    ]


def test_some_digits_are_partly_hidden_and_none_is_lost(pictures):
    digits = [instance for picture in pictures for instance in picture.instances]
    visible = np.array([np.count_nonzero(digit.visible) / digit.area for digit in digits])
    assert 0.05 < np.mean(visible < 1) < 0.35
    assert visible.min() >= 0.4


def read_digit(mask: np.ndarray, scans: np.ndarray, labels: np.ndarray) -> int:
    """The label of the scan that looks most like a mask brought back to 8x8."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    ink = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    margin = max(0, ink.shape[0] - ink.shape[1])
    square = np.pad(ink, ((0, 0), (margin // 2, margin - margin // 2))).astype(np.float32)
    small = np.asarray(Image.fromarray(square).resize((8, 8), Image.Resampling.BOX)) * 16
    return labels[np.abs(scans - small).sum(axis=(1, 2)).argmin()]


def test_painted_digits_are_read_as_what_they_are(pictures):
    data = load_digits()
    # Read by comparison with scans that none of the pictures was made from.
    right = [
        read_digit(instance.visible, data.images[100:], data.target[100:]) == instance.label
        for picture in pictures
        for instance in picture.instances
        if np.count_nonzero(instance.visible) == instance.area
    ]
    assert len(right) > 100
    assert np.mean(right) > 0.75  # this simple reader gets 0.84, and 0.29 if they are mirrored


def test_the_photographs_need_no_network(monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError('asked for the network')

    monkeypatch.setattr(socket, 'socket', no_network)
    for name in tool.PHOTOGRAPHS:
        assert min(tool.load_photograph(name).size) >= 300


# ---- reproducible -------------------------------------------------------------------------------


def test_what_the_arguments_decide(root, tmp_path):
    """The same arguments give the same files, a smaller set is the beginning of a larger one, and
    another seed gives other images."""
    large = contents(root)
    for name, options in (
        ('again', COUNTS),
        ('small', {'train': 4, 'val': 3}),
        ('other', {'train': 5, 'val': 5, 'seed': 1}),
    ):
        tool.sample_dataset(root=str(tmp_path / name), **options)
    assert contents(tmp_path / 'again') == large
    for name, data in contents(tmp_path / 'small').items():
        assert large[name] == data or not name.endswith(('.jpg', '.png'))
    for split in SPLITS:
        ours = [a['bbox'] for a in annotations(root, split)['annotations']]
        theirs = annotations(tmp_path / 'other', split)['annotations'][:5]
        assert not any(a['bbox'] in ours for a in theirs)


def test_sizes_of_images_and_digits(root):
    content = annotations(root, 'train')
    assert all(128 <= min(i['width'], i['height']) <= 224 for i in content['images'])
    number = np.bincount([a['image_id'] for a in content['annotations']])[1:]
    assert len(number) == COUNTS['train'] and number.min() >= 1 and number.max() <= 6
    heights = [a['bbox'][3] for a in content['annotations']]
    assert 75 < max(heights) <= 108  # 96, and a rotation


# ---- the folder ---------------------------------------------------------------------------------

SMALL = ['--train', '2', '--val', '1']


def refusal(capsys, argv: list) -> str:
    """The tool's one-line error."""
    assert tool.main([str(argument) for argument in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert err.startswith('sample_dataset: ') and err.count('\n') == 1
    return err


def test_an_existing_set_is_kept(tmp_path, capsys):
    path = tmp_path / 'new' / 'folder'
    assert tool.main(['--root', str(path), *SMALL]) == 0
    assert 'created' in capsys.readouterr().out
    times = {file: file.stat().st_mtime_ns for file in path.rglob('*')}
    assert tool.main(['--root', str(path), *SMALL]) == 0
    assert 'already complete' in capsys.readouterr().out
    assert 'other arguments' in refusal(capsys, ['--root', path, '--train', 3, '--val', 1])
    assert {file: file.stat().st_mtime_ns for file in path.rglob('*')} == times
    assert [entry.name for entry in path.parent.iterdir()] == ['folder']


@pytest.mark.parametrize('name', ['letter.txt', 'sample.json'])
def test_a_folder_of_others_is_left_alone(tmp_path, capsys, name):
    (tmp_path / name).write_text('{"mine": 1}')
    assert 'has other files' in refusal(capsys, ['--root', tmp_path, *SMALL])
    assert 'has other files' in refusal(capsys, ['--root', tmp_path / name, *SMALL])
    assert str(tmp_path / name) in refusal(capsys, ['--root', tmp_path / name / 'sample', *SMALL])
    assert contents(tmp_path) == {name: b'{"mine": 1}'}


@pytest.mark.parametrize(
    'error, status, said',
    [
        (KeyboardInterrupt(), 130, 'interrupted'),
        (OSError(28, 'No space left on device', 'x.jpg'), 2, 'x.jpg: No space left'),
    ],
)
def test_an_interrupt_or_a_full_disk_leaves_nothing(
    error, status, said, tmp_path, capsys, monkeypatch
):
    draw, calls = tool.draw_picture, []

    def draw_picture(*args):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return draw(*args)

    command = ['--root', str(tmp_path / 'sample'), *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(tool, 'draw_picture', draw_picture)
        assert tool.main(command) == status
    error = capsys.readouterr().err
    assert f'sample_dataset: {said}' in error and 'Traceback' not in error
    assert list(tmp_path.iterdir()) == []
    assert tool.main(command) == 0


@pytest.mark.parametrize('argv', ['--train 0', '--val -1', '--seed -1'])
def test_bad_arguments_are_one_line(tmp_path, capsys, argv):
    refusal(capsys, ['--root', tmp_path / 'sample', *argv.split()])
    assert list(tmp_path.iterdir()) == []


def test_as_a_command_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = run(sys.executable, TOOL, '--root', 'here', *SMALL)
    assert good.returncode == 0 and good.stdout.count('\n') == 1
    assert '2/2' in good.stderr  # the progress bar
    assert len(annotations(tmp_path / 'here', 'train')['images']) == 2
