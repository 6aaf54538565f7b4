"""Measures float32 and 8-bit integers in OpenVINO, pass by pass in turns.

    python -m benchmarks.quantized
    python -m benchmarks.quantized --models semantic_fpn_cpvt_s --threads 1 --seconds 60
    python -m benchmarks.quantized --models retinanet.onnx --image photo.jpg

A config is exported with random weights, which takes a minute or two, and calibrated with a
photograph of scikit-image. Files are kept in a folder and used again. Accuracy is measured by
cpvt quantize, which a trained model needs.

    float32 as exported   the .onnx file, as any program opens it in OpenVINO
    float32               the same file as cpvt run opens it, with tokens in rows
    int8                  all products in 8 bits, with 7 bits for weights
    int8, float attention the same, but for the products of queries, keys and values

    ms         of a pass, median
    x float32  how many times as fast as the second row, median over the rounds
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from benchmarks import ROOT
from benchmarks.machine import machine
from cpvt_pyramid.tooling.command import UserError, imports_of, run_command
from cpvt_pyramid.tooling.files import atomic_write, make_folder
from cpvt_pyramid.tooling.report import text_table

with imports_of('quantized', 'quantize'):
    import nncf  # noqa: F401
    import openvino

MODELS = ('semantic_fpn_cpvt_s', 'retinanet_cpvt_s')
EXPORTED, FLOAT32 = 'float32 as exported', 'float32'
INT8, MIXED = 'int8', 'int8, float attention'
HEAD = ('model', 'input', 'threads', 'form', 'ms', 'x float32', 'MB')


def quantized(
    *,
    models: Sequence[str] = MODELS,
    threads: Sequence[int] = (1, 2),
    seconds: float = 40.0,
    image: Optional[str] = None,
    folder: str = 'work_dirs/quantized',
) -> None:
    """Measure models and print a table for each.

    Args:
        models: names of configs in configs/, or files of cpvt export.
        threads: of OpenVINO.
        seconds: of a measurement, in which all forms of a model take turns; at least three turns.
        image: the photograph; by default scikit-image's astronaut, 512 x 512, for a segmentor and
            coffee, 600 x 400, for a detector.
        folder: keeps the files.
    """
    place = make_folder(folder)
    print(', '.join(f'{key} {value}' for key, value in machine('cpu').items()))
    print(f'OpenVINO {openvino.__version__}')
    for model in models:
        path = exported(model, place)
        photograph = read(image, path)
        forms = forms_of(path, photograph, place)
        for count in threads:
            rows = measure(path, forms, photograph, count, seconds)
            print(f'\n{text_table(HEAD, rows)}', flush=True)


def exported(model: str, folder: Path) -> Path:
    """The .onnx file of a config, with random weights and without a comparison."""
    if model.endswith('.onnx'):
        return Path(model)
    path = folder / f'{model}.onnx'
    if path.exists():
        return path
    config = ROOT / f'configs/{model}.py'
    if not config.exists():
        raise UserError(f'{model} is neither a .onnx file nor a config; there is no {config}')

    import onnx
    import torch

    from cpvt_pyramid.config.load import load_config
    from cpvt_pyramid.export.about import Settings, metadata
    from cpvt_pyramid.export.files import add_metadata, finish, with_all_stages
    from cpvt_pyramid.export.models import exportable
    from cpvt_pyramid.predict.openmmlab.models import build_model
    from cpvt_pyramid.runner.export import about_config

    torch.manual_seed(0)
    cfg = load_config(str(config), ())
    cfg.model.backbone.init_cfg = None
    module = build_model(cfg, 'cpu').eval()
    graph = exportable(module)
    file = with_all_stages(graph, Settings())
    finish(file, graph.output_names)
    add_metadata(file, metadata(graph, module, about_config(cfg, {}), Settings()))
    with atomic_write(path) as partial:
        onnx.save(file, partial)
    return path


def read(image: Optional[str], path: Path) -> np.ndarray:
    from cpvt_pyramid.predict.images import load_image
    from cpvt_pyramid.predict.predictor import ExportedModel

    if image is not None:
        return load_image(image)
    import skimage.data

    if ExportedModel(path, 'openvino').kind_of_results == 'labels':
        return skimage.data.astronaut()
    return skimage.data.coffee()


def forms_of(path: Path, image: np.ndarray, folder: Path) -> dict[str, tuple[Any, int]]:
    """The models to compare, each with the size of its file in bytes."""
    from cpvt_pyramid.export import quantization
    from cpvt_pyramid.predict.openvino_graph import to_float32, to_rows
    from cpvt_pyramid.predict.sessions import read_openvino

    in_rows = read_openvino(path)
    to_float32(in_rows)
    to_rows(in_rows)
    size = path.stat().st_size
    forms = {EXPORTED: (read_openvino(path), size), FLOAT32: (in_rows, size)}
    for name, in_float in ((INT8, ()), (MIXED, (quantization.PAIRS,))):
        file = folder / f'{path.stem}-{name.replace(", ", "-").replace(" ", "-")}.xml'
        if not file.exists():
            quantizer = quantization.Quantizer(path)
            original = quantizer.original
            inputs = quantization.inputs_of(original, [image])
            quantization.save(quantizer.quantize(inputs, in_float), file, {})
        forms[name] = (read_openvino(file), quantization.bytes_of(file))
    return forms


def measure(
    path: Path,
    forms: dict[str, tuple[Any, int]],
    image: np.ndarray,
    threads: int,
    seconds: float,
) -> list[list[str]]:
    """A row of the table for each form."""
    from cpvt_pyramid.export import quantization
    from cpvt_pyramid.predict.predictor import ExportedModel
    from cpvt_pyramid.predict.sessions import openvino_core

    settings = {'INFERENCE_PRECISION_HINT': 'f32', 'INFERENCE_NUM_THREADS': threads}
    (inputs,) = quantization.inputs_of(ExportedModel(path, 'openvino'), [image])
    passes: dict[str, Callable[[], object]] = {}
    for name, (model, _) in forms.items():
        request = openvino_core().compile_model(model, 'CPU', settings).create_infer_request()
        passes[name] = lambda request=request: request.infer(inputs, share_inputs=True)
    times = in_turns(passes, seconds)
    height, width = inputs['images'].shape[2:]
    rows = []
    for name, (_, size) in forms.items():
        ratios = [base / own for base, own in zip(times[FLOAT32], times[name])]
        rows.append(
            [
                path.stem,
                f'{height}x{width}',
                str(threads),
                name,
                f'{1000 * statistics.median(times[name]):.0f}',
                f'{statistics.median(ratios):.2f}',
                f'{size / 1e6:.1f}',
            ]
        )
    return rows


def in_turns(passes: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each pass, once in each round, after a round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for run in passes.values():
        run()
    end = time.monotonic() + seconds
    while len(times[FLOAT32]) < 3 or time.monotonic() < end:
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(quantized, argv)


if __name__ == '__main__':
    raise SystemExit(main())
