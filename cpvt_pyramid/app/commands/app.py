"""Serve a web page on which anyone can try an exported or a trained model.

    cpvt app MODEL.onnx
    cpvt app retinanet_pvt_v2_b2_coco

The page is also an interface for other programs:

    curl --data-binary @photo.jpg 'http://127.0.0.1:7860/predict?shorter_side=600&score_thr=0.5'

answers JSON with `summary`, `warnings`, `picture` (a data URL) and, of a detector, `detections`, or
with an `error` of one line. The parameters are optional.
"""

from collections.abc import Sequence
from typing import Literal, Optional

from ..tooling.command import imports_of, run_command

GROUP = 'deployment'


def app(
    model: str,
    *,
    samples: Optional[str] = None,
    backend: Optional[Literal['onnxruntime', 'openvino']] = None,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
    host: str = '127.0.0.1',
    port: int = 7860,
) -> None:
    """Serve the page until it is interrupted.

    Args:
        model: a .onnx file of cpvt export, or the name of a trained model (cpvt models), which
            needs torch.
        samples: folder of images to pick from, which everyone who opens the page sees; by
            default the folder with the model's name, or else the model's folder.
        backend: what runs an exported model; by default onnxruntime.
        dtype: of a trained model, or of an exported one in OpenVINO.
        host: address to listen on; 0.0.0.0 lets other machines in, without a password.
        port: port to listen on; 0 takes a free one.
    """
    with imports_of('cpvt app', extra='app'):
        from ..page.start import serve

    serve(model, samples=samples, backend=backend, dtype=dtype, host=host, port=port)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(app, argv, 'the page is closed')
