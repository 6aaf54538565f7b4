"""Backbones in onnxruntime and OpenVINO, as contestants of the benchmark.

Ours is the file of `cpvt_pyramid.export` without `valid`, one for all sizes. Models of other
libraries are exported the usual way, by `torch.onnx.export` for one size.
"""

import copy
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Optional

import numpy as np
import torch
from torch import Tensor, nn

from cpvt_pyramid import CPVTPyramid

RUNTIMES = ('onnxruntime', 'openvino', 'openvino_bf16')  # bf16: products in bfloat16
Session = Callable[[np.ndarray], list[np.ndarray]]


def in_runtimes(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model in each runtime, with a name for it."""
    export = lru_cache(maxsize=1)(partial(exported, model))
    preprocesses = isinstance(model, CPVTPyramid)
    for runtime in RUNTIMES:
        yield f'{name}_{runtime}', InRuntime(export, runtime, preprocesses)


class InRuntime(nn.Module):
    """A backbone that a runtime computes. The first image of a size exports and loads it.

    Args:
        export: called with the shape of the images, or None for a file for all sizes; returns the
            ONNX file.
        runtime: one of RUNTIMES.
        preprocesses: whether the file takes pixels, for all sizes, and normalizes them.
    """

    def __init__(
        self, export: Callable[[Optional[tuple[int, ...]]], bytes], runtime: str, preprocesses: bool
    ) -> None:
        super().__init__()
        self.load = lru_cache(maxsize=1)(
            lambda shape: open_file(export(None if preprocesses else shape), runtime)
        )
        self.preprocesses = preprocesses

    def forward(self, image: Tensor) -> list[Tensor]:
        session = self.load(tuple(image.shape))
        if self.preprocesses:
            from cpvt_pyramid.export.base import Preprocessing

            mean, std = (image.new_tensor(x).view(3, 1, 1) for x in Preprocessing()[:2])
            image = image * std + mean
        return [torch.from_numpy(x) for x in session(image.numpy())]


def exported(model: nn.Module, shape: Optional[tuple[int, ...]]) -> bytes:
    """The ONNX file of a backbone, for images of one shape; None: ours, for all sizes."""
    from cpvt_pyramid.export.models import exportable
    from cpvt_pyramid.export.onnx_file import OPSET, capture, translate

    if shape is None:
        graph = exportable(model)
        return translate(capture(graph, has_valid=False), graph.output_names).SerializeToString()
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, 'fused_attn'):  # timm's windows are 5-D, which has no translation
            module.fused_attn = False
    with torch.no_grad():
        program = torch.onnx.export(
            model, (torch.randn(shape),), opset_version=OPSET, dynamo=True, verbose=False
        )
    return program.model_proto.SerializeToString()


def open_file(file: bytes, runtime: str) -> Session:
    """An ONNX file in a runtime, with as many threads as torch has."""
    threads = torch.get_num_threads()
    if runtime == 'onnxruntime':
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # Between its turns it must not take time from the others.
        options.add_session_config_entry('session.force_spinning_stop', '1')
        session = onnxruntime.InferenceSession(file, options, ['CPUExecutionProvider'])
        (value,) = session.get_inputs()
        return lambda image: session.run(None, {value.name: image})
    import openvino

    model = openvino.Core().compile_model(
        openvino.Core().read_model(file),
        'CPU',
        {
            'INFERENCE_PRECISION_HINT': 'bf16' if runtime == 'openvino_bf16' else 'f32',
            'INFERENCE_NUM_THREADS': threads,
        },
    )
    # Its results are views of memory that the next call overwrites.
    return lambda image: [np.array(x) for x in model([image]).values()]
