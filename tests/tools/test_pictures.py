"""What is drawn: boxes, segments, contact sheets, curves."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import load_tool

from cpvt_pyramid.runner import drawing
from cpvt_pyramid.runner.drawing import draw_boxes, draw_segmentation

CLASSES = ('zero', 'one', 'two', 'three')
GREY = np.full((100, 200, 3), 128, np.uint8)


plot_curves, contact_sheet = load_tool('demo/curves'), load_tool('demo/contact_sheet')


def count(picture: Image.Image, color: tuple) -> int:
    return int((np.array(picture) == color).all(-1).sum())


# ---- drawing


def test_palette_is_distinct_and_grows() -> None:
    palette = drawing.distinct_palette(300)
    assert drawing.distinct_palette(7) == palette[:7] and len(set(palette)) == 256
    lab = drawing._oklab(np.array(palette[:20]))
    apart = np.linalg.norm(lab[:, None] - lab, axis=-1) + np.eye(20)
    assert apart.min() > 0.1  # a just noticeable difference is about 0.02


def test_oklab_of_known_colours() -> None:
    lab = drawing._oklab(np.array([[255, 255, 255], [255, 0, 0], [0, 0, 0]]))
    known = [[1, 0, 0], [0.62796, 0.22486, 0.12585], [0, 0, 0]]  # published with OKLab
    np.testing.assert_allclose(lab, known, atol=1e-4)


def test_class_palette() -> None:
    distinct = drawing.distinct_palette(2)
    assert drawing.class_palette(['background', 'a', 'b']) == [(0, 0, 0), *distinct]
    assert drawing.class_palette(['a', 'b'], [[1, 2, 3], [4, 5, 6]]) == [(1, 2, 3), (4, 5, 6)]
    for of_other_classes in ('random', [[1, 2, 3]] * 80):
        assert drawing.class_palette(['a', 'b'], of_other_classes) == distinct


def test_box_is_where_it_was_found() -> None:
    picture = draw_boxes(GREY, [[50, 40, 90, 80]], [2], None, CLASSES)
    color = drawing.distinct_palette(3)[2]
    assert picture.size == (400, 200)  # small: twice as large
    seen = np.array(picture)
    for x, y in ((100, 120), (180, 120), (140, 81), (140, 160)):  # left, right, top, bottom
        assert tuple(seen[y, x]) == color
    assert tuple(seen[120, 140]) == (128,) * 3  # inside it nothing is hidden
    rows, columns = np.nonzero((seen == color).all(-1))
    assert (columns.min(), columns.max(), rows.max()) == (100, 180, 160)
    assert 60 <= rows.min() < 80  # the name stands on top


def test_boxes_outside_empty_or_unnamed_are_no_trouble() -> None:
    boxes = [[-50, -50, 30, 30], [190, 90, 500, 500], [300, 300, 400, 400], [10, 10, 10, 10]]
    draw_boxes(GREY, boxes, [0, 1, 2, 99], torch.rand(4), CLASSES)
    picture = draw_boxes(GREY, np.zeros((0, 4)), [], [], CLASSES)
    assert count(picture, (128, 128, 128)) == 400 * 200
    with pytest.raises(ValueError, match='2 boxes'):
        draw_boxes(GREY, boxes[:2], [0], None, CLASSES)
    with pytest.raises(ValueError, match='uint8'):
        draw_boxes(GREY / 255, boxes[:2], [0, 1], None, CLASSES)


def test_most_certain_box_is_on_top() -> None:
    first, second = drawing.distinct_palette(2)
    for scores, on_top in (([0.9, 0.4], first), ([0.4, 0.9], second)):
        picture = draw_boxes(GREY, [[20, 40, 120, 90]] * 2, [0, 1], scores, CLASSES)
        assert picture.getpixel((140, 180)) == on_top  # on the lower edge


def test_names_stay_inside_and_clear_of_each_other() -> None:
    frame, size, picture = (100, 100, 200, 200), (40, 16), (400, 300)
    taken = []
    for _ in range(8):  # as many as a frame has room for
        x1, y1, x2, y2 = drawing._free_place(frame, size, picture, taken)
        assert all(x2 <= a or x1 >= c or y2 <= b or y1 >= d for a, b, c, d in taken)
        taken.append((x1, y1, x2, y2))
    assert taken[0] == (100, 84, 140, 100)  # the first stands on its frame
    x1, y1, x2, y2 = drawing._free_place((390, 0, 399, 299), size, picture, [])
    assert x1 >= 0 and y1 >= 0 and x2 <= 400 and y2 <= 300


def test_segments_are_tinted_and_the_rest_is_not() -> None:
    label_map = np.zeros((100, 200), int)
    label_map[20:60, 30:90] = 2
    label_map[:10] = 255
    classes, red, blue = ['background', 'red', 'blue'], (250, 0, 0), (0, 0, 250)
    palette = [(0, 250, 0), red, blue]
    picture = draw_segmentation(GREY, label_map, classes, palette, legend=False)
    assert picture.size == (400, 200)
    seen = np.array(picture)
    tinted = seen[..., 2].astype(int) - seen[..., 0] > 100
    np.testing.assert_array_equal(tinted, (label_map == 2).repeat(2, 0).repeat(2, 1))
    assert (seen[~tinted] == 128).all()

    with_legend = draw_segmentation(GREY, label_map, classes, palette)
    assert with_legend.height > 200 and with_legend.crop((0, 0, 400, 200)) == picture
    legend = with_legend.crop((0, 200, 400, with_legend.height))
    assert count(legend, blue) > 100 and count(legend, red) == 0  # red is not in the image
    nothing = draw_segmentation(GREY, label_map * 0, classes, palette)
    assert nothing.size == (400, 200)
    with pytest.raises(ValueError, match=r'\(3, 3\)'):
        draw_segmentation(GREY, np.zeros((3, 3)), classes)


def test_legend_breaks_into_rows() -> None:
    names, colors = ['class'] * 20, drawing.distinct_palette(20)
    strip = drawing.draw_legend(names, colors, 300, 14)
    assert strip.width == 300 and strip.height > 100
    assert all(count(strip, color) > 50 for color in colors)


# ---- curves


def write_log(folder: Path, records: list[dict], tail: str = '') -> None:
    (folder / 'vis_data').mkdir(parents=True)
    lines = ''.join(json.dumps(record) + '\n' for record in records)
    (folder / 'vis_data' / 'scalars.json').write_text(lines + tail)


def train_record(step: int, loss: float = 1.0, **more: float) -> dict:
    return {'lr': 0.1, 'loss': loss, 'loss_cls': loss / 3, 'time': 0.5, 'step': step, **more}


def epochs(first: int, last: int, length: int, interval: int, loss: float = 1.0) -> list[dict]:
    """As mmengine logs: every `interval` iterations of an epoch; the validation by the epoch."""
    records = []
    for epoch in range(first, last + 1):
        for i in range(interval, length + 1, interval):
            step = (epoch - 1) * length + i
            records.append(train_record(step, loss, epoch=epoch, iter=step))
        records.append({'coco/bbox_mAP': epoch / 100, 'time': 1.0, 'step': epoch})
    return records


def test_epochs_become_iterations(tmp_path) -> None:
    write_log(tmp_path / '20260101_000000', epochs(1, 4, 77, 10))
    curves = plot_curves.read_curves(tmp_path)
    assert curves.epoch_length == 77 and not curves.resumed
    assert curves.metrics == {'coco/bbox_mAP': {77: 0.01, 154: 0.02, 231: 0.03, 308: 0.04}}
    assert sorted(curves.losses) == ['loss', 'loss_cls'] and len(curves.losses['loss']) == 28


def test_iterations_stay_iterations(tmp_path) -> None:
    records = [train_record(step, iter=step) for step in range(50, 201, 50)]
    records.insert(2, {'mIoU': 20.0, 'step': 100})
    records.append({'mIoU': 30.0, 'step': 0})  # where nobody counts epochs, mmengine may say 0
    write_log(tmp_path / '20260101_000000', records)
    curves = plot_curves.read_curves(tmp_path)
    assert curves.epoch_length is None and curves.metrics == {'mIoU': {100: 20.0, 200: 30.0}}


def test_resumed_training_is_one_curve(tmp_path) -> None:
    # Killed in epoch 4, with checkpoints up to epoch 2; resumed with another loss.
    killed = epochs(1, 3, 50, 10) + [train_record(s, epoch=4, iter=s) for s in (160, 170)]
    write_log(tmp_path / '20260101_000000', killed, tail='{"lr": 0.1, "lo')
    write_log(tmp_path / '20260101_010000', epochs(3, 3, 50, 10, loss=2.0))
    write_log(tmp_path / '20260101_020000', [])  # began and was stopped at once
    curves = plot_curves.read_curves(tmp_path)
    assert curves.resumed == [110] and curves.epoch_length == 50
    assert curves.losses['loss'] == {s: 1.0 if s <= 100 else 2.0 for s in range(10, 151, 10)}
    assert list(curves.metrics['coco/bbox_mAP']) == [50, 100, 150]


@pytest.mark.parametrize('by_epoch', [True, False])
def test_logs_of_mmengine_itself(tmp_path, monkeypatch, by_epoch: bool) -> None:
    from mmengine.evaluator import BaseMetric
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, inputs, data_samples=None, mode: str = 'tensor'):
            return {'loss': (self.weight**2).sum()} if mode == 'loss' else [{}]

    validated = []

    class Metric(BaseMetric):
        def process(self, data_batch, data_samples) -> None:
            self.results.append(0)

        def compute_metrics(self, results: list) -> dict:
            validated.append(runner.iter)
            return {'mIoU': float(runner.iter)}

    loader = {
        'batch_size': 1, 'num_workers': 0, 'dataset': [{'inputs': torch.zeros(1)}] * 10,
        'sampler': {'type': 'DefaultSampler', 'shuffle': False},
    }  # fmt: skip
    loop = {'max_epochs': 4, 'val_interval': 2} if by_epoch else {'max_iters': 9, 'val_interval': 4}
    # A look at the compilers of this machine, which takes seconds.
    monkeypatch.setattr('mmengine.runner.runner.collect_env', dict)
    runner = Runner(
        Model(), str(tmp_path / 'run'), loader, loader,
        train_cfg={'by_epoch': by_epoch, **loop}, val_cfg={}, val_evaluator=[Metric()],
        optim_wrapper={'optimizer': {'type': 'SGD', 'lr': 0.01}},
        default_hooks={
            'logger': {'type': 'LoggerHook', 'interval': 2, 'log_metric_by_epoch': by_epoch},
            'checkpoint': None,
        },
        log_processor={'by_epoch': by_epoch}, default_scope='mmengine', log_level='ERROR',
        experiment_name=f'curves_{by_epoch}',
    )  # fmt: skip
    runner.train()
    curves = plot_curves.read_curves(tmp_path / 'run')
    assert validated == ([20, 40] if by_epoch else [4, 8, 9])
    assert curves.metrics['mIoU'] == {i: float(i) for i in validated}


def test_curves_are_drawn(tmp_path, capsys) -> None:
    folder = tmp_path / '20260101_000000'
    write_log(folder, [train_record(10, math.nan), train_record(20), train_record(30, 0.5)])
    assert plot_curves.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / 'curves.png')
    alone = Image.open(tmp_path / 'curves.png').size
    (folder / 'vis_data' / 'scalars.json').unlink()
    (folder / 'vis_data').rmdir()
    write_log(folder, epochs(1, 3, 20, 5))
    out = tmp_path / 'both.jpg'
    assert plot_curves.main([str(tmp_path), '--out', str(out)]) == 0
    both = Image.open(out)
    assert both.size[0] == alone[0] and both.size[1] > 1.5 * alone[1]  # a second panel
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, 'both.jpg', 'curves.png']


def test_picture_that_cannot_be_finished_leaves_the_old_one(tmp_path, capsys, monkeypatch) -> None:
    def full(*paths: Path) -> None:
        raise OSError(28, 'No space left on device')

    write_log(tmp_path / '20260101_000000', epochs(1, 2, 20, 5))
    (tmp_path / 'curves.png').write_text('old')
    before = sorted(tmp_path.rglob('*'))
    monkeypatch.setattr(plot_curves.os, 'replace', full)
    assert plot_curves.main([str(tmp_path)]) == 2
    assert 'No space left' in capsys.readouterr().err
    assert sorted(tmp_path.rglob('*')) == before and (tmp_path / 'curves.png').read_text() == 'old'


def test_smoothing() -> None:
    assert plot_curves.smoothed([1, 2, 6, 3], 1) == [1.5, 3, 11 / 3, 4.5]
    assert plot_curves.smoothed([1, math.nan, 3], 1) == [1, 2, 3]
    assert plot_curves.smoothed([5], 0) == [5]


@pytest.mark.parametrize('mistake', ['no folder', 'no training', 'no such', "Format 'xyz'"])
def test_mistakes_about_curves(tmp_path, capsys, mistake: str) -> None:
    work_dir, out = tmp_path / 'work', tmp_path / 'curves.png'
    if mistake != 'no folder':
        records = [] if mistake == 'no training' else epochs(1, 1, 20, 5)
        write_log(work_dir / '20260101_000000', records)
    if mistake == 'no such':
        out = tmp_path / 'nowhere' / 'curves.png'
    if mistake == "Format 'xyz'":
        out = tmp_path / 'curves.xyz'
    before = sorted(tmp_path.rglob('*'))
    assert plot_curves.main([str(work_dir), '--out', str(out)]) == 2
    line = capsys.readouterr().err
    assert line.startswith('plot_curves: ') and line.count('\n') == 1
    assert mistake.lower() in line.lower()
    assert sorted(tmp_path.rglob('*')) == before


# ---- contact sheets

DIGITS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
DETECTION = """
custom_imports = dict(imports=['cpvt_pyramid.mm'])
default_scope = 'mmdet'
model = dict(
    type='RetinaNet',
    data_preprocessor=dict(type='DetDataPreprocessor', pad_size_divisor=32),
    backbone=dict(type='CPVTPyramid', arch='pcpvt_nano'),
    neck=dict(type='FPN', in_channels=[32, 64, 128, 192], out_channels=8, num_outs=4),
    bbox_head=dict(
        type='RetinaHead', num_classes=10, in_channels=8, stacked_convs=0, feat_channels=8,
        anchor_generator=dict(
            type='AnchorGenerator', ratios=[1.0], scales=[4], strides=[4, 8, 16, 32]),
        bbox_coder=dict(type='DeltaXYWHBBoxCoder')),
    test_cfg=dict(nms_pre=50, score_thr=0.0, nms=dict(type='nms', iou_threshold=0.5),
                  max_per_img=5))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CocoDataset', data_root=r'{root}/coco', test_mode=True,
        ann_file='annotations/instances_val2017.json', data_prefix=dict(img='val2017/'),
        metainfo=dict(classes={digits}),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='Resize', scale=(96, 96), keep_ratio=True),
            dict(type='LoadAnnotations', with_bbox=True),
            dict(type='PackDetInputs')]))
"""
SEGMENTATION = """
custom_imports = dict(imports=['cpvt_pyramid.mm'])
default_scope = 'mmseg'
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor', size_divisor=32, test_cfg=dict(size_divisor=32)),
    backbone=dict(type='CPVTPyramid', arch='pcpvt_nano'),
    neck=dict(type='FPN', in_channels=[32, 64, 128, 192], out_channels=8, num_outs=4),
    decode_head=dict(
        type='FPNHead', in_channels=[8] * 4, in_index=[0, 1, 2, 3],
        feature_strides=[4, 8, 16, 32], channels=8, num_classes=11),
    test_cfg=dict(mode='whole'))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='BaseSegDataset', data_root=r'{root}/ade/ADEChallengeData2016',
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
        img_suffix='.jpg', reduce_zero_label=True,
        metainfo=dict(classes=('background', *{digits})),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='Resize', scale=(96, 96), keep_ratio=True),
            dict(type='LoadAnnotations', reduce_zero_label=True),
            dict(type='PackSegInputs')]))
"""


@pytest.fixture(scope='module', params=['mmdet', 'mmseg'])
def trained(request, sample_dataset, tmp_path_factory) -> tuple[str, Path, Path]:
    """A scope, a config and the checkpoint of a model with weights at random."""
    from cpvt_pyramid.runner.launch import build_model, load_config

    folder = tmp_path_factory.mktemp(request.param)
    text = {'mmdet': DETECTION, 'mmseg': SEGMENTATION}[request.param]
    config, checkpoint = folder / 'tiny.py', folder / 'epoch_1.pth'
    config.write_text(text.replace('{root}', str(sample_dataset)).replace('{digits}', str(DIGITS)))
    model = build_model(load_config(config), 'cpu')
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, checkpoint)
    return request.param, config, checkpoint


def cell(sheet: Image.Image, picture: Image.Image) -> bool:
    """Whether the picture is somewhere on the sheet as it is."""
    inside, part = np.array(sheet), np.array(picture)
    height, width = part.shape[:2]
    for y, x in zip(*np.nonzero((inside[: -height + 1, : -width + 1] == part[0, 0]).all(-1))):
        if (inside[y : y + height, x : x + width] == part).all():
            return True
    return False


def on_sheet(path: Path) -> tuple[np.ndarray, float]:
    image = Image.open(path).convert('RGB')
    factor = contact_sheet.CELL / max(image.size)
    size = [round(side * factor) for side in image.size]
    return np.array(image.resize(size, Image.Resampling.LANCZOS)), factor


def test_contact_sheet_holds_truth_and_prediction(trained, sample_dataset, tmp_path, monkeypatch):
    """Whose truth is read from the files by other code, and whose prediction is made up."""
    scope, config, checkpoint = trained
    real, indices = contact_sheet.predicted, []

    def made_up(dataset, model, index: int):
        sample = real(dataset, model, index)  # the real model runs
        indices.append(index)
        height, width = sample.ori_shape
        if scope == 'mmdet':
            assert 0 < sample.pred_instances.bboxes.max() <= max(height, width)
            sample.pred_instances = type(sample.pred_instances)(
                bboxes=torch.tensor([[9.0, 9, 60, 70], [0, 0, 30, 30]]),
                labels=torch.tensor([3, 5]), scores=torch.tensor([0.8, 0.2]),
            )  # fmt: skip
        else:
            assert sample.pred_sem_seg.data.shape == (1, height, width)
            sample.pred_sem_seg.data = torch.zeros(1, height, width, dtype=torch.long)
            sample.pred_sem_seg.data[:, : height // 2] = 8
        return sample

    def spied_legend(names: list, *others: object) -> Image.Image:
        legend.extend(names)
        return draw_legend(names, *others)

    legend, draw_legend = [], drawing.draw_legend
    monkeypatch.setattr(drawing, 'draw_legend', spied_legend)
    monkeypatch.setattr(contact_sheet, 'predicted', made_up)
    out = tmp_path / 'sheet.png'
    arguments = [str(config), str(checkpoint), '--out', str(out), '--images', '3']
    assert contact_sheet.main(arguments) == 0
    assert indices == [0, 2, 3]  # evenly from four
    sheet = Image.open(out)
    assert sheet.width == 2 * contact_sheet.CELL + 7 * contact_sheet.GAP

    if scope == 'mmdet':
        folder = sample_dataset / 'coco'
        coco = json.loads((folder / 'annotations' / 'instances_val2017.json').read_text())
        entry = coco['images'][indices[1]]
        image, factor = on_sheet(folder / 'val2017' / entry['file_name'])
        names = {c['id']: c['name'] for c in coco['categories']}
        truth = [a for a in coco['annotations'] if a['image_id'] == entry['id']]
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (a['bbox'] for a in truth)]
        labels = [DIGITS.index(names[a['category_id']]) for a in truth]
        boxes = np.array(boxes) * factor
        truth = draw_boxes(image, boxes, labels, None, DIGITS, None, 1)
        # What scores 0.2 is not shown.
        found = draw_boxes(image, factor * np.array([[9, 9, 60, 70]]), [3], [0.8], DIGITS, None, 1)
    else:
        folder = sample_dataset / 'ade' / 'ADEChallengeData2016'
        path = sorted((folder / 'annotations' / 'validation').iterdir())[indices[1]]
        image, _ = on_sheet(folder / 'images' / 'validation' / f'{path.stem}.jpg')
        classes = ('background', *DIGITS)
        label_map = Image.fromarray(np.array(Image.open(path)).astype(np.int32) - 1)
        label_map = np.array(label_map.resize(image.shape[1::-1], Image.Resampling.NEAREST))
        truth = draw_segmentation(image, label_map, classes, None, False, 1)
        height, width = Image.open(path).height, image.shape[1]
        half = np.zeros((height, width), np.int32)
        half[: height // 2] = 8
        half = Image.fromarray(half).resize(image.shape[1::-1], Image.Resampling.NEAREST)
        found = draw_segmentation(image, np.array(half), classes, None, False, 1)
        paths = [sorted(path.parent.iterdir())[i] for i in indices]
        present = {i - 1 for p in paths for i in np.unique(Image.open(p))} | {8}
        assert legend == [name for i, name in enumerate(classes) if i in present - {0}]
    assert cell(sheet, truth) and cell(sheet, found)
    assert not cell(sheet, Image.fromarray(image))


def test_mistakes_about_contact_sheets(trained, tmp_path, capsys) -> None:
    _, config, checkpoint = trained
    gone = tmp_path / 'gone.py'
    gone.write_text(config.read_text().replace("data_root=r'", "data_root=r'/nowhere"))
    out = ['--out', str(tmp_path / 'x.png')]
    for arguments, words in [
        (['/nowhere.py', checkpoint, *out], 'no config'),
        ([config, '/nowhere.pth', *out], 'no checkpoint'),
        ([config, config, *out], 'checkpoint'),
        ([config, checkpoint, *out, '--images', '0'], 'at least 1'),
        ([config, checkpoint, '--out', tmp_path / 'nowhere' / 'x.png'], 'no folder'),
        ([config, checkpoint, '--out', tmp_path], 'a folder'),
        ([config, checkpoint, '--out', tmp_path / 'x.xyz'], '.xyz'),
        ([gone, checkpoint, *out], '/nowhere'),
    ]:
        assert contact_sheet.main([str(a) for a in arguments]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith('contact_sheet: ') and words in line
    assert sorted(tmp_path.iterdir()) == [gone]


def test_sheets_of_any_number_and_shape() -> None:
    wide, tall = Image.new('RGB', (380, 40), 'red'), Image.new('RGB', (40, 380), 'blue')
    for n, across in ((1, 1), (5, 2), (13, 3)):
        sheet = contact_sheet.lay_out([(wide, tall)] * n, 'title', {})
        assert count(sheet, (255, 0, 0)) == count(sheet, (0, 0, 255)) == n * 380 * 40
        assert sheet.width // (2 * contact_sheet.CELL) == across
