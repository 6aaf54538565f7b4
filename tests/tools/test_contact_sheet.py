import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import load_tool
from tiny_mm import DIGITS

from cpvt_pyramid.results import drawing
from cpvt_pyramid.results.drawing import draw_boxes, draw_segmentation

contact_sheet = load_tool('demo/contact_sheet')


def count(picture: Image.Image, color: tuple) -> int:
    return int((np.array(picture) == color).all(-1).sum())


@pytest.fixture(params=['detector', 'segmentor'])
def kind(request) -> str:
    return request.param


def contains(sheet: Image.Image, picture: Image.Image) -> bool:
    """Whether the picture is somewhere on the sheet, unchanged."""
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


def test_sheet_has_truth_and_prediction(kind, untrained, sample_dataset, tmp_path, monkeypatch):
    """The ground truth is read by other code; the prediction is made up."""
    real, indices = contact_sheet.predicted, []

    def made_up(dataset, model, index: int):
        sample = real(dataset, model, index)  # the real model runs
        indices.append(index)
        height, width = sample.ori_shape
        if kind == 'detector':
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
    arguments = [*untrained[kind], '--out', str(out), '--images', '3']
    assert contact_sheet.main(arguments) == 0
    assert indices == [0, 2, 3]  # evenly from four
    sheet = Image.open(out)
    assert sheet.width == 2 * contact_sheet.CELL + 7 * contact_sheet.GAP

    if kind == 'detector':
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
        # The score of 0.2 is too low.
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
    assert contains(sheet, truth) and contains(sheet, found)
    assert not contains(sheet, Image.fromarray(image))


def test_mistakes(kind, untrained, tmp_path, capsys) -> None:
    config, checkpoint = untrained[kind]
    gone = tmp_path / 'gone.py'
    dataset = "dataset=dict(data_root='/nowhere')"
    gone.write_text(f"_base_ = '{config}'\nval_dataloader = dict({dataset})")
    out = ['--out', str(tmp_path / 'x.png')]
    for arguments, words in [
        (['/nowhere.py', checkpoint, *out], 'no config'),
        ([config, '/nowhere.pth', *out], 'no checkpoint'),
        ([config, config, *out], 'checkpoint'),
        ([config, checkpoint, *out, '--images', '0'], 'at least 1'),
        ([config, checkpoint, '--out', tmp_path / 'nowhere' / 'x.png'], 'no such folder'),
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
