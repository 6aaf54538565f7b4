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
from .options import CONFIGS, DEFAULTS, EXPORTED, NAMED, ModelOptions
from .protocol import Model

EXPORTED_ENDINGS = ('.onnx', '.xml')  # .xml: OpenVINO's own format
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
    (*EXPORTED_ENDINGS, *WEIGHTS),
)
EXPORTING = Accepted(
    'CONFIG CHECKPOINT, ARCHITECTURE CHECKPOINT, a checkpoint with its config inside, or the name '
    'of a trained model',
    (*TRAINED, *ARCHS, *COLUMNAR_ARCHS),
    WEIGHTS,
)
SERVING = Accepted(
    'an exported model (.onnx, .xml), or the name of a trained model', TRAINED, EXPORTED_ENDINGS
)
FILE = Accepted('an exported model (.onnx, .xml)', (), EXPORTED_ENDINGS)


class ModelFiles(NamedTuple):
    """The files of a model, which has one of the first three."""

    exported: Optional[Path] = None
    trained: Optional[str] = None  # the name of a trained model; its checkpoint may be given
    checkpoint: Optional[str] = None  # a path or an address
    config: Optional[str] = None  # of the checkpoint, if it has none inside

    @property
    def kind(self) -> str:
        """The kind of the model, in words; see `options`."""
        if self.exported is not None:
            return EXPORTED
        return CONFIGS if self.trained is None else NAMED

    @property
    def shown(self) -> str:
        """What messages call the model."""
        return str(self.exported or self.trained or self.checkpoint)


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
    if model.lower().endswith(EXPORTED_ENDINGS):
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
        if path.suffix.lower() not in EXPORTED_ENDINGS:
            raise UserError(f'{model} must be {FILE.kinds}; cpvt export writes one')
        return path
    if path.suffix.lower() in EXPORTED_ENDINGS:
        neighbours = [p.name for p in path.parent.glob('*') if p.suffix.lower() in EXPORTED_ENDINGS]
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


def open_model(files: ModelFiles, options: ModelOptions = DEFAULTS, *, threads: int = 1) -> Model:
    """Open a model.

    Args:
        files: see `resolve_model`.
        options: how. Of other results than boxes, a threshold has no effect; see
            `line_about_threshold`.
        threads: that will call `predict` of an exported model at the same time.

    Raises:
        UserError: it cannot be opened; one line that says why.
    """
    options.check_kind(files.kind, files.shown)
    if files.exported is not None:
        return ExportedModel(exported_path(str(files.exported)), options, threads)
    if files.trained is not None:
        try:
            from .pytorch.model import TrainedModel
        except ImportError as error:
            raise UserError(
                f"{files.trained} needs torch and torchvision; pip install '.[torch]' in a "
                f'clone of cpvt_pyramid ({error})'
            ) from error
        return TrainedModel(files.trained, files.checkpoint, options)
    try:
        from .openmmlab.model import open_trained
    except ImportError as error:
        raise UserError(
            f'{files.shown} is not an exported model ({", ".join(EXPORTED_ENDINGS)}), and others '
            'need torch and OpenMMLab; run make setup in a clone of cpvt_pyramid, or pip install '
            f"'.[mm]' there ({error})"
        ) from error
    assert files.checkpoint is not None
    return open_trained(files.checkpoint, files.config, options)
