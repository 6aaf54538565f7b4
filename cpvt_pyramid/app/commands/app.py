"""Serve a web page on which anyone can try an exported or a trained model.

    cpvt app MODEL.onnx
    cpvt app retinanet_pvt_v2_b2_coco

The page is also an interface for other programs:

    curl --data-binary @photo.jpg 'http://127.0.0.1:7860/predict?shorter_side=600&score_thr=0.5'

answers JSON with `summary`, `warnings`, `picture` (a data URL) and, of a detector, `detections`, or
with an `error` of one line. The parameters are optional.
"""

from collections.abc import Sequence
from typing import Optional

from ..predict.options import ModelOptions
from ..tooling.command import imports_of, run_command

GROUP = 'deployment'


def app(
    model: str,
    *,
    samples: Optional[str] = None,
    host: str = '127.0.0.1',
    port: int = 7860,
    options: ModelOptions,
) -> None:
    """Serve the page until it is interrupted.

    Args:
        model: an exported model (.onnx, .xml), or the name of a trained model (cpvt models), which
            needs torch.
        samples: folder of images to pick from, which everyone who opens the page sees; by
            default the folder with the model's name, or else the model's folder.
        host: address to listen on; 0.0.0.0 lets other machines in, without a password.
        port: port to listen on; 0 takes a free one.
    """
    with imports_of('cpvt app', extra='app'):
        from ..page.start import serve

    serve(model, samples=samples, host=host, port=port, options=options)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(app, argv, 'the page is closed')
