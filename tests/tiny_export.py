"""Small models, padded batches and onnxruntime, for tests of exported detectors and segmentors."""

from collections.abc import Callable, Sequence
from typing import Optional

import torch
from mmengine.registry import MODELS
from ports import randomize
from torch import Tensor, nn

from cpvt_pyramid.export.base import Exportable
from cpvt_pyramid.export.onnx_file import capture, onnxruntime_runner, translate

TINY = dict(dims=[8, 16, 32, 32], heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2), depths=(1, 1, 1, 1))
SIZES = ((96, 128), (130, 70), (75, 190))  # one without padding to a multiple of 32


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


def check_in_onnxruntime(
    model: Exportable, compare: Callable[[dict[str, Tensor], dict[str, Tensor]], None]
) -> None:
    """Compare the results of each image, at sizes and in batches that the graph has not seen.

    Args:
        model: its backbone is replaced by `Patches`.
        compare: takes what was found in one image, and what is expected.
    """
    model.model.backbone = randomize(Patches(model.model.backbone), seed=2)
    graph = translate(capture(model), list(model.output_names))
    assert {node.domain for node in graph.graph.node} == {''}
    run = onnxruntime_runner(graph.SerializeToString())
    for sizes in (SIZES, ((61, 163),)):
        batch, valid, _ = padded(sizes)
        found = run({'images': batch.numpy(), 'valid': valid.numpy()})
        with torch.no_grad():
            expected = dict(zip(model.output_names, model(batch, valid)))
        assert found.keys() == expected.keys()
        for i in range(len(sizes)):
            compare(
                {name: torch.from_numpy(x[i]) for name, x in found.items()},
                {name: x[i] for name, x in expected.items()},
            )
