"""cpvt crop: each box is a file of its own, wherever it comes from; all files or none."""

import json
from pathlib import Path

import layouts
import numpy as np
import pytest
from layouts import CLASSES, COLORS, MORE, SCENES, coco_content, fill, label_map, labelme, write
from PIL import Image
from support import ROOT, load_tool

TREES = ROOT / 'examples/trees.onnx'
crop = load_tool('crop').main


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def files(folder: str = 'crops') -> list[Path]:
    return sorted(path for path in Path(folder).rglob('*') if path.is_file())


def last_line(capsys) -> str:
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize('layout', layouts.VALID, ids=lambda layout: layout.__name__)
def test_boxes_of_any_layout(layout, capsys):
    """The crops show their object alone, in the colour of its class; none is lost."""
    layout(Path('data'))
    if layout.__name__.startswith('maps'):
        assert crop(['data']) == 2
        assert 'asked for' in capsys.readouterr().err and not Path('crops').exists()
        return
    assert crop(['data']) == 0
    found = files()
    assert last_line(capsys) == f'{len(found)} crops of 3 classes in crops'
    images = sum(count for count in layouts.VALID[layout] if count)
    assert len(found) >= 2 * images
    for path in found:
        pixels = np.asarray(Image.open(path)).astype(int)
        assert (pixels == COLORS[CLASSES.index(path.parent.name)]).all(), path


def test_images_of_one_name_have_files_of_their_own(capsys):
    """In other folders, with other endings, in other case, and with names like those of crops."""
    names = ['x/a.jpg', 'y/a.jpg', 'x/a.png', 'x_a.jpg', 'x/A.jpg', 'x_a-2.jpg', 'x_a-1-1.jpg']
    content = coco_content([SCENES[0]._replace(name=name) for name in names], '{}')
    write(Path('data/all.json'), json.dumps(content))
    for name in names:
        SCENES[0].write(Path('data') / name)
    assert crop(['data']) == 0
    found = files()
    assert last_line(capsys) == '14 crops of 2 classes in crops' and len(found) == 14
    assert len({str(path).casefold() for path in found}) == 14
    assert Path('crops/cat/x_a-1.png') in found and Path('crops/cat/y_a-1.png') in found


def test_nothing_is_overwritten(capsys):
    fill(Path('data'), SCENES, '{}.png', labelme, '{}.json')
    write(Path('crops/mine.txt'), 'mine')
    assert crop(['data']) == 2
    assert capsys.readouterr().err == (
        'cpvt crop: crops exists; remove it, or choose another --out-dir\n'
    )
    assert files() == [Path('crops/mine.txt')]
    assert crop(['data', '--out-dir', 'crops/new']) == 0
    assert crop(['data', '--out-dir', 'crops/new']) == 2


def test_an_image_that_is_torn_leaves_nothing(capsys):
    """Its header is whole, so that it is found after other crops are written."""
    fill(Path('data'), SCENES, '{}.png', labelme, '{}.json')
    path = Path('data/003.png')
    path.write_bytes(path.read_bytes()[:-30])
    assert crop(['data']) == 2
    assert capsys.readouterr().err.startswith('cpvt crop: data/003.png: ')
    assert [path.name for path in Path().iterdir()] == ['data']


def test_splits_and_margins(capsys):
    layouts.labelme_of_splits(Path('data'))
    assert crop(['data', '--split', 'val', '--margin', '0.5', '--out-dir', 'val']) == 0
    assert last_line(capsys) == '8 crops of 3 classes in val'
    for number, (label, x, y, width, height) in enumerate(MORE[0].boxes, 1):
        (path,) = Path('val').glob(f'{CLASSES[label]}/*000-{number}.png')
        left, right = max(int(x - width / 2), 0), min(-int(-(x + 1.5 * width) // 1), 80)
        top, bottom = max(int(y - height / 2), 0), min(-int(-(y + 1.5 * height) // 1), 60)
        expected = MORE[0].pixels[top:bottom, left:right]
        assert np.array_equal(np.asarray(Image.open(path)), expected)
    assert crop(['data', '--split', 'test']) == 2
    assert 'data has no test data, only train and val' in capsys.readouterr().err


def test_objects_to_be_ignored_and_boxes_outside(capsys):
    content = coco_content(SCENES)
    content['annotations'][0]['iscrowd'] = 1
    content['annotations'][1]['bbox'] = [200, 10, 20, 20]
    content['annotations'][2]['bbox'] = [-5, -5, 10, 10]
    write(Path('data/all.json'), json.dumps(content))
    fill(Path('data'), SCENES, '{}.png')
    assert crop(['data']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'left out: 1 object to be ignored' in lines
    assert 'left out: 1 box outside of the image' in lines
    assert lines[-1] == '6 crops of 3 classes in crops' and len(files()) == 6
    assert Image.open('crops/dog/001-1.png').size == (5, 5)


def test_names_of_classes_that_are_no_folders(capsys):
    content = coco_content(SCENES)
    for category, name in zip(content['categories'], ('../cat', '.._cat', 'CON: a\\b/c')):
        category['name'] = name
    write(Path('data/all.json'), json.dumps(content))
    fill(Path('data'), SCENES, '{}.png')
    assert crop(['data']) == 0
    assert len(files()) == 8 and last_line(capsys).startswith('8 crops of 3 classes')
    assert {path.parent.name for path in files()} == {'_cat', '_cat-2', 'CON_ a_b_c'}


def test_what_infer_found(capsys):
    """Also of images of the same name, and in a folder that is named from elsewhere."""
    photo = Image.open(ROOT / 'examples/trees/florida.jpg')
    for place, corner in (('x', 0), ('y', 128)):
        Path('photos', place).mkdir(parents=True)
        photo.crop((corner, 0, corner + 256, 256)).save(f'photos/{place}/a.png')
    command = [str(TREES), 'photos', '--out-dir', 'results', '--no-pictures']
    assert load_tool('infer').main(command) == 0
    found = {}
    for place in 'xy':
        items = json.loads(Path(f'results/{place}/a.detections.json').read_text())['detections']
        found[place] = [item for item in items if item['score'] >= 0.4]
    assert crop(['results', '--score-thr', '0.4']) == 0
    count = sum(map(len, found.values()))
    assert last_line(capsys) == f'{count} crops of 1 class in crops' and len(files()) == count > 2
    for place, items in found.items():
        x1, y1, x2, y2 = items[0]['box']
        whole = np.asarray(Image.open(f'photos/{place}/a.png').convert('RGB'))
        path = Path(f'crops/tree/{place}_a-1.png')
        part = whole[int(y1) : -int(-y2 // 1), int(x1) : -int(-x2 // 1)]
        assert np.array_equal(np.asarray(Image.open(path)), part)
    file = Path('results/x/a.detections.json')
    content = json.loads(file.read_text())
    for damaged in ({'detections': []}, {**content, 'detections': [3]}):
        file.write_text(json.dumps(damaged))
        assert crop(['results', '--out-dir', 'other']) == 2
        said = capsys.readouterr().err
        assert 'a.detections.json must have the detections of cpvt infer; remove' in said


@pytest.mark.parametrize(
    'words, message',
    [
        (['nowhere'], 'no folder or file nowhere'),
        (['data', '--score-thr', '0.5'], '--score-thr needs results of cpvt infer, which data has'),
        (['data', '--margin', '-1'], '--margin must be at least 0, got -1.0'),
        (['masks'], 'has data in the format masks'),
        (['bad'], 'the errors above; correct them (cpvt check-data lists all of each kind)\n'),
        (['results', '--split', 'val'], '--split is for annotated images, but results has results'),
        (['results'], 'results has no boxes'),
        (['torn'], 'torn/inputs.json is not complete: '),
    ],
)
def test_mistakes(words, message, capsys):
    fill(Path('data'), SCENES, '{}.png', labelme, '{}.json')
    fill(Path('masks'), SCENES, 'images/{}.png', label_map, 'masks/{}.png')
    write(Path('masks/classes.txt'), '\n'.join(('ground', *CLASSES)))
    fill(Path('bad'), SCENES, '{}.png', labelme, '{}.json')
    write(Path('bad/000.json'), '{')
    write(Path('results/inputs.json'), '{"a": "../data/000.png"}')
    write(Path('results/a.labels.png'), 'of a segmentor')
    write(Path('torn/inputs.json'), '{"a": ')
    assert crop(words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count('\n') == 1 and not Path('crops').exists()
