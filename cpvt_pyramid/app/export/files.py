"""Writing an exported model: capture, comparison with PyTorch, and only then the file."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxscript.optimizer
from torch import nn

from ..predict.sessions import KEY, TEST_KEY, OnnxRuntime, OpenVino
from ..tooling.command import UserError, one_line
from ..tooling.files import atomic_write
from ..tooling.progress import working
from .about import Settings, metadata
from .base import Exportable
from .comparison import Check
from .onnx_file import ExportError, capture, translate
from .onnx_weights import store_in_float16
from .self_test import Sample, pack, verify_session
from .verification import make_samples, verify, write_report

CPU = 'CPUExecutionProvider'


class Written(NamedTuple):
    """An exported model."""

    files: list[Path]  # the model and the report
    unfit: str  # a line that says in which runtime it must not be used; empty: it passed in all


def write_verified(
    path: Path,
    model: Exportable,
    weights: nn.Module,
    config: dict[str, Any],
    images: Sequence[np.ndarray],
    settings: Settings,
    progress: Callable[[Sequence], Sequence] = list,
) -> Written:
    """Export a model to a file, if it gives the results of PyTorch.

    Args:
        path: of the file.
        model: what is exported, in evaluation mode.
        weights: the original model, whose weights are hashed.
        config: entries of the metadata that the config knows.
        images: real images for the comparison, (H, W, 3) RGB.
        settings: how it is exported.
        progress: wraps the batches of the comparison, such as `tqdm`.

    Raises:
        UserError: it cannot be exported, or gives other results; the message names the stage. The
            report is written nevertheless, the file is not.
    """
    about = metadata(model, weights, config, settings)
    try:
        with atomic_write(path) as partial:
            with working('capturing the model'):
                file = with_all_stages(model, settings)
            add_metadata(file, about)  # OpenVINO runs our files in another form
            onnx.save(file, partial)
            runners = {'onnxruntime': OnnxRuntime(partial, CPU).run}
            if find_spec('openvino'):
                session = cache(lambda: OpenVino(partial))  # fails with its first run
                runners['openvino'] = lambda inputs: session().run(inputs)
            try:
                checks = verify(model, runners, images, settings, progress)
            except Exception as error:
                raise ExportError(f'runtime: {type(error).__name__}: {error}') from error
            reports = write_report(path, about, checks)
            unfit = check_passed(checks, f'see {reports[1]}')
            finish(file, model.output_names)
            with working('testing the file'):
                add_metadata(file, about, make_samples(model, settings))
                onnx.save(file, partial)
                tested = verify_session(partial, OnnxRuntime(partial, CPU))
            check_passed(tested, 'this is the test of the file itself')
    except ExportError as error:
        raise UserError(f'{path} was not written; {one_line(error)}') from error
    return Written([path, *reports], unfit)


def check_passed(checks: Sequence[Check], more: str) -> str:
    """Raise an ExportError if a comparison failed; if only in OpenVINO, return a line about it."""
    failed = [check for check in checks if not check.passed]
    if not failed:
        return ''
    check = min(failed, key=lambda check: check.runtime == 'openvino')
    difference = f'{check.error:.2g} ({check.unit}, at most {check.tolerance:.2g})'
    text = f'comparison: {check.stage} differs by {difference}'
    if check.stage == 'runtime':
        text = f'runtime: {check.note}'
    text += f' on images of {" ".join(check.sizes)}; {more}'
    if check.runtime != 'openvino':
        raise ExportError(text)
    return f'do not use the file in OpenVINO: {text}'


def with_all_stages(model: Exportable, settings: Settings) -> onnx.ModelProto:
    """The ONNX model, whose outputs are all stages."""
    everything = model.returning_all_stages()
    file = translate(capture(everything, settings), everything.output_names)
    if settings.half:
        store_in_float16(file)
    return file


def finish(file: onnx.ModelProto, outputs: Sequence[str]) -> None:
    """Keep only these outputs, and what they are computed from."""
    known = {value.name: value for value in file.graph.output}
    del file.graph.output[:]
    file.graph.output.extend(known[name] for name in outputs)
    onnxscript.optimizer.remove_unused_nodes(file)


def add_metadata(
    file: onnx.ModelProto, about: dict[str, Any], samples: Sequence[Sample] = ()
) -> None:
    """Add the metadata and the test data."""
    entries = {KEY: json.dumps(about)}
    if samples:
        entries[TEST_KEY] = pack(samples)
    onnx.helper.set_model_props(file, entries)
    onnx.checker.check_model(file)
