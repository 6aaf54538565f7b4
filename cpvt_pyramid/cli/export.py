"""Export a trained model to one file for images of all sizes.

    cpvt export configs/retinanet_cpvt_s.py epoch_12.pth --out retinanet.onnx
    cpvt export retinanet_pvt_v2_b2_coco --out retinanet.onnx
    cpvt export pcpvt_small timm://twins_pcpvt_small.in1k --out backbone.onnx

The file holds the whole model, from pixels to final boxes or labels, and is written only after it
gave the results of PyTorch on real images. The comparison is in NAME.report.md and .json next to
it. docs/deployment.md says how to run it, docs/file_format.md what its inputs and outputs are.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..tooling.command import UserError, run_command

UNFIT = 3  # exit status: the file was written, but must not be used in one of the runtimes

if TYPE_CHECKING:
    import numpy as np
    from torch import nn


def export(
    config: str,
    checkpoint: Optional[str] = None,
    *,
    out: str,
    size: Optional[str] = None,
    half: bool = False,
    no_valid: bool = False,
    probabilities: bool = False,
    backbone: bool = False,
    images: Sequence[str] = (),
    cfg_options: Sequence[str] = (),
) -> int:
    """Export a model.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py; the name of a trained model
            (cpvt models); or the name of an architecture, for example pcpvt_small, for the backbone
            (cpvt_*: the classifier) alone.
        checkpoint: weights of the model, a path or an address (timm://, hf://, https://); by
            default those of the trained model.
        out: file to write, such as model.onnx.
        size: fixed height and width of the images, for runtimes that need them.
        half: weights and computation in float16.
        no_valid: no input for the true sizes of the images; those of a batch must be equal.
        probabilities: of a segmentor, those of all classes instead of labels.
        backbone: the maps of the backbone of a config alone.
        images: photographs or folders for the comparison with PyTorch; by default those of
            the config's test set, or else those of scikit-image.
        cfg_options: override settings of the config, for example
            model.test_cfg.score_thr=0.1.

    Returns:
        The exit status: 3 if the file was written but gives other results in OpenVINO, else 0.
    """
    from tqdm import tqdm

    from ..export.about import Settings
    from ..export.files import write_verified
    from ..export.models import exportable
    from ..tooling.files import check_file

    path = Path(out)
    if path.suffix != '.onnx':
        raise UserError(f'--out must end in .onnx, got {out}')
    if path.exists():
        raise UserError(f'{out} exists; remove it, or choose another name')
    check_file(path)
    settings = Settings(parse_size(size), half, not no_valid)
    if checkpoint is None:
        checkpoint = config
        config = config_of_trained(config)
    model, about, folder = load(config, checkpoint, cfg_options, backbone)
    photographs = find_photographs(images, folder)
    graph = exportable(model, probabilities, backbone)
    files, unfit = write_verified(path, graph, model, about, photographs, settings, tqdm)
    print(f'wrote {", ".join(map(str, files))}')
    if unfit:
        print(unfit)
        return UNFIT
    return 0


def config_of_trained(name: str) -> str:
    """The path of the config of a trained model.

    Raises:
        UserError: there is none of this name.
    """
    from ..trained import TRAINED, similar_name

    if name not in TRAINED:
        similar = similar_name(name)
        hint = f'; did you mean {similar}?' if similar else ''
        raise UserError(
            f'give a checkpoint after {name}, which is not the name of a trained model{hint}'
        )
    return str(TRAINED[name].config_path)


def parse_size(text: Optional[str]) -> Optional[tuple[int, int]]:
    """Height and width from text such as '800x1344'."""
    if text is None:
        return None
    height, _, width = text.partition('x')
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise UserError(f'--size must be HEIGHTxWIDTH, such as 800x1344, got {text}')
    return int(height), int(width)


def load(
    config: str, checkpoint: str, cfg_options: Sequence[str], backbone: bool
) -> tuple['nn.Module', dict[str, Any], Optional[Path]]:
    """The model with its weights, the metadata from its config, and the folder of its test set."""
    from ..archs import ARCHS, COLUMNAR_ARCHS

    if config in ARCHS or config in COLUMNAR_ARCHS:
        from .. import CPVT, CPVTPyramid, load_weights

        backbone_alone = (CPVTPyramid if config in ARCHS else CPVT)(config).eval()
        try:
            load_weights(backbone_alone, checkpoint)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(str(error)) from error
        return backbone_alone, {'arch': config}, None

    from ..config.load import load_config
    from ..config.parts import leaves
    from ..export.from_config import about_config
    from ..predict.openmmlab.models import build_model, fetch_checkpoint, load_whole_model

    cfg = load_config(config, cfg_options)
    weights = fetch_checkpoint(checkpoint)
    model = build_model(cfg, 'cpu')
    load_whole_model(model, weights, checkpoint)
    about = about_config(cfg, weights)
    data = next(leaves(cfg.test_dataloader.dataset))
    prefix = data.get('data_prefix', {})
    folder = Path(data.get('data_root') or '', prefix.get('img', prefix.get('img_path', '')))
    return model, about, folder


def find_photographs(inputs: Sequence[str], folder: Optional[Path]) -> list['np.ndarray']:
    """Up to eight images, (H, W, 3) RGB."""
    from ..predict.images import load_image
    from ..tooling.images import IMAGE_ENDINGS
    from ..tooling.inputs import find_inputs

    paths: list[Path] = []
    if inputs:
        paths = list(find_inputs(inputs))
    elif folder and folder.is_dir():
        paths = sorted(folder.iterdir())
    images = []
    for path in [path for path in paths if path.suffix.lower() in IMAGE_ENDINGS][:8]:
        try:
            images.append(load_image(path))
        except OSError as error:
            raise UserError(f'--images {path}: {error}') from error
    if images:
        return images
    import skimage.data

    names = ('astronaut', 'chelsea', 'coffee', 'rocket', 'retina')
    return [getattr(skimage.data, name)() for name in names]


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(export, argv)
