"""Verify that an ONNX file gives an image the same results alone and in batches.

    cpvt verify MODEL.onnx [--device cuda]
    cpvt verify MODEL.onnx --backend openvino --device gpu
    cpvt verify MODEL.onnx --backend openvino --dtype bfloat16
    cpvt verify DETECTOR.onnx --images photographs

The file may be of any exporter: a detector, segmentor or classifier that takes images in batches of
any size. It runs on images, synthetic ones or your own, alone and in batches, twice, in reverse
order, and on copies of an image; docs/invariance.md explains the table. A file of cpvt export is
also compared with the outputs of PyTorch that it carries. The exit status is 1 if results depend on
the batch, or differ from PyTorch's.
"""

from collections.abc import Sequence
from typing import Optional

from ..predict.options import RuntimeOptions
from ..tooling.command import UserError, check_at_least, run_command
from ..tooling.sizes import Size

GROUP = 'deployment'


def verify(
    model: str,
    *,
    size: Optional[Size] = None,
    value_range: tuple[float, float] = (0.0, 1.0),
    batch_size: int = 8,
    tolerance: Optional[float] = None,
    bitwise: bool = False,
    images: Sequence[str] = (),
    runtime: RuntimeOptions,
) -> int:
    """Run an ONNX file on images alone and in batches, and compare.

    Args:
        model: a .onnx file, or an .xml file of OpenVINO.
        size: size of the images; by default 256x320, or that of the file.
        value_range: range of the pixels. Integers, and the pixels of files of this package, are
            always 0 to 255.
        batch_size: images of the largest batch of one size; smaller ones are tried, too.
        tolerance: largest difference / scale of a value; by default 0.0001, 0.01 for files in
            float16, 0.05 for quantized ones and bfloat16.
        bitwise: results in a batch of one size must be bit-identical.
        images: photographs or folders to use instead of synthetic images, resized to the
            size of the images; needed for a detector that finds nothing in synthetic ones.

    Returns:
        The exit status: 1 if results depend on the batch or differ from PyTorch's, else 0.
    """
    from ..export.batches import VerifyOptions, verify_file
    from ..export.photographs import given_photographs
    from ..predict.opening import exported_path

    check_at_least('batch_size', batch_size, 2)
    check_at_least('tolerance', tolerance, 0)
    if not value_range[0] < value_range[1]:
        raise UserError(f'--value-range must rise, got {value_range[0]} {value_range[1]}')
    photographs = given_photographs(images) if images else []
    options = VerifyOptions(runtime, size, value_range, batch_size, tolerance, bitwise, photographs)
    return int(not verify_file(exported_path(model), options))


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(verify, argv, 'nothing was verified')
