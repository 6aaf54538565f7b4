"""cpvt test MODEL DATA: the metrics of OpenMMLab on equal predictions, for any model and layout."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
from layouts import CLASSES, SCENES, SIZE, coco, fill, label_map, labelme, voc, write, yolo
from mmdet.evaluation import CocoMetric
from mmseg.evaluation import IoUMetric
from PIL import Image
from support import ROOT, load_tool

from cpvt_pyramid.app.evaluate import evaluating
from cpvt_pyramid.app.evaluate.evaluating import evaluate_model
from cpvt_pyramid.app.evaluate.truth import read_truth
from cpvt_pyramid.app.predict import Predictor
from cpvt_pyramid.app.predict.opening import ModelFiles
from cpvt_pyramid.app.predict.options import RunOptions
from cpvt_pyramid.app.predict.protocol import Prepared
from cpvt_pyramid.app.predictions.drawing import class_palette
from cpvt_pyramid.app.predictions.kinds import Detections, LabelMap
from cpvt_pyramid.app.tooling.command import UserError

TREES = ROOT / 'examples/trees.onnx'
command = load_tool('test')


@dataclass
class FakeModel:
    """A model that predicts noise around what is true, always the same for an image."""

    kind: str
    classes: tuple[str, ...] = CLASSES
    has_masks: bool = False
    threads: int = 1
    own_tile: Optional[int] = None
    least_score: float = 0.0
    takes_tiles: bool = True

    @property
    def palette(self) -> Any:
        return class_palette(self.classes)

    def read(self, path: Path) -> np.ndarray:
        return np.asarray(Image.open(path).convert('RGB'))

    def prepare(self, image: np.ndarray) -> Prepared:
        return Prepared(image, image, image.shape[:2])

    def predict(self, batch: list[Prepared]) -> list[Any]:
        return [self.predicted(entry.image) for entry in batch]

    def predicted(self, image: np.ndarray) -> Any:
        (number,) = [i for i, s in enumerate(SCENES) if np.array_equal(s.pixels, image)]
        random = np.random.default_rng(number)
        common = image, self.classes, self.palette
        if self.kind == 'labels':
            labels = random.integers(0, len(self.classes), SIZE)
            for label, x, y, width, height in SCENES[number].boxes:
                labels[y : y + height, x : x + width] = label + 1
            return LabelMap(*common, labels)
        boxes, labels = [], []
        for label, x, y, width, height in SCENES[number].boxes * 3:
            corners = np.array([x, y, x + width, y + height])
            boxes.append(corners + random.normal(0, 1.5, 4))
            labels.append(self.classes.index(CLASSES[random.choice([label, label, number % 3])]))
        found = np.array(boxes, np.float32).clip(0, 80)
        scores = random.random(len(found)).astype(np.float32)
        masks = None
        if self.has_masks:
            rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
            masks = np.array(
                [(columns >= a) & (columns < c) & (rows >= b) & (rows < d) for a, b, c, d in found]
            )
        return Detections(*common, found, scores, np.array(labels), masks)


@pytest.fixture
def evaluated(monkeypatch):
    """Evaluates a fake model on a folder."""

    def run(model: FakeModel, folder: Path, **options: Any) -> dict[str, float]:
        monkeypatch.setattr(evaluating, 'open_model', lambda *_, **__: model)
        return evaluate_model(ModelFiles(exported=Path('fake')), folder, RunOptions(**options))

    return run


def objects(root: Path, layout: str) -> None:
    if layout == 'coco':
        fill(root, SCENES, 'images/{}.png')
        coco(root / 'train.json', SCENES)
        return
    files = {'yolo': ('txt', yolo), 'voc': ('xml', voc), 'labelme': ('json', labelme)}
    ending, annotate = files[layout]
    fill(root, SCENES, 'images/{}.png', annotate, f'labels/{{}}.{ending}')
    write(root / 'classes.txt', '\n'.join(CLASSES))


@pytest.mark.parametrize('batch_size', [1, 3])
@pytest.mark.parametrize('has_masks', [False, True])
def test_objects_have_the_ap_of_cocometric(has_masks, batch_size, evaluated, tmp_path):
    objects(tmp_path, 'coco')
    model = FakeModel('detections', has_masks=has_masks)
    metrics = evaluated(model, tmp_path, batch_size=batch_size)
    kinds = ['bbox', 'segm'] if has_masks else ['bbox']
    metric = CocoMetric(str(tmp_path / 'train.json'), metric=kinds, outfile_prefix='a')
    metric.dataset_meta = {'classes': CLASSES}
    for number, scene in enumerate(SCENES):
        found = model.predicted(scene.pixels)
        instances = dict(
            bboxes=torch.from_numpy(found.boxes),
            scores=torch.from_numpy(found.scores),
            labels=torch.from_numpy(found.labels),
        )
        if has_masks:
            instances['masks'] = torch.from_numpy(found.masks)
        record = json.loads((tmp_path / 'train.json').read_text())['images'][number]
        metric.process({}, [dict(img_id=record['id'], ori_shape=SIZE, pred_instances=instances)])
    expected = metric.evaluate(len(SCENES))
    assert 20 < metrics['AP'] < 95
    for kind in kinds:
        prefix = 'masks: ' if kind == 'segm' else ''
        for ours, theirs in (('AP', 'mAP'), ('AP50', 'mAP_50'), ('AP75', 'mAP_75')):
            value = round(metrics[f'{prefix}{ours}'] / 100, 3)
            assert value == pytest.approx(expected[f'coco/{kind}_{theirs}'], abs=1e-9)


@pytest.mark.parametrize('layout, has_masks', [('yolo', False), ('voc', False), ('labelme', True)])
def test_layouts_and_orders_of_classes_change_nothing(layout, has_masks, evaluated, tmp_path):
    objects(tmp_path / 'a', 'coco')
    objects(tmp_path / 'b', layout)
    expected = evaluated(FakeModel('detections', has_masks=has_masks), tmp_path / 'a')
    found = evaluated(FakeModel('detections', CLASSES[::-1], has_masks), tmp_path / 'b')
    assert found == pytest.approx(expected, nan_ok=True)


def test_classes_that_one_of_the_two_lacks(evaluated, tmp_path, capsys):
    """They do not count, and are said."""
    objects(tmp_path, 'coco')
    expected = evaluated(FakeModel('detections'), tmp_path)
    capsys.readouterr()
    found = evaluated(FakeModel('detections', ('hut', *CLASSES)), tmp_path)
    assert found == pytest.approx(expected, nan_ok=True)
    assert 'classes of the model that the data lack: hut' in capsys.readouterr().out
    with pytest.raises(UserError, match='no class in common: the data have cat, dog, owl, the'):
        evaluated(FakeModel('detections', ('hut',)), tmp_path)


def masks(root: Path, shift: int = 0) -> None:
    """Segmentation masks with a row of ignored pixels, whose values begin at a number."""
    fill(root, SCENES, 'images/{}.png', label_map, 'masks/{}.png')
    for path in (root / 'masks').iterdir():
        labels = np.array(Image.open(path)) + shift
        labels[:5] = 255
        Image.fromarray(labels.astype(np.uint8)).save(path)
    names = {i + shift: name for i, name in enumerate(('ground', *CLASSES))}
    write(root / 'data.yaml', f'format: masks\ntrain: images\nannotations: masks\nnames: {names}\n')


@pytest.mark.parametrize('shift', [0, 1])
def test_masks_have_the_iou_of_ioumetric(shift, evaluated, tmp_path):
    masks(tmp_path, shift)
    classes = ('ground', *CLASSES)
    model = FakeModel('labels', classes)
    metrics = evaluated(model, tmp_path)
    metric = IoUMetric(iou_metrics=['mIoU'])
    metric.dataset_meta = {'classes': classes}
    for scene in SCENES:
        truth = np.array(Image.open(tmp_path / f'masks/{scene.name}.png')).astype(int)
        truth = torch.from_numpy(np.where(truth == 255, 255, truth - shift))
        labels = torch.from_numpy(model.predicted(scene.pixels).labels)
        sample = dict(pred_sem_seg=dict(data=labels[None]), gt_sem_seg=dict(data=truth[None]))
        metric.process({}, [sample])
    expected = metric.evaluate(len(SCENES))
    assert 5 < metrics['mIoU'] < 90
    for name in ('mIoU', 'mAcc', 'aAcc'):
        assert round(metrics[name], 2) == pytest.approx(expected[name], abs=1e-9)


@pytest.mark.parametrize('kind', ['boxes', 'masks of objects', 'labels'])
def test_the_measure_of_summaries_is_that_of_the_page(kind, evaluated, tmp_path):
    """By which `cpvt quantize` decides."""
    if kind == 'labels':
        masks(tmp_path, 1)
        model, name = FakeModel('labels', ('ground', *CLASSES)), 'mIoU'
    else:
        objects(tmp_path, 'coco')
        model = FakeModel('detections', has_masks=kind != 'boxes')
        name = 'masks: AP' if model.has_masks else 'AP'
    metrics = evaluated(model, tmp_path)
    truth = read_truth(tmp_path, model.kind, model.classes, model.palette)
    found = {p: truth.summary(p, model.predicted(model.read(p))) for p in truth.images}
    assert truth.measure(found) == pytest.approx(metrics[name])
    first = truth.images[0]
    assert truth.measure({first: found[first]}) > 0


def trees(root: Path) -> None:
    """A photograph with what the example finds in it as its objects."""
    (root / 'images').mkdir(parents=True)
    photo = Image.open(ROOT / 'examples/trees/florida.jpg').crop((0, 0, 256, 256))
    photo.save(root / 'images/a.png')
    found = Predictor(TREES)(root / 'images/a.png')
    lines = []
    for x1, y1, x2, y2 in found.boxes / 256:
        lines.append(f'0 {(x1 + x2) / 2:.6f} {(y1 + y2) / 2:.6f} {x2 - x1:.6f} {y2 - y1:.6f}')
    write(root / 'labels/a.txt', '\n'.join(lines))
    write(root / 'classes.txt', 'tree')


def test_a_file_is_evaluated_and_a_page_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trees(Path('data'))
    assert command.main([str(TREES), 'data', '--report', 'page.html']) == 0
    said = capsys.readouterr().out.splitlines()
    assert 'data: the train data, 1 image' in said and said[-1] == 'page.html'
    assert any(line.split() == ['AP75', '100.00'] for line in said)
    page = Path('page.html').read_text()
    assert 'AP medium' in page and 'kinds of errors' in page
    assert command.main([str(TREES), 'data', '--report', 'page.html']) == 2


def test_the_options_of_a_model(tmp_path, monkeypatch, capsys):
    """Boxes below a threshold do not count, but for which all scores do."""
    monkeypatch.chdir(tmp_path)
    trees(Path('data'))
    found = []
    for options in ([], ['--score-thr', '0.6'], ['--shorter-side', '64']):
        assert command.main([str(TREES), 'data', *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if line.startswith('AP50 ')]
        found.append(float(line.split()[1]))
    assert found[0] > found[1] > 0 and found[0] > found[2]


def test_no_torch_and_no_openmmlab_is_needed(tmp_path):
    trees(tmp_path / 'data')
    program = (
        'import sys\nfrom cpvt_pyramid.app.commands.test import main\n'
        f'assert main([{str(TREES)!r}, {str(tmp_path / "data")!r}]) == 0\n'
        "assert not {'torch', 'mmengine', 'mmcv', 'mmdet'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, '-c', program], check=True, cwd=tmp_path)


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ([str(TREES), 'a', 'b'], 'one data.yaml or folder can be evaluated at a time'),
        ([str(TREES), 'nowhere'], 'no folder or file nowhere'),
        ([str(TREES), 'data', '--tta'], '--tta is for the test data of a config, without data'),
        (
            [str(TREES), 'data', '--split', 'val'],
            'data has no val data with annotations; it has train',
        ),
        (['my.py', 'my.pth', '--split', 'val'], '--split needs a data.yaml or a folder after the'),
        (['my.py', 'my.pth', '--batch-size', '2'], '--batch-size needs a data.yaml or a folder'),
        (['my.py', 'my.pth', '--shorter-side', '9'], '--shorter-side needs a data.yaml or a'),
        (['my.pth', '--report', 'a.html'], 'the following arguments are required'),
    ],
)
def test_mistakes(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path('my.py').write_text('model = dict()')
    fill(Path('data'), SCENES, 'images/{}.png', yolo, 'labels/{}.txt')
    write(Path('data/classes.txt'), '\n'.join(('tree', *CLASSES[1:])))
    try:
        status = command.main(words)
    except SystemExit as end:
        status = end.code
    assert status == 2 and message in capsys.readouterr().err
