"""Exported models in 8-bit integers, by NNCF's post-training quantization, for OpenVINO.

`nncf.quantize` gets the ranges of values from calibration images. Products of two computed values,
such as queries and keys, stay in float32. The result is written only if its predictions for other
images are good enough.

Weights take 7 of their 8 bits. Processors without VNNI add pairs of products in 16 bits, where two
products of 8 bits may saturate.
"""

import io
import json
import logging
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from ..images.inputs import find_images
from ..images.reading import load_image
from ..predict.exported import ExportedModel
from ..predict.openvino_graph import is_quantized, to_rows
from ..predict.options import ModelOptions
from ..predict.protocol import TooLarge
from ..predict.result_files import is_result
from ..predict.sessions import (
    KEY,
    TEST_KEY,
    OpenVino,
    SessionError,
    has_bfloat16,
    padded_inputs,
    read_openvino,
)
from ..predictions.kinds import Detections, Prediction
from ..tooling.command import UserError, imports_of, one_line, optional_package
from ..tooling.files import check_file, check_new, folder_to_fill
from ..tooling.progress import working
from ..tooling.report import text_table
from ..tooling.threads import usable_cores
from .accuracy import Agreement, agreement_of
from .self_test import own_test
from .stored_files import stored_files

if TYPE_CHECKING:
    from ..evaluate.truth import Truth

# Always in float32: they clip coordinates, of which 8 bits would tell 256 apart.
CLIPPING = ['Minimum', 'Maximum']
IN_OPENVINO = ModelOptions(backend='openvino')
FEW = 20  # images: fewer do not show the range of values
CALIBRATED = 100  # images to calibrate with, at most
COMPARED = 32  # images without annotations, at most
ROUNDS = 9  # of the measurement of latency
SECONDS = 20.0  # for it, at most


class Measured(NamedTuple):
    """How good a quantized model is on images that it was not calibrated with."""

    agreement: float  # with the float32 model, from 0 to 1
    accuracy: Optional[float] = None  # AP or mIoU in percent, of annotated images


def float32_model(path: Path) -> Any:
    """The `openvino.Model` of an exported file, in float32, with norms and residuals of rows.

    Raises:
        UserError: it is quantized already.
    """
    # Some constants of an ONNX file lead to nodes that are no longer part of the model.
    model = read_openvino(path).clone()
    if is_quantized(model):
        raise UserError(f'{path} is quantized already; give the float32 model')
    to_rows(model)
    return model


def computed_products(model: Any) -> list[str]:
    """The names of the products without weights: of queries and keys, of the weights of attention
    and values, and of maps with matrices that resize them."""
    names = []
    for node in model.get_ordered_ops():
        if node.get_type_name() == 'MatMul':
            operands = [value.get_node().get_type_name() for value in node.input_values()]
            if 'Constant' not in operands:
                names.append(node.get_friendly_name())
    return names


def quantized_model(nncf: Any, model: Any, inputs: Sequence[dict[str, np.ndarray]]) -> Any:
    """The quantized form of an `openvino.Model` in float32, calibrated with these inputs."""
    in_float32 = nncf.IgnoredScope(
        names=computed_products(model),
        types=CLIPPING,
        validate=False,  # not every model has them
    )
    # By default each channel of a depthwise convolution has a scale. NNCF takes the second
    # dimension for the channels, also of maps (B, H, W, C).
    parameters = nncf.quantization.advanced_parameters
    one_scale = parameters.QuantizationParameters(per_channel=False)
    with quiet():
        return nncf.quantize(
            model,
            nncf.Dataset(inputs),
            subset_size=len(inputs),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.PERFORMANCE,
            ignored_scope=in_float32,
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE,
                activations_quantization_params=one_scale,
            ),
        )


def import_nncf() -> Any:
    os.environ.setdefault('NNCF_CI', '1')  # else it reports its use
    return optional_package('nncf', 'cpvt quantize', "'.[quantize]'")


@contextmanager
def only_errors(name: str) -> Iterator[None]:
    """Inside this context a logger passes on errors alone."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet() -> Iterator[None]:
    """Without NNCF's own lines and bars, and without that of the builder of PyTorch's extensions,
    which NNCF imports and which warns of a CUDA without a GPU."""
    extensions = only_errors('torch.utils.cpp_extension')
    with only_errors('nncf'), extensions, redirect_stdout(io.StringIO()):
        yield


def save(model: Any, path: Path, entries: Mapping[str, str]) -> None:
    """Write an .xml file and the .bin file next to it, with metadata.

    Raises:
        UserError: it cannot be written.
    """
    import openvino

    for key, value in entries.items():
        model.set_rt_info(value, ['framework', key])
    try:
        openvino.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:  # OpenVINO's only kind
        free = shutil.disk_usage(path.parent).free / 1e6
        raise UserError(
            f'cannot write {path}, where {free:.0f} MB are free: {one_line(error)}'
        ) from error


class Expected(NamedTuple):
    """What the float32 model predicts for images, with which others are compared."""

    predictions: dict[Path, Prediction]  # as users see them by default
    accuracy: Optional[float] = None  # AP or mIoU in percent, of annotated images


def expected_of(
    original: ExportedModel, paths: Sequence[Path], truth: Optional['Truth']
) -> Expected:
    """The predictions of the float32 model for images; those that cannot be read are skipped, with
    a warning. All images are annotated, if there are annotations (`truth`)."""
    predictions: dict[Path, Prediction] = {}
    summaries = {}
    for path, prediction in predictions_of(original, paths):
        predictions[path] = without_image(shown_by_default(prediction, original))
        if truth is not None:
            summaries[path] = truth.summary(path, prediction)
    if not predictions:
        raise UserError('none of the images for the comparison can be read')
    return Expected(predictions, truth.measure(summaries) if truth is not None else None)


def measure(model: ExportedModel, expected: Expected, truth: Optional['Truth']) -> Measured:
    """How good a quantized model is on the images of the float32 model's predictions."""
    total = Agreement()
    summaries = {}
    for path, prediction in predictions_of(model, expected.predictions):
        total += agreement_of(shown_by_default(prediction, model), expected.predictions[path])
        if truth is not None:
            summaries[path] = truth.summary(path, prediction)
    return Measured(total.share, truth.measure(summaries) if truth is not None else None)


def predictions_of(
    model: ExportedModel, paths: Iterable[Path]
) -> Iterator[tuple[Path, Prediction]]:
    """The predictions for the images that can be read, of any score, as AP needs them."""
    of_any_score = model.with_score_thr(0.0)
    for path in paths:
        image = load_or_skip(path)
        if image is None:
            continue
        try:
            (prediction,) = of_any_score.predict([of_any_score.prepare(image)])
        except (SessionError, TooLarge) as error:
            raise UserError(f'{path}: the model fails on it: {one_line(error)}') from error
        yield path, prediction


def shown_by_default(prediction: Prediction, model: ExportedModel) -> Prediction:
    """What users see of a prediction of any score."""
    if isinstance(prediction, Detections):
        return prediction.above(model.about['score_thr'])
    return prediction


def without_image(prediction: Prediction) -> Prediction:
    """A prediction that needs less memory, for `agreement_of`."""
    nothing = np.zeros((0, 0, 3), np.uint8)
    if isinstance(prediction, Detections):
        return replace(prediction, image=nothing, masks=None)
    return replace(prediction, image=nothing)


def load_or_skip(path: Path) -> Optional[np.ndarray]:
    """An image; None, with a warning, if it cannot be read."""
    try:
        return load_image(path)
    except OSError as error:
        warnings.warn(f'skipped {path}: {one_line(error)}', stacklevel=2)
        return None


def calibration_inputs(
    original: ExportedModel, paths: Sequence[Path]
) -> list[dict[str, np.ndarray]]:
    """What the model gets for each image file, alone. Label maps have the size of the input."""
    inputs = []
    for path in paths:
        image = load_or_skip(path)
        if image is None:
            continue
        resized = original.to_input_size(image)
        sizes = [resized.shape[:2]]
        inputs.append(padded_inputs([resized], original.session.shapes, sizes))
    if not inputs:
        raise UserError('none of the images for the calibration can be read')
    if len(inputs) < FEW:
        warnings.warn(
            f'few images to calibrate with: {len(inputs)}; {FEW} or more are better',
            stacklevel=2,
        )
    return inputs


def split_images(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Every other image to calibrate with, and the others to compare on."""
    if len(paths) < 2:
        raise UserError(
            'at least 2 images are needed, got 1: some to calibrate with, others to compare on; '
            f'{2 * FEW} are better'
        )
    return list(paths[::2]), list(paths[1::2])


def evenly_spaced(paths: Sequence[Path], most: int) -> list[Path]:
    """At most `most` of them."""
    if len(paths) <= most:
        return list(paths)
    places = np.linspace(0, len(paths) - 1, most).round().astype(int)
    return [paths[place] for place in places]


class Latency(NamedTuple):
    """Median times of a pass, in milliseconds."""

    float32: float
    int8: float
    bfloat16: Optional[float]  # None: the processor has none
    size: tuple[int, int]  # height and width of the image
    cores: int


def measure_latency(models: Mapping[str, ExportedModel], image: np.ndarray) -> Latency:
    """Measure the models in 'float32', 'int8' and perhaps 'bfloat16' on one image, in turns."""
    original = models['float32']
    resized = original.to_input_size(image)
    inputs = padded_inputs([resized], original.session.shapes, [image.shape[:2]])
    times: dict[str, list[float]] = {name: [] for name in models}
    end = time.monotonic() + SECONDS
    for turn in range(ROUNDS + 1):
        for name, model in models.items():
            start = time.perf_counter()
            model.session.run(inputs)
            if turn:  # after the first, which allocates memory
                times[name].append(1000 * (time.perf_counter() - start))
        if turn > 1 and time.monotonic() > end:
            break
    height, width = resized.shape[:2]
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    return Latency(
        medians['float32'],
        medians['int8'],
        medians.get('bfloat16'),
        (height, width),
        usable_cores(),
    )


class Limits(NamedTuple):
    """How much worse than the float32 model a quantized model may be."""

    agreement: float = 0.95  # with it, at least, where there are no annotations; from 0 to 1
    drop: float = 0.5  # points of AP or mIoU, at most, where there are


def quantize_images(
    path: Path,
    out: Path,
    images: Sequence[str],
    compare: Sequence[str],
    limits: Limits,
    data: Optional[Path] = None,
    split: Optional[str] = None,
) -> None:
    """Quantize a model with the images that a user names, write it, and print the results.

    Args:
        path: see `quantize_file`.
        out: see `quantize_file`.
        images: files and folders to calibrate with.
        compare: those on which the models are compared; if none, every other image is.
        limits: see `quantize_file`.
        data: annotated images on which they are compared instead: a data.yaml or a folder.
        split: of the data; see `read_truth`.

    Raises:
        UserError: a file of the result exists, or see `quantize_file`.
    """
    check_file(out)
    remove_leftovers(out)
    check_new(*files_of(out))
    calibration = find_images(images, 'IMAGES', is_result)
    truth: Optional[Truth] = None
    if data is not None:
        if compare:
            raise UserError('--data has the images to compare on; leave out --compare')
        with imports_of('cpvt quantize --data'):
            from ..evaluate.truth import read_truth

        model = ExportedModel(path, IN_OPENVINO)
        truth = read_truth(data, model.kind, model.classes, model.palette, split)
        for line in truth.about:
            print(line)
        compared = list(truth.images)
    elif compare:
        compared = find_images(compare, '--compare', is_result)
    else:
        calibration, compared = split_images(calibration)
    with working('quantizing, comparing and measuring'):
        results = quantize_file(path, out, calibration, compared, limits, truth)
    print(f'\n{summary(results)}')
    print(f'wrote {", ".join(map(str, files_of(out)))}')
    if warning := speed_warning(results):
        print(warning)


def quantize_file(
    path: Path,
    out: Path,
    calibration: Sequence[Path],
    compared: Sequence[Path],
    limits: Limits,
    truth: Optional['Truth'] = None,
) -> dict[str, Any]:
    """Quantize a model and write it, if its predictions are good enough.

    Args:
        path: of the float32 model.
        out: an .xml file to write, of which there are no leftovers.
        calibration: images to calibrate with.
        compared: other images, on which the models are compared.
        limits: what is good enough.
        truth: what is true of the compared images, if they are annotated.

    Returns:
        What the report holds, see `summary`.

    Raises:
        UserError: it cannot be quantized, or is not good enough; nothing was written.
    """
    original = ExportedModel(path, IN_OPENVINO)
    model = float32_model(path)
    original_bytes = stored_bytes(path)
    if truth is None:
        compared = evenly_spaced(compared, COMPARED)
    nncf = import_nncf()  # takes seconds, and comes after what may be wrong with the arguments
    inputs = calibration_inputs(original, evenly_spaced(calibration, CALIBRATED))
    print(f'images to calibrate with: {len(inputs)}; to compare on: {len(compared)}')
    expected = expected_of(original, compared, truth)
    model = quantized_model(nncf, model, inputs)

    with hidden_folder(out) as folder:
        untested = folder / 'untested.xml'
        save(model, untested, metadata_of(original))
        measured = measure(ExportedModel(untested), expected, truth)
        check_good_enough(out, measured, expected, truth, limits)

        entries = metadata_of(original, measured)
        if original.session.test is not None:
            entries[TEST_KEY] = own_test(OpenVino(untested), original.session.test)
        partial = folder / out.name
        save(model, partial, entries)
        models = {'float32': original, 'int8': ExportedModel(partial)}
        in_bfloat16 = None
        if has_bfloat16():
            models['bfloat16'] = ExportedModel(path, replace(IN_OPENVINO, dtype='bfloat16'))
            in_bfloat16 = measure(models['bfloat16'], expected, truth)
        first = next(iter(expected.predictions))
        latency = measure_latency(models, load_image(first))
        results = {
            'model': out.name,
            'from': path.name,
            'calibration_images': len(inputs),
            'compared_images': len(expected.predictions),
            'agreement': measured.agreement,
            'accuracy': accuracies(measured, expected, truth),
            'bfloat16': in_bfloat16 and in_bfloat16._asdict(),
            'latency_ms': latency._asdict(),
            'bytes': {'float32': original_bytes, 'int8': stored_bytes(partial)},
            'versions': {name: version(name) for name in ('nncf', 'openvino')},
        }
        report = folder / out.with_suffix('.report.json').name
        report.write_text(json.dumps(results, indent=1) + '\n', encoding='utf-8')
        for name in (partial.with_suffix('.bin').name, report.name, out.name):  # the model last
            os.replace(folder / name, out.with_name(name))
    return results


def accuracies(
    measured: Measured, expected: Expected, truth: Optional['Truth']
) -> Optional[dict[str, Any]]:
    """The AP or mIoU of both models; None without annotations."""
    if truth is None:
        return None
    return {'measure': truth.name, 'float32': expected.accuracy, 'int8': measured.accuracy}


def check_good_enough(
    out: Path, measured: Measured, expected: Expected, truth: Optional['Truth'], limits: Limits
) -> None:
    """Raise a UserError if a quantized model is worse than it may be."""
    if truth is not None and measured.accuracy is not None and expected.accuracy is not None:
        least = expected.accuracy - limits.drop
        is_good = measured.accuracy >= least
        what = f'{truth.name} {measured.accuracy:.2f}, but {least:.2f}'
    else:
        is_good = measured.agreement >= limits.agreement
        what = f'agreement {measured.agreement:.2%}, but {limits.agreement:.2%}'
    if not is_good:
        raise UserError(
            f'{out} was not written: it has {what} is wanted; calibrate with more images like '
            'those of the model, or want less'
        )


def files_of(out: Path) -> list[Path]:
    """What `quantize_file` writes."""
    return [out, out.with_suffix('.bin'), out.with_suffix('.report.json')]


def stored_bytes(path: Path) -> int:
    """The size of the files of a model, of each once and as it is stored."""
    return sum(file.stat().st_size for file in stored_files(path))


def metadata_of(original: ExportedModel, measured: Optional[Measured] = None) -> dict[str, str]:
    """The entries of a quantized file."""
    quantized: dict[str, Any] = {'by': f'nncf {version("nncf")}'}
    if measured is not None:
        quantized['agreement'] = measured.agreement
    about = original.about | {'dtype': 'int8', 'quantized': quantized}
    return {KEY: json.dumps(about)}


def hidden_path(out: Path) -> Path:
    """The folder next to a file for what is not finished."""
    return out.with_name(f'.{out.name}.partial')


@contextmanager
def hidden_folder(out: Path) -> Iterator[Path]:
    """Create `hidden_path`, and remove it at the end."""
    folder = hidden_path(out)
    with folder_to_fill(out.parent):
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(out: Path) -> None:
    """Remove what a run that was killed has left: its hidden folder, and the files that it had
    moved out of it. The model is moved last: while it is there, the run was not finished."""
    folder = hidden_path(out)
    if (folder / out.name).exists():
        for file in files_of(out):
            if not (folder / file.name).exists():
                file.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def summary(results: Mapping[str, Any]) -> str:
    """The results of `quantize_file` as a table for people."""
    latency = results['latency_ms']
    megabytes = {name: size / 1e6 for name, size in results['bytes'].items()}
    height, width = latency['size']
    cores = 'core' if latency['cores'] == 1 else 'cores'
    head = ['', 'float32', 'int8']
    times = [f'ms per image, {height}x{width}, {latency["cores"]} {cores}']
    times += [f'{latency["float32"]:.1f}', f'{latency["int8"]:.1f}']
    speeds = ['times as fast', '', f'{latency["float32"] / latency["int8"]:.2f}']
    sizes = ['MB', f'{megabytes["float32"]:.1f}', f'{megabytes["int8"]:.1f}']
    shares = ['agreement', '', f'{results["agreement"]:.2%}']
    rows = [times, speeds, sizes, shares]
    accuracy = results['accuracy']
    if accuracy is not None:
        points = [accuracy['measure'], f'{accuracy["float32"]:.2f}', f'{accuracy["int8"]:.2f}']
        rows.append(points)
    in_bfloat16 = results['bfloat16']
    if in_bfloat16 is not None:  # the float32 file runs in it
        head.append('bfloat16')
        times.append(f'{latency["bfloat16"]:.1f}')
        speeds.append(f'{latency["float32"] / latency["bfloat16"]:.2f}')
        sizes.append(f'{megabytes["float32"]:.1f}')
        shares.append(f'{in_bfloat16["agreement"]:.2%}')
        if accuracy is not None:
            points.append(f'{in_bfloat16["accuracy"]:.2f}')
    return text_table(head, rows)


def speed_warning(results: Mapping[str, Any]) -> str:
    """A line for a model that 8 bits make slower than it is otherwise; empty for others."""
    latency = results['latency_ms']
    fastest = 'float32'
    advice = f'use {results["from"]} here'
    if latency['bfloat16'] is not None and latency['bfloat16'] < latency['float32']:
        fastest = 'bfloat16'
        advice += ' with --backend openvino --dtype bfloat16'
    ratio = latency[fastest] / latency['int8']
    if ratio >= 1:
        return ''
    return f'INT8 is slower than {fastest} on this machine, {ratio:.2f} times as fast: {advice}'
