"""From what a user calls a model to the model."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from ...archs import ARCHS, COLUMNAR_ARCHS
from ...tasks.trained import TRAINED
from ..config.shipped import (
    check_config_file,
    is_config_name,
    shipped_configs,
    typed_path,
)
from ..images.formats import IMAGE_ENDINGS
from ..images.inputs import is_address, local_path
from ..tooling.command import UserError
from ..tooling.names import did_you_mean
from .exported import ExportedModel
from .protocol import Model, check_score_thr
from .sessions import is_openvino_format

EXPORTED = ('.onnx', '.xml')  # .xml: OpenVINO's own format
WEIGHTS = ('.pth', '.pt', '.safetensors')


class Accepted(NamedTuple):
    """What a command takes as a model."""

    kinds: str  # in words
    names: Collection[str]  # that stand for a model
    files: Collection[str]  # how the names of files end


PREDICTING = Accepted(
    'CONFIG CHECKPOINT, an exported model (.onnx, .xml), a checkpoint with its config inside, or '
    'the name of a trained model',
    TRAINED,
    (*EXPORTED, *WEIGHTS),
)
EXPORTING = Accepted(
    'CONFIG CHECKPOINT, ARCHITECTURE CHECKPOINT, a checkpoint with its config inside, or the name '
    'of a trained model',
    (*TRAINED, *ARCHS, *COLUMNAR_ARCHS),
    WEIGHTS,
)
SERVING = Accepted(
    'an exported model (.onnx, .xml), or the name of a trained model', TRAINED, EXPORTED
)
FILE = Accepted('an exported model (.onnx, .xml)', (), EXPORTED)


class ModelFiles(NamedTuple):
    """The files of a model, which has one of the first three."""

    exported: Optional[Path] = None
    trained: Optional[str] = None  # the name of a trained model; its checkpoint may be given
    checkpoint: Optional[str] = None  # a path or an address
    config: Optional[str] = None  # of the checkpoint, if it has none inside


def resolve_model(
    model: str, more: Sequence[str] = (), accepted: Accepted = PREDICTING
) -> tuple[ModelFiles, list[str]]:
    """The files that a model and the words after it name, and the words that are left.

    The first word decides: an exported model ends with .onnx or .xml; a config with .py, .json or
    .yaml, and its checkpoint is the next word; others are a checkpoint with its config inside, or
    the name of a trained model, which a file with its weights may follow.

    Args:
        model: the first word.
        more: the words after it.
        accepted: what the command takes, for the message about what is no model.

    Raises:
        UserError: it is none of them.
    """
    words = list(more)
    path = Path(model).expanduser()
    if model.lower().endswith(EXPORTED):
        return ModelFiles(exported=local_path(model).expanduser()), words
    if is_config_name(model):
        check_config_file(model)
        if not words:
            raise UserError(f'{model} is a config; its checkpoint comes next')
        return ModelFiles(checkpoint=words[0], config=model), words[1:]
    if path.suffix.lower() in IMAGE_ENDINGS:
        raise UserError(f'{model} is an image; the model comes first, and must be {accepted.kinds}')
    if path.is_file():
        return ModelFiles(checkpoint=str(path)), words
    # Where there is no such file, reading says so.
    if is_address(model) or model.lower().endswith(WEIGHTS):
        return ModelFiles(checkpoint=model), words
    if model in TRAINED:
        if words and words[0].lower().endswith(WEIGHTS):
            return ModelFiles(trained=model, checkpoint=words[0]), words[1:]
        return ModelFiles(trained=model), words
    if path.is_dir():
        raise UserError(line_about_folder(path, accepted))
    raise UserError(line_about_unknown(model, accepted))


def exported_path(model: str) -> Path:
    """The path of an exported model, for commands that take nothing else.

    Raises:
        UserError: there is no such file.
    """
    path = local_path(model)
    if path.is_dir():
        raise UserError(line_about_folder(path, FILE))
    if path.is_file():
        if path.suffix.lower() not in EXPORTED:
            raise UserError(f'{model} must be {FILE.kinds}; cpvt export writes one')
        return path
    if path.suffix.lower() in EXPORTED:
        neighbours = [p.name for p in path.parent.glob('*') if p.suffix.lower() in EXPORTED]
        raise UserError(f'no model at {model}{did_you_mean(path.name, neighbours)}')
    raise UserError(line_about_unknown(model, FILE))


def line_about_folder(folder: Path, accepted: Accepted) -> str:
    """What to give instead of a folder."""
    line = f'{folder} is a folder; the model must be {accepted.kinds}'
    inside = [path for path in folder.iterdir() if path.suffix.lower() in accepted.files]
    if inside:
        newest = max(inside, key=lambda path: path.lstat().st_mtime)
        line += f'; did you mean {newest}?'
    return line


def line_about_unknown(name: str, accepted: Accepted) -> str:
    """What is wrong with a name that no model has, and what to give instead."""
    shipped = shipped_configs()
    meant = did_you_mean(name, accepted.names)
    if name in shipped:
        what = f'{name} is a config of this package ({typed_path(shipped[name])})'
    elif name in TRAINED:
        what = f'{name} is a trained model; cpvt export {name} --out {name}.onnx makes a file of it'
    elif name in ARCHS or name in COLUMNAR_ARCHS:
        what = f'{name} is the architecture of a backbone'
    elif accepted.names:
        what = f'no model at {name}, and none of this name in cpvt models'
    else:
        what = f'no model at {name}'
    return what + (meant or f'; the model must be {accepted.kinds}')


def open_model(
    files: ModelFiles,
    *,
    device: Optional[str] = None,
    score_thr: Optional[float] = None,
    shorter_side: Optional[int] = None,
    backend: Optional[str] = None,
    threads: int = 1,
    dtype: str = 'float32',
    cfg_options: Sequence[str] = (),
) -> Model:
    """Open a model.

    Args:
        files: see `resolve_model`.
        device: 'cpu', or what PyTorch, onnxruntime or OpenVINO call a device.
        score_thr: leave out boxes with a lower score; None takes the model's own threshold. Of
            other results than boxes it has no effect; see `line_about_threshold`.
        shorter_side: of the input in pixels, of an exported or trained model; None takes its own.
        backend: of an exported model, 'onnxruntime' or 'openvino'.
        threads: that will call `predict` of an exported model at the same time.
        dtype: float32 or, of a model in PyTorch or OpenVINO, bfloat16.
        cfg_options: override settings of a config.

    Raises:
        UserError: it cannot be opened; one line that says why.
    """
    check_score_thr(score_thr)
    model: Model
    if files.exported is not None:
        if cfg_options:
            raise UserError(f'cfg_options are for configs; {files.exported} is exported')
        if backend == 'onnxruntime' and is_openvino_format(files.exported):
            raise UserError(f'{files.exported} is a model of OpenVINO; leave out onnxruntime')
        backend = backend or 'onnxruntime'
        path = exported_path(str(files.exported))
        exported = ExportedModel(path, backend, device, threads, score_thr, dtype)
        model = exported if shorter_side is None else exported.with_shorter_side(shorter_side)
    elif files.trained is not None:
        if backend is not None or cfg_options:
            raise UserError(
                f'backend is for exported models and cfg_options for configs; {files.trained} is a '
                'trained model in PyTorch'
            )
        try:
            from .pytorch.model import TrainedModel
        except ImportError as error:
            raise UserError(
                f"{files.trained} needs torch and torchvision; pip install '.[torch]' in a "
                f'clone of cpvt_pyramid ({error})'
            ) from error
        trained = TrainedModel(files.trained, files.checkpoint, device, score_thr, dtype)
        model = trained if shorter_side is None else trained.with_shorter_side(shorter_side)
    else:
        if shorter_side is not None or backend is not None:
            raise UserError(
                f'a shorter side and a backend are for exported models; {files.checkpoint} is a '
                'checkpoint, whose config has a size'
            )
        try:
            from .openmmlab.model import open_trained
        except ImportError as error:
            raise UserError(
                f'{files.config or files.checkpoint} is not an exported model '
                f'({", ".join(EXPORTED)}), and others need torch and OpenMMLab; run make setup in '
                f"a clone of cpvt_pyramid, or pip install '.[mm]' there ({error})"
            ) from error
        assert files.checkpoint is not None
        model = open_trained(
            files.checkpoint,
            files.config,
            cfg_options=cfg_options,
            device=device,
            dtype=dtype,
            score_thr=score_thr,
        )
    return model
