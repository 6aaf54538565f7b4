"""The options of `cpvt infer`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional

from ..tooling.command import UserError, check_at_least
from ..tooling.files import Format


@dataclass(frozen=True)
class InferOptions:
    """How a model is run on images and videos.

    Args:
        model: config, exported model, checkpoint with its config inside, or name of a trained
            model; after a config comes its checkpoint, a path or an address.
        inputs: images, videos, folders with their subfolders, quoted patterns such as
            'photos/**/*.jpg', or - for a list of paths on stdin.
        out_dir: folder for the results.
        device: cpu, cuda:1 or another device of torch, or, for an exported model, an execution
            provider of onnxruntime or a device of OpenVINO; by default a GPU if there is one.
        backend: of an exported model; by default onnxruntime, and openvino for .xml.
        dtype: bfloat16 is faster where the processor multiplies it. The last layers of detectors,
            and their boxes, stay in float32. Of exported models, OpenVINO has it.
        batch_size: images, frames or tiles that the model takes at a time. More can be faster on a
            GPU and need more memory; the results are the same, but for rounding.
        score_thr: leave out boxes with a lower score; by default the threshold of an exported
            model, else 0.3.
        shorter_side: to which images are resized, in pixels, for an exported or trained model; by
            default that of the training.
        format: write the predictions in this format, too.
        no_pictures: write no NAME.overlay.jpg or .mp4, to be faster with a small model.
        skip_existing: leave out images and videos that have results of an earlier run.
        overwrite: remove the results of another model, or of other options, from the folder. By
            default they are refused: run.json there says what the results are of.
        workers: threads that read images ahead of the model, as many that write results, and as
            many that run an exported model on a CPU; by default one for each core.
        tile: process all images in overlapping tiles of this side in pixels, for example 1024,
            without resizing: for images larger than memory, or with small objects. By default a
            model that does not resize images takes those that are much larger than a tile in tiles;
            0 takes them as a whole.
        overlap: overlap of neighbouring tiles; by default a quarter of a tile.
        ray: give images to the workers of a Ray cluster: local, one that is started on this
            machine; auto, one that this machine is part of; or HOST:PORT.
        ray_workers: most workers of --ray; by default as many as there are GPUs or, without GPUs,
            cores and memory for.
        cfg_options: override settings of a config, for example model.test_cfg.score_thr=0.1.

    Raises:
        UserError: an option is out of its range, or has no effect beside the others.
    """

    model: str
    inputs: Sequence[str]
    out_dir: str = 'predictions'
    device: Optional[str] = None
    backend: Optional[Literal['onnxruntime', 'openvino']] = None
    dtype: Literal['float32', 'bfloat16'] = 'float32'
    batch_size: int = 1
    score_thr: Optional[float] = None
    shorter_side: Optional[int] = None
    format: Optional[Format] = None
    no_pictures: bool = False
    skip_existing: bool = False
    overwrite: bool = False
    workers: Optional[int] = None
    tile: Optional[int] = None
    overlap: Optional[int] = None
    ray: Optional[str] = None
    ray_workers: Optional[int] = None
    cfg_options: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_at_least('--workers', self.workers, 0)
        check_at_least('--batch-size', self.batch_size, 1)
        check_at_least('--shorter-side', self.shorter_side, 1)
        check_at_least('--ray-workers', self.ray_workers, 1)
        check_at_least('--tile', self.tile, 0)
        if not self.tile and self.overlap is not None:
            raise UserError('--overlap needs --tile')
        if self.tile and self.shorter_side is not None:
            raise UserError(
                '--shorter-side has no effect with --tile, which does not resize images; drop one'
            )
        if self.tile and self.workers is not None:
            raise UserError(
                '--workers has no effect with --tile, on which one thread works; drop it'
            )
        if self.ray is None and self.ray_workers is not None:
            raise UserError('--ray-workers needs --ray')
        if self.ray is not None and self.workers is not None:
            raise UserError(
                '--workers has no effect with --ray, whose workers have one core each; leave it out'
            )
