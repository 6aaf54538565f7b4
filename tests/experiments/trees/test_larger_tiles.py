"""Detectors of trees on tiles that are larger than the crops of their training."""

import json

import numpy as np
import pytest
import torch
from mmengine.registry import init_default_scope
from mmengine.runner import save_checkpoint
from PIL import Image
from pycocotools.coco import COCO
from support import ROOT

from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.predict.openmmlab.models import build_model
from experiments.trees import larger_tiles, runs
from experiments.trees.larger_tiles import COUNTED, KINDS, NORMALIZED

CROP = 64
TILES = (64, 128, 256)
SPLIT, FILE = runs.PHOTOGRAPHS[larger_tiles.PHOTOGRAPH]
BOXES = {  # left, top, width, height, and whether a smallest tile has all of it
    (70, 5, 50, 40): True,
    (64, 64, 64, 64): True,
    (50, 5, 20, 20): False,
    (5, 120, 20, 20): False,
    (250, 200, 30, 20): False,  # it leaves the largest tile
    (255, 192, 1, 1): True,
    (260, 5, 20, 20): None,  # outside
}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(larger_tiles, 'CROP', CROP)
    monkeypatch.setattr(larger_tiles, 'TILES', TILES)


@pytest.fixture
def root(tmp_path):
    """A folder with a photograph of noise."""
    root = tmp_path / 'data'
    (root / 'annotations').mkdir(parents=True)
    (root / SPLIT).mkdir()
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (270, 300, 3), np.uint8)
    Image.fromarray(noise).save(root / SPLIT / FILE)
    images = [dict(id=4, file_name='another.png'), dict(id=7, file_name=FILE)]
    annotations = [dict(id=1, image_id=4, bbox=[0, 0, 9, 9])]
    for number, box in enumerate(BOXES, 2):
        annotations.append(dict(id=number, image_id=7, bbox=list(box)))
    common = dict(category_id=1, iscrowd=0, area=100)
    content = dict(
        images=[dict(one, height=270, width=300) for one in images],
        annotations=[{**one, **common} for one in annotations],
        categories=[dict(id=1, name='tree')],
    )
    (root / f'annotations/instances_{SPLIT}.json').write_text(json.dumps(content))
    return root


def trained(arm, root, folder):
    """The folder of a run whose detector has random weights, as its training starts."""
    init_default_scope('mmdet')
    torch.manual_seed(0)
    options = ['model.test_cfg.score_thr=0.0', *runs.ARMS[arm], 'model.backbone.init_cfg=None']
    cfg = load_config(runs.CONFIG, [one.replace(str(runs.CROP), str(CROP)) for one in options])
    cfg.data_root = str(root)
    model = build_model(cfg, 'cpu')
    for parameter in model.backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.bbox_head.retina_cls.bias.data.fill_(0.5)  # all anchors are found
    run = folder / f'{arm}-0'
    run.mkdir()
    cfg.dump(run / 'trees_nano.py')
    save_checkpoint(dict(state_dict=model.state_dict(), meta={}), str(run / 'epoch_1.pth'))
    (run / 'last_checkpoint').write_text(str(run / 'epoch_1.pth'))
    return run


@pytest.mark.parametrize('arm', larger_tiles.ENCODINGS)
def test_coordinates_change_larger_tiles_alone(arm, root, small, tmp_path, monkeypatch):
    """The AP of noise says nothing; what is compared are the scores."""
    found = {}

    def keep(truth, of_image):
        [(_, scores)] = of_image.values()
        found[len(found)] = np.sort(scores)
        return dict(AP50=0.5)

    monkeypatch.setattr(runs, 'precision', keep)
    measured = larger_tiles.measure(trained(arm, root, tmp_path))
    assert {*measured} == {*KINDS} and {*measured[COUNTED]} == {'64 px', '128 px', '256 px'}
    counted, normalized = ([found[3 * kind + i] for i in range(3)] for kind in range(2))
    np.testing.assert_allclose(counted[0], normalized[0], atol=1e-6)
    for one, other in zip(counted[1:], normalized[1:]):
        assert (arm == 'distilled') == (one.shape == other.shape and np.allclose(one, other))


def test_what_is_found_in_tiles_is_at_its_place_in_the_photograph(root, small, monkeypatch):
    """A detector that finds what the photograph shows, whatever the tiles are."""
    from benchmarks.models import detections

    truth = larger_tiles.whole_trees(COCO(root / f'annotations/instances_{SPLIT}.json'), FILE)
    photograph = np.zeros((270, 300, 3), np.uint8)
    photograph[5:45, 70:120, 2] = 255
    photograph[64:128, 64:128, 0] = 255

    def detect(model, part):
        boxes = []
        for channel in (0, 2):
            rows, columns = part[..., channel].nonzero()
            if not len(rows):
                continue
            boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        return np.array(boxes, float).reshape(-1, 4), np.full(len(boxes), 0.9)

    monkeypatch.setattr(detections, 'detect', detect)
    for tile in TILES:
        found = larger_tiles.precision_of(None, photograph, truth, tile)
        assert found == pytest.approx(67 / 101)  # two of three trees, and no wrong box


def test_trees_that_a_smallest_tile_cuts_do_not_count(root, small):
    truth = larger_tiles.whole_trees(COCO(root / f'annotations/instances_{SPLIT}.json'), FILE)
    kept = {tuple(one['bbox']): not one['iscrowd'] for one in truth.dataset['annotations']}
    assert kept == {box: whole for box, whole in BOXES.items() if whole is not None}
    assert list(truth.imgs) == [7]


def test_the_smallest_tile_is_a_crop_of_the_training():
    [crop] = [one for one in load_config(runs.CONFIG).train_pipeline if one.type == 'RandomCrop']
    assert crop.crop_size == (larger_tiles.TILES[0],) * 2 == (runs.CROP,) * 2


@pytest.mark.parametrize('tile', TILES)
def test_tiles_cover_the_largest_one(tile, small):
    covered = np.zeros((256, 256), int)
    for top, left in larger_tiles.corners(tile):
        covered[top : top + tile, left : left + tile] += 1
    assert (covered == 1).all()


def test_missing_and_different_seeds_are_one_line(tmp_path, capsys):
    assert larger_tiles.main(['--work-dir', str(tmp_path)]) == 2
    assert 'python -m experiments.trees --arms distilled' in capsys.readouterr().err
    for arm in larger_tiles.ENCODINGS:
        for seed in (0,) if arm == 'rope' else (0, 1):
            (tmp_path / f'{arm}-{seed}').mkdir()
            (tmp_path / f'{arm}-{seed}/measures.json').write_text('{}')
    assert larger_tiles.main(['--work-dir', str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert 'need the same seeds' in error and 'rope: 0' in error and error.count('\n') == 1


def test_tables_compare_each_run_with_itself():
    def run(counted, normalized):
        values = {COUNTED: counted, NORMALIZED: normalized}
        return {
            kind: {larger_tiles.tile_name(t): v for t, v in zip(larger_tiles.TILES, of_kind)}
            for kind, of_kind in values.items()
        }

    plain = [run([0.4, 0.4, 0.3], [0.4, 0.4, 0.3]), run([0.5, 0.5, 0.41], [0.5, 0.5, 0.41])]
    better = [run([0.4, 0.3, 0.1], [0.4, 0.4, 0.4]), run([0.5, 0.4, 0.2], [0.5, 0.5, 0.51])]
    results = dict.fromkeys(larger_tiles.ENCODINGS, plain) | {'rope': better}
    precision, changes, gains = larger_tiles.tables(results)
    assert [row[0] for row in precision.rows][:2] == ['PEG', 'learned table: counted']
    by_name = {row[0]: row for row in changes.rows}
    assert by_name['PEG'][2].startswith('-9.5 ± ')
    assert by_name['RoPE: counted'][2].startswith('-30.0 ± ')
    assert {row[0]: row for row in gains.rows}['RoPE'][2].startswith('+30.5 ± ')


def test_the_page_has_what_its_runs_say():
    findings = ROOT / 'experiments/trees/findings'
    page = (findings / 'larger_tiles.md').read_text()
    results = json.loads((findings / 'larger_tiles.json').read_text())
    for table in larger_tiles.tables(results):
        assert table.markdown() in page
