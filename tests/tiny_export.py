"""Small models, padded batches and runtimes, for tests of exported detectors and segmentors."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Optional

import onnx
import pytest
import torch
from mmengine.registry import MODELS
from models.ports import randomize
from torch import Tensor, nn

from cpvt_pyramid.export.base import Exportable
from cpvt_pyramid.export.files import CPU
from cpvt_pyramid.export.onnx_file import capture, translate
from cpvt_pyramid.export.verification import Runner
from cpvt_pyramid.runtime.sessions import OnnxRuntime, OpenVino

TINY = dict(dims=[8, 16, 32, 32], heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2), depths=(1, 1, 1, 1))
SIZES = ((96, 128), (130, 70), (75, 190))  # one without padding to a multiple of 32
BATCHES = SIZES, ((67, 163),)  # PyTorch refuses maps of one row, at 64 pixels


def built(config: dict) -> nn.Module:
    """A model with random weights."""
    return randomize(MODELS.build(config), seed=1).eval()


def padded(sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A batch of images of these sizes, its `valid`, and each image alone."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *s), generator=generator).float() for s in sizes]
    batch = torch.zeros(len(sizes), 3, *map(max, zip(*sizes)))
    for row, image in zip(batch, images):
        row[:, : image.shape[1], : image.shape[2]] = image
    return batch, torch.tensor(sizes), [image[None] for image in images]


def assert_each_alone(
    model: Exportable,
    batch: tuple[Tensor, Tensor, list[Tensor]],
    compare: Callable[[dict[str, Tensor], dict[str, Tensor]], None],
) -> None:
    """Compare the outputs for each image of a padded batch with the original model's for it alone.

    Args:
        model: the exportable model.
        batch: see `padded`.
        compare: takes what was found in one image, and what is expected.
    """
    images, valid, alone = batch
    with torch.no_grad():
        together = dict(zip(model.output_names, model.eval()(images, valid)))
        for i, image in enumerate(alone):
            expected = {name: x[0] for name, x in model.reference(image).items()}
            compare({name: x[i] for name, x in together.items()}, expected)


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


def check_graph(
    model: Exportable, compare: Callable[[dict[str, Tensor], dict[str, Tensor]], None]
) -> None:
    """Compare PyTorch's graph at sizes that it has not seen.

    Args:
        model: its backbone is replaced by `Patches`.
        compare: takes what was found in one image, and what is expected.
    """
    model.model.backbone = randomize(Patches(model.model.backbone), seed=2)
    graph = capture(model).module(check_guards=False)  # of maps of one cell, see `capture`
    for sizes in BATCHES:
        check(model, graph, sizes, compare)


def check_onnx(
    model: Exportable, compare: Callable[[dict[str, Tensor], dict[str, Tensor]], None]
) -> None:
    """Compare ONNX's graph in two runtimes at sizes that it has not seen; see `check_graph`."""
    model.model.backbone = randomize(Patches(model.model.backbone), seed=2)
    graph_file = translate(capture(model), model.output_names)
    assert {node.domain for node in graph_file.graph.node} == {''}
    with TemporaryDirectory() as folder:
        path = Path(folder, 'model.onnx')
        onnx.save(graph_file, path)
        for run in (OnnxRuntime(path, CPU).run, OpenVino(path).run):

            def graph(images: Tensor, valid: Tensor, run: Runner = run) -> list[Tensor]:
                found = run({'images': images.numpy(), 'valid': valid.numpy()})
                return [torch.from_numpy(found[name]) for name in model.output_names]

            for sizes in BATCHES:
                check(model, graph, sizes, compare)


def check(
    model: Exportable,
    graph: Callable,
    sizes: Sequence[tuple[int, int]],
    compare: Callable[[dict[str, Tensor], dict[str, Tensor]], None],
) -> None:
    """Compare the graph's results for each image of a batch with the model's."""
    batch, valid, _ = padded(sizes)
    with torch.no_grad():
        found, expected = graph(batch, valid), model(batch, valid)
    for i in range(len(sizes)):
        compare(
            dict(zip(model.output_names, (x[i] for x in found))),
            dict(zip(model.output_names, (x[i] for x in expected))),
        )


# A translation to ONNX takes half a minute of a core: `make test-foreign`.
CHECKS = pytest.mark.parametrize(
    'check', [check_graph, pytest.param(check_onnx, marks=pytest.mark.foreign)]
)
