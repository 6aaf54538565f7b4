"""Annotations and label maps with any defect: the check reports them, and mm reads the rest."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
from damage import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import SIZE, coco_content, fill, scene
from mmdet.datasets import CocoDataset
from mmdet.evaluation import CocoMetric
from mmengine.config import Config
from PIL import Image

from cpvt_pyramid.app.data.check import checked_split
from cpvt_pyramid.app.data.config_data import check_dataset
from cpvt_pyramid.app.data.data import Split, coco_of_split
from cpvt_pyramid.app.data.defects import KEPT, Defects, Problem
from cpvt_pyramid.app.data.images import ALL
from cpvt_pyramid.app.data.layouts.coco import parse_coco, read_coco
from cpvt_pyramid.app.tooling.command import UserError

FUZZ = settings.get_profile('fuzz')
SCENES = [scene(i, name) for i, name in enumerate(('a', 'b', 'ü ö'))]
COCO = coco_content(SCENES, '{}.jpg')
values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 7, 8, -1, 10**30, 0.5, math.nan, math.inf, 1e308, -1e308]),
    st.text(max_size=3),
    st.sampled_from(['a.jpg', '../a.jpg', '/a.jpg', '7']),
    st.lists(st.sampled_from([0, 3, -5, 1e9, math.nan, None, '1']), max_size=5),
    st.just({}),
)


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp('images')
    fill(folder, SCENES, '{}.jpg')
    return folder


@st.composite
def annotations(draw) -> bytes:
    """A good COCO file after one to five changes of records or of its lists."""
    content = copy.deepcopy(COCO)
    changes = st.sampled_from(['list', 'pop', 'repeat', 'replace', 'delete', *['set'] * 5])
    for _ in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from(['images', 'categories', 'annotations', 'annotations']))
        records, change = content[name], draw(changes)
        if not isinstance(records, list) or not records:
            continue
        index = draw(st.integers(0, len(records) - 1))
        record = records[index]
        if change == 'list' and draw(st.booleans()):
            content[name] = draw(values)
        elif change == 'pop':
            del records[index]
        elif change == 'repeat':
            records.append(copy.deepcopy(record))
        elif change == 'replace' or not isinstance(record, dict) or not record:
            records[index] = draw(values)
        else:
            field = draw(st.sampled_from(sorted(record)))
            record[field] = draw(values)
            if change == 'delete':
                del record[field]
    return json.dumps(content).encode()


def check_file(path: Path, folder: Path) -> tuple[dict, list[Problem]]:
    """The content of a COCO file without what has errors, and the errors."""
    content = read_coco(path)
    found = Defects(as_it_is=True)
    classes = [category['name'] for category in content['categories']]
    split = parse_coco(content, Split([], folder, path), classes, found)
    good = coco_of_split(checked_split('train', split, classes, None, ALL, found), classes)
    return good, [problem for problem in found.problems() if problem.is_error]


@settings(FUZZ)
@given(content=st.one_of(annotations(), damaged(json.dumps(COCO).encode())))
def test_annotations(content, images):
    """Without errors, mm's data set and metric read a COCO file; with errors, what is left has
    none but those that the user must correct."""
    path = images / 'coco.json'
    path.write_bytes(content)
    try:
        good, errors = check_file(path, images)
    except UserError as error:
        assert len(str(error)) < 400 + len(str(path)) and '\n' not in str(error)
        return
    if errors:
        path = images / 'clean.json'
        if not good['images']:
            return
        path.write_text(json.dumps(good))
        _, left = check_file(path, images)
        assert all(problem.kind.left_out == KEPT for problem in left)
        if left:
            return
    names = [category['name'] for category in json.loads(path.read_bytes())['categories']]
    metainfo = {'classes': tuple(names)}
    data = CocoDataset(
        ann_file=str(path),
        data_prefix={'img': str(images)},
        metainfo=metainfo,
        pipeline=[],
        serialize_data=False,
    )
    for info in data.data_list:
        for instance in info['instances']:
            assert np.isfinite(instance['bbox']).all() and 0 <= instance['bbox_label'] < len(names)
    metric = CocoMetric(ann_file=str(path), metric='bbox')
    metric.dataset_meta = metainfo
    box = np.array([[2.0, 3, 10, 12]])
    for info in data.data_list:
        found = {'bboxes': box, 'scores': np.ones(1), 'labels': np.zeros(1, int)}
        prediction = {'img_id': info['img_id'], **found}
        ground_truth = {'img_id': info['img_id'], 'width': info['width'], 'height': info['height']}
        metric.results.append((ground_truth, prediction))
    metric.evaluate(len(metric.results))


@settings(FUZZ)
@given(data=st.data())
def test_label_maps(data, tmp_path_factory):
    """Without an error, the labels are those of classes, or ignored, and of the image's size."""
    root = tmp_path_factory.mktemp('labels', numbered=True)
    Image.new('RGB', SIZE[::-1]).save(root / 'a.jpg')
    size = data.draw(st.sampled_from([SIZE, SIZE, SIZE, (1, 1), SIZE[::-1]]))
    labels = np.zeros(size, np.uint8)
    labels[0, 0] = data.draw(st.integers(0, 255))
    image = Image.fromarray(labels).convert(data.draw(st.sampled_from(['L', 'L', 'P', 'RGB', '1'])))
    image.save(root / 'a.png')
    if data.draw(st.booleans()):
        whole = (root / 'a.png').read_bytes()
        (root / 'a.png').write_bytes(data.draw(damaged(whole)))
    config = Config(
        dict(type='BaseSegDataset', data_root=str(root), metainfo=dict(classes=('a', 'b', 'c')))
        | dict(data_prefix=dict(img_path='', seg_map_path=''), pipeline=[])
    )
    problems = check_dataset(Config(dict(default_scope='mmseg')), 'train', config)
    if not problems:
        got = np.asarray(Image.open(root / 'a.png'))
        assert got.shape == SIZE and set(np.unique(got)) <= {0, 1, 2, 255}
