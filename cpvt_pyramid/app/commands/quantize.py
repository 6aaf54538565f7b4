"""Quantize an exported detector or segmentor to 8-bit integers, for OpenVINO.

    cpvt quantize retinanet.onnx photos
    cpvt quantize retinanet.onnx photos/train --data data.yaml

Some of the images calibrate the model, and the others tell whether it is good enough. The
result runs wherever OpenVINO does: `cpvt infer retinanet-int8.xml photo.jpg`. A report,
NAME.report.json, is written next to it. docs/export.md explains the options and the figures.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Optional

from ..tooling.command import UserError, check_at_least, run_command

GROUP = 'deployment'


def quantize(
    model: str,
    images: Sequence[str],
    *,
    out: Optional[str] = None,
    compare: Sequence[str] = (),
    data: Optional[str] = None,
    split: Optional[Literal['train', 'val', 'test']] = None,
    agreement: float = 0.95,
    drop: float = 0.5,
) -> None:
    """Quantize a model, unless its results change too much.

    Args:
        model: a .onnx file of cpvt export, in float32 or float16.
        images: photographs, or folders with them, such as the model will see. They calibrate,
            and without --compare every other one is compared instead.
        out: the .xml file to write; by default NAME-int8.xml next to the model.
        compare: photographs, or folders with them, on which the models are compared.
        data: instead of --compare: annotated images on which AP or mIoU are compared, a data.yaml
            or a folder, as in cpvt test.
        split: split of the data; by default the first of test, val and train that has annotations.
        agreement: share of the boxes or pixels on which the models must agree, without
            --data.
        drop: points of AP or mIoU that may be lost, with --data.
    """
    from ..predict.opening import exported_path

    source = exported_path(model)
    path = Path(out) if out else source.with_name(f'{source.stem}-int8.xml')
    if path.suffix != '.xml':
        raise UserError(f'--out must end in .xml, got {path}')
    if not 0 <= agreement <= 1:
        raise UserError(f'--agreement must be in [0, 1], got {agreement}')
    check_at_least('drop', drop, 0)
    if split and not data:
        raise UserError('--split needs --data')

    from ..export.quantization import Limits, quantize_images

    quantize_images(
        source,
        path,
        images,
        compare,
        Limits(agreement, drop),
        Path(data) if data else None,
        split,
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(quantize, argv)
