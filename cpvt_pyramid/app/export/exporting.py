"""From what a user calls a model to the exported file.

mm is imported inside functions: backbones and trained models by name need none of it.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from torch import nn
from tqdm import tqdm

from ... import CPVT, CPVTPyramid, load_weights
from ...archs import ARCHS, COLUMNAR_ARCHS
from ...tasks.trained import TRAINED
from ..images.formats import IMAGE_ENDINGS
from ..images.reading import load_image
from ..predict.opening import EXPORTING, resolve_model
from ..tooling.command import UserError, one_line
from ..tooling.files import check_file, check_new
from ..tooling.progress import working
from .about import Settings
from .files import Written, write_verified
from .models import exportable
from .photographs import PHOTOGRAPHS, given_photographs

SAMPLES = ('astronaut', 'chelsea', 'coffee', 'rocket', 'retina')  # of scikit-image


class Source(NamedTuple):
    """A model that is exported."""

    model: nn.Module  # in evaluation mode, with its weights
    config: dict[str, Any]  # entries of the metadata that the config knows
    images: Optional[Path] = None  # the folder of the config's test set


def export_file(
    path: Path,
    model: str,
    checkpoint: Optional[str],
    settings: Settings,
    *,
    probabilities: bool = False,
    backbone: bool = False,
    images: Sequence[str] = (),
    cfg_options: Sequence[str] = (),
) -> Written:
    """Export a model to a file that does not exist yet; `cpvt export` describes the arguments.

    Raises:
        UserError: it cannot be exported, or gives other results than PyTorch.
    """
    if path.suffix != '.onnx':
        raise UserError(f'--out must end in .onnx, got {path}')
    check_file(path)
    check_new(path)
    with working('loading the model'):
        source = open_source(model, checkpoint, cfg_options, backbone)
    photographs = given_photographs(images) if images else own_photographs(source.images)
    graph = exportable(source.model, probabilities, backbone)
    graph.check(settings)
    return write_verified(path, graph, source.model, source.config, photographs, settings, tqdm)


def open_source(
    name: str, checkpoint: Optional[str], cfg_options: Sequence[str], backbone: bool = False
) -> Source:
    """Build a model and load its weights.

    Args:
        name: of an architecture, or what `resolve_model` takes.
        checkpoint: of an architecture or a config, a path or an address.
        cfg_options: override settings of the config.
        backbone: whether only the backbone is exported.
    """
    if name in ARCHS or name in COLUMNAR_ARCHS:
        if checkpoint is None:
            raise UserError(f'{name} is an architecture; its checkpoint comes next')
        if cfg_options:
            raise UserError(f'--cfg-options needs a config; {name} is an architecture')
        return Source(backbone_alone(name, checkpoint), {'arch': name})

    files, left = resolve_model(name, [] if checkpoint is None else [checkpoint], EXPORTING)
    if files.exported is not None:
        raise UserError(f'{name} is exported already')
    if left:
        raise UserError(f'{name} has its own weights; leave out {checkpoint}')
    if files.trained is not None:
        if cfg_options:
            raise UserError(f'--cfg-options needs a config; {name} is a trained model in PyTorch')
        if backbone:
            trained = TRAINED[files.trained]
            raise UserError(
                f'--backbone needs a config; export the backbone of {name} by cpvt export '
                f'{trained.arch} {files.checkpoint or trained.url}'
            )
        return trained_by_name(files.trained, files.checkpoint)
    assert files.checkpoint is not None
    return trained_from_config(files.checkpoint, files.config, cfg_options)


def backbone_alone(arch: str, checkpoint: str) -> nn.Module:
    """A backbone; of a columnar architecture, the classifier."""
    model = (CPVTPyramid if arch in ARCHS else CPVT)(arch).eval()
    try:
        load_weights(model, checkpoint)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    return model


def trained_by_name(name: str, checkpoint: Optional[str]) -> Source:
    """A trained model in PyTorch, without OpenMMLab."""
    from ..predict.pytorch.model import about_trained, load_by_name

    model = load_by_name(name, checkpoint)
    return Source(model, about_trained(name, model))


def trained_from_config(
    checkpoint: str, config: Optional[str], cfg_options: Sequence[str]
) -> Source:
    """A detector or a segmentor of OpenMMLab."""
    from ..config.parts import leaves
    from ..predict.openmmlab.model import load_from_config

    model, cfg, weights = load_from_config(checkpoint, config, cfg_options, 'cpu')
    data = next(leaves(cfg.test_dataloader.dataset))
    prefix = data.get('data_prefix', {})
    folder = Path(data.get('data_root') or '', prefix.get('img', prefix.get('img_path', '')))
    return Source(model, about_config(cfg, weights), folder)


def about_config(cfg: Any, checkpoint: dict) -> dict[str, Any]:
    """What a config and a checkpoint say about a model: classes, palette, resizing, architecture.
    Warns of a test pipeline that does more than resize."""
    from ..config.parts import dataset_meta, kind_of
    from ..config.pipelines import pipeline_of

    meta = dataset_meta(cfg, checkpoint)
    backbone = cfg.model.backbone
    arch = backbone.get('arch', '')
    if not isinstance(arch, str):
        arch = ''  # its numbers
    return {
        'classes': list(meta['classes']),
        'palette': [[int(v) for v in color] for color in meta['palette']],
        'resize': resize_of(pipeline_of(cfg, 'test')),
        'arch': f'{kind_of(cfg.model)}, {kind_of(backbone)} {arch}'.strip(),
    }


def resize_of(pipeline: Sequence[dict]) -> Optional[dict[str, float]]:
    """The longest shorter and longer side to which a test pipeline resizes images, or None. Warns
    of steps that do something else."""
    from ..config.parts import kind_of
    from ..config.pipelines import keeps_ratio, keeps_size, scales_of

    resize = None
    for step in pipeline:
        kind = kind_of(step)
        if kind.startswith(('Load', 'Pack')) or keeps_size(step):
            continue
        scales = scales_of(step)
        if kind.endswith('Resize') and keeps_ratio(step) and len(scales) == 1:
            long, short = scales[0]
            resize = {'short': short, 'long': long}
            continue
        warnings.warn(
            f'the test pipeline has a step {dict(step)}, which the file does not describe; give it '
            'images as that step leaves them',
            stacklevel=1,
        )
    return resize


def own_photographs(folder: Optional[Path]) -> list[np.ndarray]:
    """The first images in a folder that can be read, or else those of scikit-image."""
    images: list[np.ndarray] = []
    paths = sorted(folder.iterdir()) if folder and folder.is_dir() else []
    for path in paths:
        if path.suffix.lower() not in IMAGE_ENDINGS or len(images) == PHOTOGRAPHS:
            continue
        try:
            images.append(load_image(path))
        except OSError as error:
            warnings.warn(f'left out of the comparison: {path}: {one_line(error)}', stacklevel=2)
    if images:
        return images
    import skimage.data

    return [getattr(skimage.data, name)() for name in SAMPLES]
