"""Opening a model file in onnxruntime or OpenVINO."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional, Protocol, Union

import numpy as np

from ..tooling.command import UserError, one_line, send_no_telemetry

KEY = 'cpvt_pyramid'  # of the metadata
NAMES = {'images', 'valid', 'boxes', 'scores', 'labels', 'masks', 'probabilities'}


class Session(Protocol):
    """A model file, ready to run.

    Attributes:
        metadata: what the exporter wrote, JSON text; None if the file has none.
        names: of the outputs.
        shapes: the shape of each input, by name; None for a dimension of any length.
    """

    metadata: Optional[str]
    names: list[str]
    shapes: dict[str, list[Optional[int]]]

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]: ...


class OnnxRuntime:
    """A session of onnxruntime.

    Args:
        model: its path, or its bytes.
        wanted: providers, of which those that are installed are used. By default a GPU if
            onnxruntime-gpu finds one.
    """

    def __init__(
        self,
        model: Union[Path, bytes],
        wanted: Sequence[str] = ('CUDAExecutionProvider', 'CPUExecutionProvider'),
    ) -> None:
        send_no_telemetry()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        available = onnxruntime.get_available_providers()
        providers = [name for name in wanted if name in available]
        given = model if isinstance(model, bytes) else str(model)
        self.session = onnxruntime.InferenceSession(given, options, providers)
        self.metadata = self.session.get_modelmeta().custom_metadata_map.get(KEY)
        self.names = [output.name for output in self.session.get_outputs()]
        self.shapes = {
            value.name: [n if isinstance(n, int) else None for n in value.shape]
            for value in self.session.get_inputs()
        }

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self.names, self.session.run(self.names, inputs)))


class OpenVino:
    """A model compiled by OpenVINO for the CPU in float32, from ONNX or OpenVINO's own format."""

    def __init__(self, path: Path) -> None:
        import openvino
        from openvino.frontend import FrontEndManager

        # `Core.read_model` tries all of its formats on a damaged file, and some print to stderr.
        reader = FrontEndManager().load_by_framework('ir' if path.suffix == '.xml' else 'onnx')
        model = reader.convert(reader.load(str(path)))
        place = ['framework', KEY]
        self.metadata = model.get_rt_info(place).astype(str) if model.has_rt_info(place) else None
        # On processors with bfloat16, OpenVINO's default is less precise.
        self.model = openvino.Core().compile_model(
            model, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'}
        )
        self.names = [_name(output.get_names()) for output in self.model.outputs]
        self.shapes = {
            _name(value.get_names()): [
                n.get_length() if n.is_static else None for n in value.partial_shape
            ]
            for value in self.model.inputs
        }

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = self.model(inputs)
        return {name: results[i] for i, name in enumerate(self.names)}


def _name(names: set[str]) -> str:
    """The name that an input or output has in the file. OpenVINO adds those of values that it finds
    to be the same."""
    return next(iter(NAMES & names or names))


BACKENDS: dict[str, Callable[[Path], Session]] = {'onnxruntime': OnnxRuntime, 'openvino': OpenVino}


def open_session(path: Path, backend: str) -> Session:
    """Open a model file.

    Raises:
        UserError: no such file, backend or package, or not a complete model.
        PermissionError: the file cannot be read.
    """
    if backend not in BACKENDS:
        raise UserError(f'backend must be one of {", ".join(BACKENDS)}, got {backend!r}')
    if not path.is_file():
        raise UserError(f'no model at {path}')
    path.open('rb').close()  # the backends take a file without permission for a damaged one
    try:
        return BACKENDS[backend](path)
    except ImportError as error:
        raise UserError(f'cannot import {backend}; pip install {backend} ({error})') from error
    except Exception as error:  # the backends' own kinds
        raise UserError(f'{path} is not a complete model: {one_line(error)}') from error
