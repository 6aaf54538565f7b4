"""The options of commands that run a model. Each is declared once, with its check and its help: a
command has one of these classes as the type of a parameter, or one that inherits from it."""

# Imported for --help: neither numpy nor Pillow.
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Optional

from ..tooling.command import OptionError, check_at_least
from ..tooling.files import Format

BACKENDS = ('onnxruntime', 'openvino')
DTYPES = ('float32', 'bfloat16')
ALIGN = 32  # pixels, the largest stride: the sides and the overlap of tiles are multiples of it
# Kinds of models, in words.
EXPORTED, NAMED, CONFIGS = 'exported models', 'trained models by name', 'models with a config'


def option(default: Any = None, *, of: tuple[str, ...] = (), changes_results: bool = True) -> Any:
    """A field of options.

    Args:
        default: its value if the user gives none.
        of: the only kinds of models that have this option; by default all.
        changes_results: whether other values are those of another run; see `run_record`.
    """
    return field(default=default, metadata={'of': of, 'changes_results': changes_results})


@dataclass(frozen=True)
class RuntimeOptions:
    """Where a model runs.

    Args:
        device: cpu, cuda:1 or another device of torch; for an exported model cpu, cuda (in
            onnxruntime), gpu (in OpenVINO), or what the backend calls it. By default a GPU if there
            is one.
        backend: runtime of an exported model; by default onnxruntime, and openvino for .xml.
        dtype: bfloat16 is faster where the processor multiplies it. The last layers of detectors,
            and their boxes, stay in float32. Exported models need OpenVINO for bfloat16.

    Raises:
        OptionError: an option is out of its range, or has no effect with the others. The same
            holds for the other classes of this file.
    """

    device: Optional[str] = option(changes_results=False)
    backend: Optional[Literal['onnxruntime', 'openvino']] = option(of=(EXPORTED,))
    dtype: Literal['float32', 'bfloat16'] = option('float32')

    def __post_init__(self) -> None:
        if self.backend not in (None, *BACKENDS):
            one_of = ', '.join(BACKENDS)
            raise OptionError(f'{{backend}} must be one of {one_of}, got {self.backend!r}')
        if self.dtype not in DTYPES:
            one_of = ', '.join(DTYPES)
            raise OptionError(f'{{dtype}} must be one of {one_of}, got {self.dtype!r}')

    def check_kind(self, kind: str, model: str) -> None:
        """Check that models of a kind have all options that are given; `model` is one of them."""
        for each in fields(self):
            kinds = each.metadata['of']
            if kinds and kind not in kinds and getattr(self, each.name) != each.default:
                raise OptionError(
                    f'{{{each.name}}} is for {" and ".join(kinds)}, not for {kind} such as {model}'
                )


@dataclass(frozen=True)
class ModelOptions(RuntimeOptions):
    """How a model is opened.

    Args:
        score_thr: leave out boxes with a lower score; by default the threshold of an exported
            model, else 0.3, and in cpvt test 0.
        shorter_side: shorter side, in pixels, to which images are resized, for an exported or
            trained model; by default that of the training.
        cfg_options: override settings of a config, for example model.test_cfg.score_thr=0.1.
    """

    score_thr: Optional[float] = option()
    shorter_side: Optional[int] = option(of=(EXPORTED, NAMED))
    cfg_options: Sequence[str] = option((), of=(CONFIGS,))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score_thr(self.score_thr)
        check_at_least('shorter_side', self.shorter_side, 1)


@dataclass(frozen=True)
class ImageOptions(ModelOptions):
    """How a model takes images.

    Args:
        batch_size: images, frames or tiles that the model takes at a time. More can be faster on a
            GPU and need more memory; the results are the same, but for rounding.
        tile: process all images in overlapping tiles of this side in pixels, for example 1024,
            without resizing: for images larger than memory, or with small objects. By default a
            model that does not resize images takes those that are much larger than a tile in tiles;
            0 takes them as a whole.
        overlap: overlap of neighbouring tiles; by default a quarter of a tile, at least 32 pixels.
    """

    batch_size: int = option(1, changes_results=False)
    tile: Optional[int] = option()
    overlap: Optional[int] = option()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least('batch_size', self.batch_size, 1)
        for name, value in (('tile', self.tile), ('overlap', self.overlap)):
            check_at_least(name, value, 0)
            if value is not None and value % ALIGN:
                raise OptionError(f'{{{name}}} must be a multiple of {ALIGN}, got {value}')
        if self.overlap is not None:
            if not self.tile:
                raise OptionError('{overlap} needs {tile}')
            if self.overlap >= self.tile:
                raise OptionError(
                    f'{{overlap}} must be less than {{tile}} {self.tile}, got {self.overlap}'
                )
        if self.tile and self.shorter_side is not None:
            raise OptionError(
                '{shorter_side} has no effect with {tile}, which does not resize images; drop one'
            )


@dataclass(frozen=True)
class RunOptions(ImageOptions):
    """How a model is run on files.

    Args:
        workers: threads that read images ahead of the model, as many that take its results, and as
            many that run an exported model on a CPU; by default one for each core.
    """

    workers: Optional[int] = option(changes_results=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least('workers', self.workers, 0)
        if self.tile and self.workers:
            raise OptionError(
                '{workers} has no effect with {tile}, on which one thread works; drop it'
            )


@dataclass(frozen=True)
class InferOptions(RunOptions):
    """What `cpvt infer` writes, and where it runs.

    Args:
        out_dir: folder for the results.
        format: write the predictions in this format, too.
        no_pictures: write no NAME.overlay.jpg or .mp4, to be faster with a small model.
        skip_existing: leave out images and videos that have results of an earlier run.
        overwrite: remove the results of another model, or of other options, from the folder. By
            default they are refused: run.json there says what the results are of.
        ray: give images to the workers of a Ray cluster: local, one that is started on this
            machine; auto, one that this machine is part of; or HOST:PORT.
        ray_workers: largest number of workers of --ray; by default as many as there are GPUs or,
            without GPUs, cores and memory for.
    """

    out_dir: str = option('predictions', changes_results=False)
    format: Optional[Format] = option(changes_results=False)
    no_pictures: bool = option(False, changes_results=False)
    skip_existing: bool = option(False, changes_results=False)
    overwrite: bool = option(False, changes_results=False)
    ray: Optional[str] = option(changes_results=False)
    ray_workers: Optional[int] = option(changes_results=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least('ray_workers', self.ray_workers, 1)
        if self.ray is None and self.ray_workers is not None:
            raise OptionError('{ray_workers} needs {ray}')
        if self.ray is not None and self.workers:
            raise OptionError(
                '{workers} has no effect with {ray}, whose workers have one core each; leave it out'
            )


def check_score_thr(score_thr: Optional[float]) -> None:
    """Raise an OptionError unless a threshold for scores is valid."""
    if score_thr is not None and not 0 <= score_thr <= 1:  # refuses nan too
        raise OptionError(f'{{score_thr}} must be in [0, 1], got {score_thr}')


DEFAULTS = ModelOptions()
