"""Writing an exported model: capture, comparison with PyTorch, and only then the file."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import onnx
import torch
from torch import nn

from ..runtime.sessions import KEY
from ..tooling.command import UserError, one_line
from ..tooling.files import atomic_write
from .about import metadata
from .base import Exportable
from .onnx_file import (
    AllStages,
    ExportError,
    capture,
    onnxruntime_runner,
    translate,
    with_outputs,
)
from .verification import Check, Runner, verify, write_report


class Settings(NamedTuple):
    """How a model is exported."""

    format: str = 'onnx'  # or 'torch' or 'aotinductor'
    size: Optional[tuple[int, int]] = None  # fixed height and width of the images
    half: bool = False  # in float16
    has_valid: bool = True  # the graph takes padded batches
    license: str = 'not stated'  # of the weights, for the metadata


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
    dtype = torch.float16 if settings.half else torch.float32
    about = metadata(
        model,
        weights,
        config,
        {
            'inputs': ['images', 'valid'] if settings.has_valid else ['images'],
            'size': settings.size,
            'dtype': str(dtype).removeprefix('torch.'),
            'license': settings.license,
        },
    )
    graph = model.in_half_precision() if settings.half else model

    def compare(run: Runner) -> list[Check]:
        try:
            return verify(model, run, images, settings.size, settings.has_valid, dtype, progress)
        except Exception as error:
            raise ExportError(f'runtime: {type(error).__name__}: {error}') from error

    write = write_onnx if settings.format == 'onnx' else write_program
    try:
        # PyTorch checks the suffix.
        with atomic_write(path, '' if settings.format == 'onnx' else '.pt2') as partial:
            checks = write(partial, graph, about, settings, compare)
            report = write_report(path, about, checks)
            failed = [check for check in checks if not check.passed]
            if failed:
                worst = failed[0]
                raise ExportError(
                    f'comparison: {worst.stage} differs by {worst.error:.2g} ({worst.unit}, at '
                    f'most {worst.tolerance:.2g}) on images of {" ".join(worst.sizes)}; see '
                    f'{report[1]}'
                )
    except ExportError as error:
        raise UserError(f'{path} was not written; {one_line(error)}') from error
    return [path, *report]


def write_onnx(
    path: Path,
    graph: Exportable,
    about: dict[str, Any],
    settings: Settings,
    compare: Callable[[Runner], list[Check]],
) -> list[Check]:
    """Capture with all stages, compare, then write the model with the outputs alone."""
    stages = AllStages(graph)
    program = capture(stages, settings.has_valid, settings.size)
    model = translate(program, stages.names)
    checks = compare(onnxruntime_runner(model.SerializeToString()))
    model = with_outputs(model, graph.output_names)
    onnx.helper.set_model_props(model, {KEY: json.dumps(about)})
    onnx.checker.check_model(model)
    onnx.save(model, path)
    onnxruntime_runner(str(path))  # which reads and checks the file itself
    return checks


def write_program(
    path: Path,
    graph: Exportable,
    about: dict[str, Any],
    settings: Settings,
    compare: Callable[[Runner], list[Check]],
) -> list[Check]:
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
    return compare(torch_runner(module, graph.output_names))


def torch_runner(module: Callable, names: Sequence[str]) -> Runner:
    """Runs a module of tensors: from inputs to outputs, by name."""

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(x) for x in inputs.values()))
        return dict(zip(names, (x.numpy() for x in outputs)))

    return run
