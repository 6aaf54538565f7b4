"""cpvt test --report: numbers next to pycocotools', mmseg's and a slow version of TIDE."""

import contextlib
import io
import json
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.evaluation import CocoMetric
from PIL import Image
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from small_data import CLASSES as SAMPLE_CLASSES

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.evaluate.report.common import Analysis
from cpvt_pyramid.app.evaluate.report.detection_errors import ERRORS, confusion_of, find_errors
from cpvt_pyramid.app.evaluate.report.detections import (
    add_detections,
    averages,
    evaluate_detections,
)
from cpvt_pyramid.app.predictions.average_precision import coco_with_index
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.app.training.report_of_config import analyse, check_reported, write_test_report

CLASSES = ('cat', 'dog', 'cow', 'never')


def random_data(seed: int, masks: bool = False) -> tuple[dict, list[dict]]:
    """A COCO file with crowds and a class without objects, and detections with all kinds of errors;
    one image has no objects and one no detections."""
    rng = np.random.default_rng(seed)
    images = [{'id': i, 'file_name': f'{i}.png', 'height': 200, 'width': 300} for i in range(3, 11)]
    annotations, results = [], []

    def with_mask(item: dict) -> dict:
        if masks:
            x, y, w, h = item['bbox']
            rows, columns = np.mgrid[:200, :300]
            inside = ((columns - x - w / 2) / w) ** 2 + ((rows - y - h / 2) / h) ** 2 < 0.25
            rle = mask_utils.encode(np.asfortranarray(inside.astype(np.uint8)))
            item['segmentation'] = {**rle, 'counts': rle['counts'].decode()}
        return item

    for image in images[1:]:
        for _ in range(rng.integers(2, 9)):
            w, h = rng.uniform(8, 110, 2)
            box = [*rng.uniform(0, (300 - w, 200 - h)), w, h]
            label = int(rng.integers(3))
            annotation = {
                'id': len(annotations) + 1,
                'image_id': image['id'],
                'category_id': label * 7 + 2,
                'bbox': list(map(float, box)),
                'area': w * h / (1 + masks),
                'iscrowd': int(rng.random() < 0.1),
            }
            annotations.append(with_mask(annotation))
            for _ in range(rng.integers(0, 4) if image is not images[-1] else 0):
                noise = rng.normal(0, 0.15, 4) * rng.integers(0, 3) * [w, h, w / 2, h / 2]
                other = int(rng.choice([label, label, rng.integers(4)]))
                x, y, *sides = box + noise
                result = {
                    'image_id': image['id'],
                    'category_id': other * 7 + 2,
                    'bbox': [float(x), float(y), *(float(max(s, 3)) for s in sides)],
                    'score': float(rng.random()),
                }
                results.append(with_mask(result))
    categories = [{'id': i * 7 + 2, 'name': name} for i, name in enumerate(CLASSES)]
    content = {'images': images, 'annotations': annotations, 'categories': categories}
    alone = {**results[0], 'image_id': 3, 'score': 0.55, 'bbox': [5.0, 5.0, 40.0, 30.0]}
    results.append(with_mask(alone))
    return content, results


NAMES = {name: i * 7 + 2 for i, name in enumerate(CLASSES)}


@pytest.mark.parametrize('metric', ['bbox', 'segm'])
def test_average_precisions_are_those_of_pycocotools(metric):
    content, results = random_data(0, masks=True)
    found = evaluate_detections(coco_with_index(content), results, NAMES, metric)
    analysed = Analysis({}, [])
    add_detections(analysed, found, metric, 0.3)
    Path('truth.json').write_text(json.dumps(content))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO('truth.json')
        given = [{k: v for k, v in r.items() if metric == 'bbox' or k != 'bbox'} for r in results]
        expected = COCOeval(truth, truth.loadRes(given), metric)
        expected.evaluate(), expected.accumulate(), expected.summarize()
    numbers = analysed.numbers[metric]
    names = ('AP', 'AP50', 'AP75', 'AP small', 'AP medium', 'AP large')
    stats = [math.nan if value < 0 else value for value in expected.stats[:6]]
    np.testing.assert_allclose([numbers[name] for name in names], stats)
    assert 0.1 < numbers['AP'] < 0.9
    errors = find_errors(found.images, len(CLASSES))
    assert errors.ap50 == pytest.approx(numbers['AP50'], abs=1e-12)
    precision = expected.eval['precision'][:, :, :, 0, -1]
    for row, values in zip(numbers['classes'], np.moveaxis(precision, -1, 0)):
        expected_ap = values.mean() if (values > -1).any() else math.nan
        assert row['AP'] == pytest.approx(expected_ap, nan_ok=True)


def test_more_than_a_hundred_objects_in_an_image(tmp_path):
    """MMDetection's AP counts 100 detections of an image, its other averages 1000."""
    rng = np.random.default_rng(0)
    corners = [(30 * column, 30 * row) for row in range(15) for column in range(10)]
    boxes = np.array([(x, y, 20 + i % 9, 20 + i % 7) for i, (x, y) in enumerate(corners)], float)
    content = {
        'images': [{'id': 4, 'file_name': '4.png', 'height': 450, 'width': 300}],
        'categories': [{'id': 2, 'name': 'cat'}],
        'annotations': [
            dict(id=i, image_id=4, category_id=2, iscrowd=0, bbox=box, area=box[2] * box[3])
            for i, box in enumerate(boxes.tolist(), 1)
        ],
    }
    found = boxes + rng.normal(0, 1, boxes.shape)
    scores = rng.random(len(boxes))
    results = [
        dict(image_id=4, category_id=2, bbox=box, score=score)
        for box, score in zip(found.tolist(), scores.tolist())
    ]
    evaluated = evaluate_detections(coco_with_index(content), results, {'cat': 2}, 'bbox')
    assert len(evaluated.images[0].labels) == 150
    numbers = averages(evaluated.precision)

    (tmp_path / 'truth.json').write_text(json.dumps(content))
    metric = CocoMetric(str(tmp_path / 'truth.json'), outfile_prefix=str(tmp_path / 'a'))
    metric.dataset_meta = {'classes': ('cat',)}
    instances = dict(
        bboxes=torch.from_numpy(np.hstack([found[:, :2], found[:, :2] + found[:, 2:]])),
        scores=torch.from_numpy(scores),
        labels=torch.zeros(len(boxes), dtype=torch.long),
    )
    sample = dict(img_id=4, ori_shape=(450, 300), pred_instances=instances)
    metric.process({}, [sample])
    expected = metric.evaluate(1)
    assert numbers['AP50'] > 0.9 and numbers['AP'] < 0.8
    for name, key in (('AP', 'mAP'), ('AP50', 'mAP_50'), ('AP75', 'mAP_75'), ('AP small', 'mAP_s')):
        assert numbers[name] == pytest.approx(expected[f'coco/bbox_{key}'], abs=6e-4), name


def iou_of(one: Sequence[float], other: Sequence[float]) -> float:
    return mask_utils.iou([one], [other], [0]).item()


def slow_tide(content: dict, results: Sequence[dict]) -> tuple[dict[str, int], dict[str, float]]:
    """The numbers of errors, one detection after the other, and the AP50 of the corrected results
    or, for missed objects, without these."""
    objects, found = defaultdict(list), defaultdict(list)
    for annotation in content['annotations']:
        objects[annotation['image_id']].append(dict(annotation, user=None, reached=False, best=-1))
    for result in results:
        found[result['image_id']].append(dict(result, error=None, object=None))
    detections, everything = (list(chain(*kind.values())) for kind in (found, objects))
    for image in {**objects, **found}:
        for det in sorted(found[image], key=lambda d: -d['score']):
            own = [o for o in objects[image] if o['category_id'] == det['category_id']]
            free = [o for o in own if o['user'] is None]
            best = max(free, key=lambda o: iou_of(det['bbox'], o['bbox']), default=None)
            if best and iou_of(det['bbox'], best['bbox']) >= 0.5:
                best['user'], det['object'] = det, best
        for det in found[image]:
            if det['object']:
                continue
            best = {'own': (0, None), 'other': (0, None)}
            for obj in objects[image]:
                kind = 'own' if obj['category_id'] == det['category_id'] else 'other'
                iou = iou_of(det['bbox'], obj['bbox'])
                if iou > best[kind][0]:
                    best[kind] = iou, obj
            own, other = best['own'][0], best['other'][0]
            if 0.1 <= own < 0.5:
                det['error'], det['object'] = 'localization', best['own'][1]
            elif other >= 0.5:
                det['error'], det['object'] = 'classification', best['other'][1]
            elif own >= 0.5:
                det['error'] = 'duplicate'
            else:
                det['error'] = 'background' if max(own, other) < 0.1 else 'both'
            if det['object']:
                det['object']['reached'] = True
                det['object']['best'] = max(det['object']['best'], det['score'])

    def ap50(fixed: str) -> float:
        left, corrected = everything, []
        for det in detections:
            obj = det['object']
            if det['error'] == fixed:
                if not obj or obj['user'] is not None or obj['best'] != det['score']:
                    continue
                det = {**det, 'category_id': obj['category_id'], 'bbox': obj['bbox']}
            corrected.append(det)
        if fixed == 'missed':
            left = [obj for obj in everything if obj['user'] is not None or obj['reached']]
        truth = coco_with_index({**content, 'annotations': left})
        found = evaluate_detections(truth, corrected, NAMES, 'bbox')
        return averages(found.precision)['AP50']

    counts = {e: sum(det['error'] == e for det in detections) for e in ERRORS}
    counts['missed'] = sum(o['user'] is None and not o['reached'] for o in everything)
    return counts, {name: max(ap50(name) - ap50('none'), 0) for name in ERRORS}


def test_errors_are_those_of_a_slow_version():
    """The confusion matrix has every object and every detection once."""
    seen = defaultdict(float)
    for seed in range(6):
        content, results = random_data(seed)
        for annotation in content['annotations']:
            annotation['iscrowd'] = 0
        images = evaluate_detections(coco_with_index(content), results, NAMES, 'bbox').images
        errors = find_errors(images, len(CLASSES))
        counts, costs = slow_tide(content, results)
        assert errors.counts == counts
        for name in ERRORS:
            assert errors.costs[name] == pytest.approx(costs[name], abs=1e-9)
            seen[name] += costs[name]
        matrix = confusion_of(images, len(CLASSES), 0.4)
        assert matrix[:-1].sum() == len(content['annotations'])
        assert matrix[:, :-1].sum() == sum((c.scores >= 0.4).sum() for c in images)
        correct = sum(((c.scores >= 0.4) & (c.match >= 0)).sum() for c in images)
        assert matrix[:-1, :-1].sum() > matrix.trace() == correct > 0
    assert len(seen) == 6 and min(seen.values()) > 0


# The page


def perfect(data: Path) -> list[dict]:
    """The samples of a test in which every object is found."""
    content = json.loads((data / 'coco/annotations/instances_val2017.json').read_text())
    samples = []
    for image in content['images']:
        mine = [a for a in content['annotations'] if a['image_id'] == image['id']]
        corners = [[x, y, x + w, y + h] for x, y, w, h in (a['bbox'] for a in mine)]
        found = dict(
            bboxes=torch.tensor(corners).reshape(-1, 4).float(),
            scores=torch.linspace(0.5, 0.9, len(mine)),
            labels=torch.tensor([a['category_id'] - 1 for a in mine], dtype=torch.long),
        )
        path = data / 'coco/val2017' / image['file_name']
        samples.append({'img_id': image['id'], 'img_path': str(path), 'pred_instances': found})
    return samples


def written(config: Path, samples: list[dict]) -> tuple[dict, str]:
    """The numbers and the page about the predictions of a test."""
    cfg = load_config(config)
    Path('found.pkl').write_bytes(pickle.dumps(samples))
    write_test_report(cfg, Path('found.pkl'), Path('page.html'), 'mine', 'about it')
    return analyse(cfg, Path('found.pkl')).numbers, Path('page.html').read_text()


def test_a_page_of_detections(configs, sample_dataset):
    samples = perfect(sample_dataset)
    samples[0]['pred_instances']['bboxes'][0] += 500
    gone = len(samples[-1]['pred_instances']['labels'])
    samples[-1]['pred_instances'] = {k: v[:0] for k, v in samples[-1]['pred_instances'].items()}
    numbers, page = written(configs['detector'], samples)
    assert page.count('data:image/jpeg') == 2 and 'AP medium' in page and '<svg' in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)  # one file
    errors = numbers['bbox']['errors']
    assert errors['background']['number'] == 1 and errors['missed']['number'] == 1 + gone
    # No detections at all.
    for sample in samples:
        sample['pred_instances'] = {k: v[:0] for k, v in sample['pred_instances'].items()}
    numbers, _ = written(configs['detector'], samples)
    assert [numbers[metric]['AP'] for metric in numbers] == [0]


def test_a_page_of_label_maps(configs, sample_dataset):
    """Perfect results, but for one image, which is the worst."""
    root = sample_dataset / 'ade/ADEChallengeData2016'
    samples = []
    for path in sorted((root / 'images/validation').iterdir()):
        labels = np.array(Image.open(root / f'annotations/validation/{path.stem}.png'))
        found = torch.tensor(labels[None].astype(int) - 1).clamp(min=0)
        samples.append({'img_path': str(path), 'pred_sem_seg': {'data': found}})
    samples[1]['pred_sem_seg']['data'][:] = 1
    numbers, page = written(configs['segmentor'], samples[:-1])
    assert 'images of the data set with a result: 3 of 4' in page
    assert page.count('data:image/jpeg') == 4  # 3 images and a legend
    assert Path(samples[1]['img_path']).name in page
    assert 0.3 < numbers['labels']['aAcc'] < 1
    assert [row['class'] for row in numbers['labels']['classes']] == ['background', *SAMPLE_CLASSES]


def test_there_are_reports_for_coco_and_label_maps_alone(configs):
    cfg = load_config(configs['detector'], ['test_dataloader.dataset.type=VOCDataset'])
    with pytest.raises(UserError, match="--report needs .*, got .'VOCDataset'."):
        check_reported(cfg)
