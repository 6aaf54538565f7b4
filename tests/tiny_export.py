"""Padded batches and graphs, for tests of exported detectors and segmentors."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Optional

import onnx
import torch
from models.ports import randomize
from torch import Tensor, nn

from cpvt_pyramid.export.base import Exportable
from cpvt_pyramid.export.files import CPU
from cpvt_pyramid.export.onnx_file import capture, translate
from cpvt_pyramid.runtime.sessions import OnnxRuntime, OpenVino

SIZES = ((96, 128), (130, 70), (75, 190))  # one without padding to a multiple of 32
BATCHES = SIZES, ((67, 163),)  # PyTorch refuses maps of one row, at 64 pixels

Outputs = dict[str, Tensor]
Compare = Callable[[Outputs, Outputs], None]  # takes what was found in one image, and the expected


def padded(sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A batch of images of these sizes, its `valid`, and each image alone."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *s), generator=generator).float() for s in sizes]
    batch = torch.zeros(len(sizes), 3, *map(max, zip(*sizes)))
    for row, image in zip(batch, images):
        row[:, : image.shape[1], : image.shape[2]] = image
    return batch, torch.tensor(sizes), [image[None] for image in images]


def outputs_for(model: Exportable, i: int, outputs: Sequence[Tensor]) -> Outputs:
    return {name: x[i] for name, x in zip(model.output_names, outputs)}


def assert_each_alone(
    model: Exportable, compare: Compare, sizes: Sequence[tuple[int, int]] = SIZES
) -> None:
    """Compare the outputs for each image, in a padded batch and alone, with those of the original
    model for it alone."""
    images, valid, alone = padded(sizes)
    with torch.no_grad():
        together = model.eval()(images, valid)
        for i, image in enumerate(alone):
            expected = {name: x[0] for name, x in model.reference(image).items()}
            compare(outputs_for(model, i, together), expected)
            compare(outputs_for(model, 0, model(image)), expected)


class Patches(nn.Module):
    """Takes the place of a backbone, with maps of its shapes. It is captured in no time, and the
    backbone's own graphs are tested elsewhere."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.channels, self.strides = backbone.channels, backbone.strides
        self.convs = nn.ModuleList(
            nn.Conv2d(3, dim, stride, stride) for dim, stride in zip(self.channels, self.strides)
        )

    def forward(self, x: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        return tuple(conv(x) for conv in self.convs)


def assert_graphs(model: Exportable, compare: Compare, in_onnx: bool) -> None:
    """Compare PyTorch's graph, or ONNX's in two runtimes, with the model at sizes that it has not
    seen. The backbone is replaced by `Patches`."""
    model.eval().model.backbone = randomize(Patches(model.model.backbone), seed=2)
    program = capture(model)
    if not in_onnx:
        assert_graph(program.module(check_guards=False), model, compare)  # see `capture`
        return
    graph_file = translate(program, model.output_names)
    assert {node.domain for node in graph_file.graph.node} == {''}
    with TemporaryDirectory() as folder:
        path = Path(folder, 'model.onnx')
        onnx.save(graph_file, path)
        for session in (OnnxRuntime(path, CPU), OpenVino(path)):

            def graph(images: Tensor, valid: Tensor, run: Callable = session.run) -> list[Tensor]:
                found = run({'images': images.numpy(), 'valid': valid.numpy()})
                return [torch.from_numpy(found[name]) for name in model.output_names]

            assert_graph(graph, model, compare)


def assert_graph(graph: Callable, model: Exportable, compare: Compare) -> None:
    for sizes in BATCHES:
        images, valid, _ = padded(sizes)
        with torch.no_grad():
            found, expected = graph(images, valid), model(images, valid)
        for i in range(len(sizes)):
            compare(outputs_for(model, i, found), outputs_for(model, i, expected))
