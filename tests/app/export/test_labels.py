"""Label maps from scores at the size of a map (cpvt_pyramid/app/export/labels.py)."""

from pathlib import Path

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from cpvt_pyramid.app.export.files import CPU
from cpvt_pyramid.app.export.labels import resized_labels
from cpvt_pyramid.app.export.onnx_file import translate
from cpvt_pyramid.app.export.resizing import resample, resize_weights
from cpvt_pyramid.app.predict.pytorch.possible_classes import possible_classes
from cpvt_pyramid.app.predict.sessions import OnnxRuntime, OpenVino


def example(classes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Two maps, 5 x 7 and 6 x 4 cells with arbitrary values around them, and their weights."""
    torch.manual_seed(seed)
    scores = torch.randn(2, classes, 6, 7) + 2 * torch.randn(2, classes, 1, 1)
    scores[0, :, 5] = 50 * torch.randn(classes, 7)
    scores[1, :, :, 4:] = 50 * torch.randn(classes, 6, 3)
    rows = resize_weights(torch.tensor([5, 6]), 6, torch.tensor([33, 20]), 33)
    return scores, rows, resize_weights(torch.tensor([7, 4]), 7, torch.tensor([40, 11]), 40)


class Labels(nn.Module):
    def forward(self, scores: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return resized_labels(scores, rows, columns)


def test_equals_the_best_of_all_classes_also_in_the_runtimes(tmp_path: Path):
    sizes = tuple(dict.fromkeys(axes, Dim.DYNAMIC) for axes in ((0, 2, 3), (0, 1, 2), (0, 1, 2)))
    program = torch.export.export(Labels(), example(20), dynamic_shapes=sizes, strict=False)
    path = tmp_path / 'labels.onnx'
    onnx.save(translate(program, ['labels']), path)
    sessions = [OnnxRuntime(path, CPU), OpenVino(path)]
    names = ['scores', 'rows', 'columns']
    for seed in range(20):
        scores, rows, columns = given = example(300 if seed == 7 else 20, seed)
        expected = resample(rows, scores, columns).argmax(1)
        found = resized_labels(*given)
        assert found.dtype == (torch.int32 if seed == 7 else torch.uint8)
        assert torch.equal(found.long(), expected)
        if seed == 7:
            continue
        count = 1 if seed == 3 else 2
        inputs = {name: x[:count].numpy() for name, x in zip(names, given)}
        for session in sessions:
            labels = session.run(inputs)['labels']
            assert labels.dtype == 'uint8'
            assert torch.equal(torch.from_numpy(labels).long(), expected[:count])


def test_classes_that_are_best_nowhere_are_left_out():
    scores = example(40)[0][:, :, :5, :4]
    assert (possible_classes(scores).sum(1) < 35).all()
