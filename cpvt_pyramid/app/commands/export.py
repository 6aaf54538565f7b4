"""Export a trained model to one file for images of all sizes.

    cpvt export configs/retinanet_cpvt_s.py epoch_12.pth --out retinanet.onnx
    cpvt export retinanet_pvt_v2_b2_coco --out retinanet.onnx
    cpvt export pcpvt_small timm://twins_pcpvt_small.in1k --out backbone.onnx

The file holds the whole model, from pixels to final boxes or labels, and is written only after it
gave the results of PyTorch on real images. The comparison is in NAME.report.md and .json next to
it. docs/export.md says how to run the file, and what its inputs and outputs are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..tooling.command import imports_of, run_command
from ..tooling.sizes import Size

GROUP = 'deployment'
UNFIT = 3  # exit status: the file was written, but must not be used in one of the runtimes


def export(
    model: str,
    checkpoint: Optional[str] = None,
    *,
    out: str,
    size: Optional[Size] = None,
    half: bool = False,
    no_valid: bool = False,
    probabilities: bool = False,
    backbone: bool = False,
    images: Sequence[str] = (),
    cfg_options: Sequence[str] = (),
) -> int:
    """Export a model.

    Args:
        model: name of a trained model (cpvt models), which needs no OpenMMLab; config, or
            checkpoint with its config inside; or the name of an architecture, for example
            pcpvt_small, for the backbone (cpvt_*: the classifier) alone.
        checkpoint: weights of a config or an architecture, a path or an address (timm://, hf://,
            https://); of a trained model, its file, which is otherwise downloaded.
        out: file to write, such as model.onnx.
        size: fixed size of the images, for runtimes that need one.
        half: store weights in float16, for a file of half the size; computation is in float32.
        no_valid: leave out the input for the true sizes of images, which must then be equal in a
            batch.
        probabilities: make a segmentor return probabilities of all classes instead of labels.
        backbone: export only the backbone of a config, which returns its maps.
        images: photographs or folders for the comparison with PyTorch; by default those of
            a config's test set, or else those of scikit-image.
        cfg_options: override settings of the config, for example
            model.test_cfg.score_thr=0.1.

    Returns:
        The exit status: 3 if the file was written but gives other results in OpenVINO, else 0.
    """
    with imports_of('cpvt export', extra='export'):
        from ..export.about import Settings
        from ..export.exporting import export_file

    settings = Settings(size, half, not no_valid)
    files, unfit = export_file(
        Path(out),
        model,
        checkpoint,
        settings,
        probabilities=probabilities,
        backbone=backbone,
        images=images,
        cfg_options=cfg_options,
    )
    print(f'wrote {", ".join(map(str, files))}')
    if unfit:
        print(unfit)
        return UNFIT
    return 0


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(export, argv)
