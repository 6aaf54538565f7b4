"""Writing an exported model: capture, comparison with PyTorch, and only then the file."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxscript.optimizer
import torch
from torch import nn

from ..runtime.comparison import Check
from ..runtime.self_test import pack, verify_session
from ..runtime.sessions import KEY, TEST_KEY, OnnxRuntime, OpenVino
from ..tooling.command import UserError, one_line
from ..tooling.files import atomic_write
from .about import Settings, metadata
from .base import Exportable, as_arguments
from .onnx_file import ExportError, capture, translate
from .verification import Runner, make_samples, verify, write_report

CPU = 'CPUExecutionProvider'


def write_verified(
    path: Path,
    model: Exportable,
    weights: nn.Module,
    config: dict[str, Any],
    images: Sequence[np.ndarray],
    settings: Settings,
    progress: Callable[[Sequence], Sequence] = list,
) -> list[Path]:
    """Export a model to a file, if it gives the results of PyTorch.

    Args:
        path: of the file.
        model: what is exported, in evaluation mode.
        weights: the original model, whose weights are hashed.
        config: entries of the metadata that the config knows.
        images: real images for the comparison, (H, W, 3) RGB.
        settings: how it is exported.
        progress: wraps the batches of the comparison, such as `tqdm`.

    Returns:
        The files that were written: the model and the report.

    Raises:
        UserError: it cannot be exported, or gives other results; the message names the stage. The
            report is written nevertheless, the file is not.
    """
    about = metadata(model, weights, config, settings)
    graph = model.in_half_precision() if settings.half else model
    reports: list[Path] = []

    def compare(runners: Mapping[str, Runner]) -> None:
        try:
            checks = verify(model, runners, images, settings, progress)
        except Exception as error:
            raise ExportError(f'runtime: {type(error).__name__}: {error}') from error
        reports.extend(write_report(path, about, checks))
        check_passed(checks, f'see {reports[1]}')

    # PyTorch checks the suffix of its formats.
    try:
        with atomic_write(path, '' if settings.format == 'onnx' else '.pt2') as partial:
            if settings.format == 'onnx':
                write_onnx(partial, graph, about, settings, compare)
                file = onnx.load(partial)
                file.metadata_props.add(key=TEST_KEY, value=pack(make_samples(model, settings)))
                onnx.save(file, partial)
                tested = verify_session(partial, OnnxRuntime(partial, CPU))
                check_passed(tested, 'this is the test of the file itself')
            else:
                write_program(partial, graph, about, settings, compare)
    except ExportError as error:
        raise UserError(f'{path} was not written; {one_line(error)}') from error
    return [path, *reports]


def check_passed(checks: Sequence[Check], more: str) -> None:
    """Raise an ExportError if a comparison failed; in OpenVINO alone, warn."""
    failed = [check for check in checks if not check.passed]
    if not failed:
        return
    check = min(failed, key=lambda check: check.runtime == 'openvino')
    difference = f'{check.error:.2g} ({check.unit}, at most {check.tolerance:.2g})'
    text = f'comparison: {check.stage} differs by {difference}'
    if check.stage == 'runtime':
        text = f'runtime: {check.note}'
    text += f' on images of {" ".join(check.sizes)}; {more}'
    if check.runtime != 'openvino':
        raise ExportError(text)
    warnings.warn(f'do not use the file in OpenVINO: {text}', stacklevel=2)


def write_onnx(
    path: Path,
    graph: Exportable,
    about: dict[str, Any],
    settings: Settings,
    compare: Callable[[Mapping[str, Runner]], None],
) -> None:
    """Capture with all stages, compare, then write the model with the outputs alone."""
    everything = graph.returning_all_stages()
    program = capture(everything, settings.has_valid, settings.size)
    model = translate(program, everything.output_names)
    onnx.save(model, path)
    runners = {'onnxruntime': OnnxRuntime(path, CPU).run}
    if find_spec('openvino'):
        session = cache(lambda: OpenVino(path))  # its errors are those of its first run
        runners['openvino'] = lambda inputs: session().run(inputs)
    compare(runners)
    outputs = {value.name: value for value in model.graph.output}
    del model.graph.output[:]
    model.graph.output.extend(outputs[name] for name in graph.output_names)
    onnxscript.optimizer.remove_unused_nodes(model)
    onnx.helper.set_model_props(model, {KEY: json.dumps(about)})
    onnx.checker.check_model(model)
    onnx.save(model, path)


def write_program(
    path: Path,
    graph: Exportable,
    about: dict[str, Any],
    settings: Settings,
    compare: Callable[[Mapping[str, Runner]], None],
) -> None:
    """An archive of torch.export or a package of AOTInductor; only its outputs are compared."""
    program = capture(graph, settings.has_valid, settings.size)
    text = json.dumps(about)
    try:
        if settings.format == 'torch':
            torch.export.save(program, path, extra_files={f'{KEY}.json': text})
            module = torch.export.load(path).module()
        else:
            configs = {'aot_inductor.metadata': {KEY: text}}
            with torch.no_grad():
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(path), inductor_configs=configs
                )
            module = torch._inductor.aoti_load_package(str(path))
    except Exception as error:  # many kinds, from all of PyTorch
        raise ExportError(f'{settings.format}: {type(error).__name__}: {error}') from error

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            outputs = module(*as_arguments({k: torch.from_numpy(x) for k, x in inputs.items()}))
        return dict(zip(graph.output_names, (x.numpy() for x in outputs)))

    compare({'torch': run})
