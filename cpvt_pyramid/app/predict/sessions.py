"""Opening a model file in onnxruntime or OpenVINO."""

import os
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Optional, Protocol

import numpy as np

from ...padding.batching import padded_size
from ..tooling import memory
from ..tooling.command import OptionError, UserError, one_line
from ..tooling.threads import usable_cores
from .openvino_graph import is_quantized, join_blocks, to_rows
from .options import DEFAULTS, RuntimeOptions

KEY, TEST_KEY = 'cpvt_pyramid', 'cpvt_pyramid_test'  # of the metadata and the test data
# Execution providers of onnxruntime
CPU, CUDA = 'CPUExecutionProvider', 'CUDAExecutionProvider'
TENSORRT = 'TensorrtExecutionProvider'
# Operators that OpenVINO keeps ready, each for one size of its inputs; some sizes of images
CACHED_OPERATORS = 500
# What --device calls the processors of each backend.
DEVICES = {
    'onnxruntime': {'cpu': CPU, 'cuda': CUDA},
    'openvino': {'cpu': 'CPU', 'gpu': 'GPU'},
}
# Where in its source code a backend has failed, with the arguments of the function there
SOURCE_LINE = re.compile(r'\S+\.(cc|h):\d+ \S.*?\) (?=[A-Z])')
NAMES = {'images', 'valid', 'original', 'boxes', 'scores', 'labels', 'masks', 'probabilities'}


class SessionError(UserError):
    """A backend failed on some input, which may be too large for it."""


class OutOfMemory(SessionError):
    """A backend could not allocate memory."""


class Session(Protocol):
    """A model file, ready to run."""

    metadata: Optional[str]  # JSON text of the exporter; None if the file has none
    test: Optional[str]  # test data, see `self_test.py`
    device: str  # the backend and what it runs on, for people
    names: list[str]  # of the outputs
    shapes: dict[str, list[Optional[int]]]  # of the inputs; None for a dimension of any length
    dtypes: dict[str, np.dtype]  # of the inputs
    # Boxes for an image that a detector has room for, used or not; None if it does not say so.
    rows: Optional[int]
    requests: int  # the number of threads that `run` serves at the same time; others wait

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]: ...


class OnnxRuntime:
    """A session of onnxruntime. The device is an execution provider, by default a GPU if
    onnxruntime-gpu finds one, which serves one thread."""

    def __init__(
        self,
        path: Path,
        device: Optional[str] = None,
        requests: int = 1,
    ) -> None:
        os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')  # else onnxruntime reports its use
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        # It keeps memory for each size of images that it has seen, and is not faster.
        options.enable_mem_pattern = False
        available = onnxruntime.get_available_providers()
        wanted = [device or CUDA, CPU]
        if device == TENSORRT:  # which leaves other operators to the GPU
            wanted.insert(1, CUDA)
        providers = [name for name in dict.fromkeys(wanted) if name in available]
        self.requests = requests if providers == [CPU] else 1
        self.turns = threading.Semaphore(self.requests)
        if self.requests > 1:  # which compute, too, and share the session's other threads
            options.intra_op_num_threads = max(usable_cores() - self.requests + 1, 1)
        self.session = onnxruntime.InferenceSession(str(path), options, providers)
        used = self.session.get_providers()  # without those that could not be started
        check_device('onnxruntime', device or used[0], used if device in available else available)
        entries = self.session.get_modelmeta().custom_metadata_map
        self.metadata = entries.get(KEY)
        self.test = entries.get(TEST_KEY)
        self.provider = used[0]
        self.device = f'onnxruntime on {self.provider}'
        outputs = {output.name: output.shape for output in self.session.get_outputs()}
        self.names = [*outputs]
        self.rows = row_count(outputs.get('scores', []))
        self.shapes = {}
        self.dtypes = {}
        for value in self.session.get_inputs():
            self.shapes[value.name] = [n if isinstance(n, int) else None for n in value.shape]
            self.dtypes[value.name] = dtype_of(value.type)

        self.run_options = onnxruntime.RunOptions()
        self.run_options.log_severity_level = 4  # an error is raised, and need not be printed
        if self.provider == CPU:  # else the memory of the largest image is kept
            self.run_options.add_run_config_entry('memory.enable_memory_arena_shrinkage', 'cpu:0')

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with self.turns:
            results = self.session.run(self.names, inputs, self.run_options)
        return dict(zip(self.names, results))


class OpenVino:
    """A model compiled by OpenVINO, from ONNX or OpenVINO's own format, that computes in float32 or
    bfloat16. The device is by default the CPU; others, such as 'GPU', serve one thread."""

    def __init__(
        self,
        path: Path,
        device: Optional[str] = None,
        requests: int = 1,
        dtype: str = 'float32',
    ) -> None:
        model = model_to_run(path)
        self.metadata = _entry(model, KEY)
        self.test = _entry(model, TEST_KEY)
        core = openvino_core()
        device = device or 'CPU'
        check_device('openvino', device, core.available_devices)
        self.place = device
        self.device = f'openvino on {device}'
        if dtype != 'float32':
            self.device += f' in {dtype}'
        if dtype == 'bfloat16' and not has_bfloat16(device):
            raise OptionError(f'OpenVINO has no bfloat16 on {device} here; leave out {{dtype}}')
        # On processors with bfloat16, OpenVINO's default is less precise.
        hint = {'float32': 'f32', 'bfloat16': 'bf16'}[dtype]
        settings: dict[str, object] = {'INFERENCE_PRECISION_HINT': hint}
        self.requests = requests if device == 'CPU' else 1
        if self.requests > 1:
            settings['PERFORMANCE_HINT'] = 'THROUGHPUT'
            settings['PERFORMANCE_HINT_NUM_REQUESTS'] = self.requests
        if device == 'CPU':  # whose default is 5000, over 1 GB if images have many sizes
            settings['CPU_RUNTIME_CACHE_CAPACITY'] = CACHED_OPERATORS
        self.model = core.compile_model(model, device, settings)
        self.free: SimpleQueue[Any] = SimpleQueue()  # each for one thread at a time
        for _ in range(self.requests):
            self.free.put(self.model.create_infer_request())
        outputs = {_name(output.get_names()): output for output in self.model.outputs}
        self.names = [*outputs]
        self.rows = None
        if 'scores' in outputs:
            self.rows = row_count(lengths_of(outputs['scores'].partial_shape))
        self.shapes = {}
        self.dtypes = {}
        for value in self.model.inputs:
            name = _name(value.get_names())
            self.shapes[name] = lengths_of(value.partial_shape)
            kind = value.get_element_type()
            is_known = kind.get_type_name() != 'bf16'  # which OpenVINO calls float16
            self.dtypes[name] = np.dtype(kind.to_dtype() if is_known else object)

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        request = self.free.get()
        try:
            results = request.infer(inputs, share_inputs=True)
            return {name: results[i] for i, name in enumerate(self.names)}
        finally:
            if self.place == 'CPU' and self.requests == 1:
                self.model.release_memory()  # else that of the largest image is kept
            self.free.put(request)


def is_openvino_format(path: Path) -> bool:
    """Whether a model is in OpenVINO's own format, by its name."""
    return path.suffix.lower() == '.xml'


def read_openvino(path: Path) -> Any:
    """An `openvino.Model` from an ONNX file or OpenVINO's own format; ours without the blocks into
    which attention and MLPs are divided."""
    from openvino.frontend import FrontEndManager

    # `Core.read_model` tries all of its formats on a damaged file, and some print to stderr.
    reader = FrontEndManager().load_by_framework('ir' if is_openvino_format(path) else 'onnx')
    model = reader.convert(reader.load(str(path)))
    if _entry(model, KEY) is not None:
        join_blocks(model)
    return model


def model_to_run(path: Path) -> Any:
    """As `read_openvino`; ours in the form that is fastest in float32 and bfloat16."""
    model = read_openvino(path)
    # The constants of quantized models must not be folded; sums of others may broadcast.
    if _entry(model, KEY) is not None and not is_quantized(model):
        to_rows(model)
    return model


@cache
def openvino_core() -> Any:
    """The only `openvino.Core` of this process: when a second one ends, it restores signal handlers
    that the first one has freed, and the next Ctrl-C crashes the process (OpenVINO 2026.4)."""
    import openvino

    return openvino.Core()


def has_bfloat16(device: str = 'CPU') -> bool:
    """Whether OpenVINO computes in bfloat16 on a device, rather than ignore that it is wanted."""
    return 'BF16' in openvino_core().get_property(device, 'OPTIMIZATION_CAPABILITIES')


def _entry(model: Any, key: str) -> Optional[str]:
    """An entry of the metadata of a file; None if it has none."""
    place = ['framework', key]
    return model.get_rt_info(place).astype(str) if model.has_rt_info(place) else None


def _name(names: set[str]) -> str:
    """The name that an input or output has in the file. OpenVINO adds those of values that it finds
    to be the same."""
    return min(NAMES & names or names)


def dtype_of(tensor: str) -> np.dtype:
    """The NumPy type of onnxruntime's name of a type, such as `tensor(float16)`."""
    name = tensor.removeprefix('tensor(').removesuffix(')')
    try:
        return np.dtype({'float': 'float32', 'double': 'float64'}.get(name, name))
    except TypeError:  # such as a sequence of tensors
        return np.dtype(object)


def check_device(backend: str, device: str, available: Sequence[str]) -> None:
    if device not in available:
        raise UserError(f'{backend} cannot use {device}; choose from {", ".join(available)}')


def lengths_of(shape: Any) -> list[Optional[int]]:
    """The dimensions of a shape of OpenVINO; None for those of any length."""
    return [n.get_length() if n.is_static else None for n in shape]


def row_count(shape: Sequence[object]) -> Optional[int]:
    """The N of scores (B, N), if it is fixed."""
    if len(shape) == 2 and isinstance(shape[1], int):
        return shape[1]
    return None


def backend_for(path: Path, options: RuntimeOptions) -> str:
    """'onnxruntime' or 'openvino', which an .xml file always needs."""
    if not is_openvino_format(path):
        return options.backend or 'onnxruntime'
    if options.backend == 'onnxruntime':
        raise OptionError(f'{path} is a model of OpenVINO; leave out {{backend}}')
    return 'openvino'


def open_session(path: Path, options: RuntimeOptions = DEFAULTS, requests: int = 1) -> Session:
    """Open a model file for a number of threads that will run it at the same time.

    Raises:
        UserError: no such file, device or package, or a model that the backend cannot open.
        PermissionError: the file cannot be read.
    """
    if not path.is_file():
        raise UserError(f'no model at {path}')
    path.open('rb').close()  # the backends take a file without permission for a damaged one
    backend = backend_for(path, options)
    device = options.device
    if device is not None:
        device = DEVICES[backend].get(device, device)
    if backend == 'onnxruntime' and options.dtype != 'float32':
        raise OptionError(
            f'onnxruntime does not compute in {options.dtype}; set {{backend}} to openvino, or '
            'leave out {dtype}'
        )
    try:
        if backend == 'openvino':
            return OpenVino(path, device, requests, options.dtype)
        return OnnxRuntime(path, device, requests)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f'cannot import {backend}; pip install {backend} ({error})') from error
    except Exception as error:  # the backends' own kinds
        if memory.is_exhausted(error):
            raise
        reason = SOURCE_LINE.sub('', one_line(error, 1000))
        raise UserError(
            f'{path} cannot be opened by {backend} {import_module(backend).__version__}; it may '
            f'be incomplete, or need another version or further files: {reason}'
        ) from error


def padded_input(
    size: tuple[int, int], shapes: Mapping[str, Sequence[Optional[int]]], stride: int
) -> tuple[int, int]:
    """Height and width of an image after padding to multiples of the stride, or to the fixed size
    of a file's input. A file that is not told the true sizes would take padding for image, so that
    its batches have images of one size."""
    if 'valid' not in shapes:
        return size
    height, width = padded_size(size, stride)
    fixed_height, fixed_width = shapes['images'][2:]
    return fixed_height or height, fixed_width or width


def padded_inputs(
    images: Sequence[np.ndarray],
    shapes: Mapping[str, Sequence[Optional[int]]],
    originals: Optional[Sequence[Sequence[int]]] = None,
) -> dict[str, np.ndarray]:
    """The inputs of a model, of these shapes (see `Session`), for images (H, W, 3) in one batch,
    with their heights and widths before they were resized, if they were.

    A file of one size that is not told the true sizes takes the padding for image, and resizes
    label maps with it. They are larger than the originals by as much as the padding.
    """
    sizes = np.array([image.shape[:2] for image in images])
    fixed_height, fixed_width = shapes['images'][2:]
    height = fixed_height or sizes[:, 0].max()
    width = fixed_width or sizes[:, 1].max()
    batch = np.zeros((len(images), 3, height, width), np.float32)
    for place, image in zip(batch, images):
        place[:, : image.shape[0], : image.shape[1]] = image.transpose(2, 0, 1)
    enlarged = np.array(originals or sizes)
    if 'valid' not in shapes:
        enlarged = np.rint(enlarged * [height, width] / sizes)
    inputs = {
        'images': batch,
        'valid': sizes.astype(np.int64),
        'original': enlarged.astype(np.int64),
    }
    return {name: inputs[name] for name in shapes}


def run_session(
    path: Path, session: Session, inputs: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The outputs of an opened file.

    Raises:
        OutOfMemory: it could not allocate memory.
        SessionError: the backend failed.
    """
    try:
        return session.run(inputs)
    except Exception as error:  # the backends' own kinds
        line = f'{path} failed on images of {inputs["images"].shape}: {one_line(error, 100)}'
        if memory.is_exhausted(error):
            raise OutOfMemory(line) from error
        raise SessionError(line) from error
