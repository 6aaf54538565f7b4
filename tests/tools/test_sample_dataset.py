"""Exact annotations, separate splits, and safety of a user's folder."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from sklearn.datasets import load_digits
from support import ROOT, load_tool

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


def test_sources_name_every_author_and_count(root):
    text = (root / 'SOURCES.md').read_text(encoding='utf-8')
    for photograph in tool.PHOTOGRAPHS.values():
        assert photograph.author in text
    for split in SPLITS:
        digits = len(annotations(root, split)['annotations'])
        assert f'| {split} | {COUNTS[split]} | {digits} |' in text
    assert '--train 40 --val 20 --scale 1.0 --digits 1 6 --seed 0`' in text


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob('*')
        if path.is_file()
    }


# ---- what is in it ------------------------------------------------------------------------------


def test_boxes_and_areas_are_those_of_the_masks(root):
    for _, _, own, masks in images_and_masks(root):
        for annotation, mask in zip(own, masks, strict=True):
            rows, columns = np.nonzero(mask)
            x, y, width, height = annotation['bbox']
            assert (x, y) == (columns.min(), rows.min())
            assert (x + width - 1, y + height - 1) == (columns.max(), rows.max())
            assert annotation['area'] == mask.sum()
            assert annotation['iscrowd'] == 0


def test_masks_are_disjoint_and_make_up_the_semantic_map(root):
    for split, image, own, masks in images_and_masks(root):
        assert np.sum(masks, axis=0).max() == 1
        expected = np.ones((image['height'], image['width']), np.uint8)  # background
        for annotation, mask in zip(own, masks, strict=True):
            expected[mask == 1] = 1 + annotation['category_id']
        with Image.open(ade_files(root, split, image)[1]) as png:
            assert png.mode == 'L'
            np.testing.assert_array_equal(np.asarray(png), expected)


def test_both_layouts_hold_the_same_images(root):
    for split, image, _, _ in images_and_masks(root):
        jpeg = coco_image(root, split, image)
        assert jpeg.read_bytes() == ade_files(root, split, image)[0].read_bytes()
        assert jpeg.name == f'{image["id"]:012d}.jpg'
        with Image.open(jpeg) as opened:
            assert opened.size == (image['width'], image['height'])


def test_every_file_is_accounted_for(root):
    per_image = 3  # two jpg, one png
    fixed = {
        'SOURCES.md',
        'sample.json',
        'ade/ADEChallengeData2016/objectInfo150.txt',
        *(f'coco/annotations/instances_{split}2017.json' for split in SPLITS),
    }
    files = set(contents(root))
    assert fixed <= files
    assert len(files) == len(fixed) + per_image * sum(COUNTS.values())


def test_pycocotools_reads_it(root, capsys):
    for split in SPLITS:
        coco = COCO(root / f'coco/annotations/instances_{split}2017.json')
        assert len(coco.imgs) == COUNTS[split]
        assert {i: c['name'] for i, c in coco.cats.items()} == dict(enumerate(tool.NAMES, 1))
        for annotation in coco.anns.values():
            assert coco.annToMask(annotation).sum() == annotation['area']


def test_object_info_lists_background_and_digits(root):
    lines = (root / 'ade/ADEChallengeData2016/objectInfo150.txt').read_text().splitlines()
    header, *rows = [line.split('\t') for line in lines]
    assert header == ['Idx', 'Ratio', 'Train', 'Val', 'Stuff', 'Name']
    assert [row[0] for row in rows] == [str(i) for i in range(1, 12)]
    assert [row[5] for row in rows] == ['background', *tool.NAMES]
    assert sum(float(row[1]) for row in rows) == pytest.approx(1, abs=1e-3)
    assert rows[0][2:4] == [str(COUNTS[split]) for split in SPLITS]
    with_three = {
        a['image_id'] for a in annotations(root, 'train')['annotations'] if a['category_id'] == 4
    }
    assert rows[4][2] == str(len(with_three))


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
        for annotation, mask in zip(own, masks, strict=True):
            x, y, width, height = annotation['bbox']
            box = np.s_[y : y + height, x : x + width]
            around = pixels[box][ground[box]]
            if len(around) > 20:  # a straight one can fill its box
                difference.append(np.linalg.norm(pixels[mask == 1].mean(0) - around.mean(0)))
    assert np.percentile(difference, 2) > 60  # of 441 from black to white


@pytest.fixture(scope='module')
def pictures() -> list:
    """Forty images with three to six digits, with what the tool knows of each digit."""
    photographs = {name: tool.load_photograph(name) for name in ('coffee', 'rocket')}
    return [
        tool.draw_picture(
            np.random.default_rng(seed),
            photographs,
            np.arange(100),
            (3, 6),
            1.0,
        )
        for seed in range(40)
    ]


def test_some_digits_are_partly_hidden_and_none_is_lost(pictures):
    visible = np.array(
        [
            np.count_nonzero(instance.visible) / instance.area
            for picture in pictures
            for instance in picture.instances
        ]
    )
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


def test_same_arguments_same_files(root, tmp_path):
    tool.sample_dataset(root=str(tmp_path / 'again'), **COUNTS)
    assert contents(tmp_path / 'again') == contents(root)


def test_another_seed_is_another_data_set(root, tmp_path):
    tool.sample_dataset(root=str(tmp_path / 'other'), train=5, val=5, seed=1)
    for split in SPLITS:
        here, there = annotations(root, split), annotations(tmp_path / 'other', split)
        ours = [a['bbox'] for a in here['annotations']]
        assert not any(a['bbox'] in ours for a in there['annotations'][:5])


def test_a_smaller_set_is_the_beginning_of_a_larger_one(root, tmp_path):
    tool.sample_dataset(root=str(tmp_path / 'small'), train=4, val=3)
    large = contents(root)
    for name, data in contents(tmp_path / 'small').items():
        if name.endswith(('.jpg', '.png')):
            assert large[name] == data


def test_scale_and_digits_are_obeyed(tmp_path):
    tool.sample_dataset(root=str(tmp_path / 'a'), train=6, val=1, scale=2, digits=(10, 12))
    content = annotations(tmp_path / 'a', 'train')
    assert all(256 <= min(i['width'], i['height']) <= 448 for i in content['images'])
    number = np.bincount([a['image_id'] for a in content['annotations']])[1:]
    assert number.min() >= 10 and number.max() <= 12
    # Alone in an image nothing takes from its height.
    tool.sample_dataset(root=str(tmp_path / 'b'), train=20, val=1, scale=2, digits=(1, 1))
    heights = [a['bbox'][3] for a in annotations(tmp_path / 'b', 'train')['annotations']]
    assert len(heights) == 20
    assert min(heights) >= 50 and 100 < max(heights) <= 215


# ---- the folder ---------------------------------------------------------------------------------

SMALL = ['--train', '2', '--val', '1']
ARGUMENTS = dict(format=tool.FORMAT, train=2, val=1, scale=1.0, digits=[1, 6], seed=0)


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
    assert {file: file.stat().st_mtime_ns for file in path.rglob('*')} == times
    assert [entry.name for entry in path.parent.iterdir()] == ['folder']


def test_other_arguments_need_force(tmp_path, capsys):
    path = tmp_path / 'sample'
    tool.main(['--root', str(path), *SMALL])
    capsys.readouterr()
    before = contents(path)
    assert '--force' in refusal(capsys, ['--root', path, '--train', 3, '--val', 1])
    assert contents(path) == before
    assert tool.main(['--root', str(path), '--train', '3', '--val', '1', '--force']) == 0
    assert len(annotations(path, 'train')['images']) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ['sample']


@pytest.mark.parametrize('force', [[], ['--force']])
@pytest.mark.parametrize('name', ['letter.txt', 'sample.json'])
def test_a_folder_of_others_is_left_alone(tmp_path, capsys, name, force):
    (tmp_path / name).write_text('{"mine": 1}')
    assert 'did not create' in refusal(capsys, ['--root', tmp_path, *SMALL, *force])
    assert contents(tmp_path) == {name: b'{"mine": 1}'}


def test_force_spares_a_file_that_a_user_added(tmp_path, capsys):
    path = tmp_path / 'sample'
    tool.main(['--root', str(path), *SMALL])
    capsys.readouterr()
    (path / 'coco' / 'notes.txt').write_text('mine')
    before = contents(path)
    assert 'coco/notes.txt' in refusal(capsys, ['--root', path, '--train', 3, '--force'])
    assert contents(path) == before


def break_off_in_the_third_image(monkeypatch, error: BaseException) -> None:
    draw, calls = tool.draw_picture, []

    def draw_picture(*args):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return draw(*args)

    monkeypatch.setattr(tool, 'draw_picture', draw_picture)


def test_an_interrupt_leaves_nothing(tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        break_off_in_the_third_image(patch, KeyboardInterrupt())
        assert tool.main(['--root', str(tmp_path / 'sample'), *SMALL]) == 130
    assert 'Traceback' not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert tool.main(['--root', str(tmp_path / 'sample'), *SMALL]) == 0


def test_an_interrupt_under_force_leaves_the_old_set(tmp_path, monkeypatch):
    path = tmp_path / 'sample'
    tool.main(['--root', str(path), *SMALL])
    before = contents(path)
    break_off_in_the_third_image(monkeypatch, KeyboardInterrupt())
    assert tool.main(['--root', str(path), '--train', '9', '--force']) == 130
    assert contents(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ['sample']


def test_a_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    break_off_in_the_third_image(monkeypatch, OSError(28, 'No space left on device', 'x.jpg'))
    assert tool.main(['--root', str(tmp_path / 'sample'), *SMALL]) == 2
    assert 'sample_dataset: x.jpg: No space left' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- what users get wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    'argv',
    [
        ['--train', 0],
        ['--val', -1],
        ['--scale', 0],
        ['--scale', 'nan'],
        ['--scale', 100],
        ['--digits', 3, 2],
        ['--digits', 0, 2],
        ['--digits', 1, 13],
        ['--seed', -1],
        ['--seed', 2**32],
    ],
    ids=lambda argv: ' '.join(map(str, argv)),
)
def test_bad_arguments_are_one_line(tmp_path, capsys, argv):
    refusal(capsys, ['--root', tmp_path / 'sample', *argv])
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_or_under_one(tmp_path, capsys):
    file = tmp_path / 'file'
    file.write_text('mine')
    assert 'did not create' in refusal(capsys, ['--root', file, *SMALL])
    assert str(file) in refusal(capsys, ['--root', file / 'sample', *SMALL])
    assert file.read_text() == 'mine'


def test_as_a_command_from_any_folder(tmp_path):
    def run(*argv: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, TOOL, *argv], cwd=tmp_path, text=True, capture_output=True, timeout=60
        )

    good = run('--root', 'here', *SMALL)
    assert good.returncode == 0 and good.stdout.count('\n') == 1
    assert '2/2' in good.stderr  # the progress bar
    assert len(annotations(tmp_path / 'here', 'train')['images']) == 2
    bad = run('--root', 'there', '--train', '0')
    assert (bad.returncode, bad.stdout) == (2, '')
    assert 'Traceback' not in bad.stderr and bad.stderr.count('\n') == 1
