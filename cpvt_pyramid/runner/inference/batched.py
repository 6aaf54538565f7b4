"""Batched inference on image and video files."""

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import cv2
import mmcv
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from PIL import Image
from torch import nn

from ...padding.batching import map_in_batches
from ...results.predictions import Kind, Prediction
from ...runtime.images import size_of
from ...tooling.command import UserError, one_line
from ...tooling.files import atomic_write
from ...tooling.progress import progress
from ...tooling.rasters import ReadError
from ...tooling.threads import ahead
from ..config.parts import kind_of, leaves, loaded_bands
from ..rasters import picture, read_image
from .grouping import size_in_batch
from .postprocessing import skip_unused
from .prediction import to_prediction
from .workers import MEMORY, Cores, Workers

FRAME_RATE = 25  # for videos that do not declare one
MANY = 1000  # frames of a video that does not declare how many
DRAWN = 128  # bytes per pixel of an image, for its labels and pictures
SAMPLED = 200  # images whose sizes are read ahead

Named = tuple[Path, str]  # an input, and the name for its results
Skipped = dict[str, str]  # paths of inputs that have no results, and why


class Prepared(NamedTuple):
    """An image on its way to the model."""

    source: Any  # the caller's reference to it
    image: np.ndarray  # (H, W, 3) BGR, to draw on
    data: dict  # the output of the pipeline


class Frame(NamedTuple):
    """The results of a frame of a video."""

    picture: Optional[np.ndarray]  # (H, W, 3) BGR
    items: list[dict]


class ModelPredictor:
    """A detector or a segmentor with the test pipeline of its config.

    Args:
        batch_size: images that pass the model together, of which none is padded by another.
        meta: `classes` and `palette`.
        score_thr: boxes of a lower score are left out.
    """

    def __init__(
        self, model: nn.Module, cfg: Config, meta: dict, batch_size: int, score_thr: float
    ) -> None:
        self.model, self.meta = model, meta
        self.batch_size, self.score_thr = batch_size, score_thr
        self.bands, self.pipeline = loaded_bands(cfg), image_pipeline(cfg)
        skip_unused(model)

    def read(self, path: Path) -> np.ndarray:
        return read_image(path, self.bands)

    def prepare(self, source: Any, image: np.ndarray) -> Prepared:
        if self.bands and image.shape[2] != len(self.bands):  # a frame of a video
            raise ReadError(f'the model takes {len(self.bands)} bands, got {image.shape[2]}')
        try:
            data = self.pipeline({'img': image, 'img_id': 0})
        except cv2.error as error:
            if 'Assertion failed' not in str(error):  # wrong arguments
                raise
            height, width = image.shape[:2]
            raise ReadError(
                f'{width} x {height} pixels are too thin to be resized as the test pipeline says'
            ) from error
        return Prepared(source, picture(image), data)

    def predict(self, images: Iterable[Prepared]) -> Iterator[tuple[Any, Prediction]]:
        """The source and prediction of each, in order."""
        return map_in_batches(self._predict, images, self._size_in_batch, self.batch_size)

    def _size_in_batch(self, image: Prepared) -> Optional[tuple[int, int]]:
        if 'inputs' not in image.data:  # of a wrong pipeline: the data preprocessor raises an error
            return None
        return size_in_batch(self.model, image.data['inputs'])

    def _predict(self, batch: Sequence[Prepared]) -> Iterator[tuple[Any, Prediction]]:
        for image in batch:
            if 'data_samples' in image.data:  # not so in a wrong pipeline
                image.data['data_samples'].set_metainfo({'score_thr': self.score_thr})
        with torch.no_grad():
            samples = self.model.test_step(pseudo_collate([image.data for image in batch]))
        if len(samples) != len(batch):
            raise ValueError(f'the model returned {len(samples)} results for {len(batch)} images')
        for prepared, sample in zip(batch, samples):
            found = to_prediction(sample, prepared.image, self.meta, self.score_thr)
            yield prepared.source, found


def image_pipeline(cfg: Config) -> Compose:
    """The config's test pipeline, for images in memory and without annotations."""
    steps = []
    for step in next(leaves(cfg.test_dataloader.dataset)).pipeline:
        kind = kind_of(step)
        if kind.endswith(('LoadBands', 'LoadImageFromFile')):
            to_float32 = kind.endswith('LoadBands') or step.get('to_float32', False)
            steps.append({'type': 'LoadImageFromNDArray', 'to_float32': to_float32})
        elif not re.search(r'Load\w*Annotations$', kind):
            steps.append(step)
    return Compose(steps)


def infer_images(
    predictor: ModelPredictor,
    named: Sequence[Named],
    folder: Path,
    workers: int = 0,
    cores: Optional[Cores] = None,
    pictures: bool = True,
) -> Skipped:
    """Write the results of images into a folder; returns those that cannot be read.

    Args:
        workers: threads that read images ahead, and as many that draw and write results while the
            model is at the next images; 0: neither. Not used by several processes.
        cores: divided among processes; by default, this one does the work.
        pictures: also write an overlay for each image.
    """
    start = time.monotonic()
    skipped: Skipped = {}
    size = predictor.batch_size
    if size > 1:  # images of one size in turn fill batches
        named = sorted(named, key=lambda entry: size_of(entry[0]) or (0, 0))
    batches = [named[i : i + size] for i in range(0, len(named), size)]
    write = partial(write_images, predictor, folder, pictures=pictures)
    need = memory_of(named) if cores else 0
    with (
        Workers(write, len(batches), cores, need) as forks,
        progress(len(named), 'images') as done,
    ):
        if not len(forks):
            skipped = write(named, workers=workers, done=done)
        else:
            for batch, part in zip(batches, forks.map(batches)):
                skipped |= part
                done(len(batch))
    if cores:
        speed = len(named) / (time.monotonic() - start)
        print(f'{speed:.3g} images per second with {max(len(forks), 1)} processes')
    return skipped


def memory_of(named: Sequence[Named]) -> int:
    """Bytes that a process needs for the largest of some images, to run the model and to draw."""
    pixels = [0]
    for path, _ in named[:: len(named) // SAMPLED + 1]:
        with suppress(OSError, Image.DecompressionBombError), Image.open(path) as image:
            pixels.append(math.prod(image.size))
    return MEMORY + DRAWN * max(pixels)


def write_images(
    predictor: ModelPredictor,
    folder: Path,
    named: Sequence[Named],
    workers: int = 0,
    done: Callable[[int], Any] = lambda count: None,
    pictures: bool = True,
) -> Skipped:
    """`infer_images` in this process; `done` is called with the number of images that are done."""
    skipped = {}

    def read() -> Iterator[Prepared]:
        paths = [path for path, _ in named]
        for (path, name), image in zip(named, ahead(predictor.read, paths, workers)):
            try:
                yield predictor.prepare((path, name), image())
            except ReadError as error:
                skipped[str(path)] = one_line(error)
                done(1)

    def write(found: tuple[Named, Prediction]) -> None:
        (path, name), prediction = found
        prediction.write(folder, name, path, pictures=pictures)

    for written in ahead(write, predictor.predict(read()), workers):
        written()
        done(1)
    return skipped


def infer_video(
    predictor: ModelPredictor,
    path: Path,
    name: str,
    folder: Path,
    kind: Kind,
    cores: Optional[Cores] = None,
    pictures: bool = True,
) -> None:
    """Write NAME.overlay.mp4, unless without `pictures`, and, except for semantic segmentors, one
    JSON line per frame to NAME.detections.jsonl or NAME.segments.jsonl.

    Frames are read when they are needed. For `cores`, see `infer_images`.

    Raises:
        ReadError: not a video, or one that ends early; frames before the end have results.
    """
    video = mmcv.VideoReader(str(path))
    if not video.width:
        raise ReadError('OpenCV cannot read this video')
    total = max(video.frame_cnt, 0) or None
    batches = batched((frame for frame in video), predictor.batch_size)
    count = math.ceil((total or MANY) / predictor.batch_size)
    records = kind != 'labels'

    def predict(batch: Sequence[np.ndarray]) -> list[Frame]:
        found = predictor.predict(predictor.prepare(None, frame) for frame in batch)
        frames = []
        for _, each in found:
            drawn = np.array(each.draw(legend=False))[..., ::-1] if pictures else None
            frames.append(Frame(drawn, each.records() if records else []))
        return frames

    done = 0
    with ExitStack() as stack:
        forks = stack.enter_context(Workers(predict, count, cores))
        update = stack.enter_context(progress(total, 'frames', name))
        for frame in chain.from_iterable(forks.map(batches)):
            if pictures:
                if not done:
                    shape = frame.picture.shape[1], frame.picture.shape[0]
                    overlay = folder / f'{name}.overlay.mp4'
                    writer = stack.enter_context(video_writer(overlay, shape, video.fps))
                writer.write(frame.picture)
            if records:
                if not done:
                    result = stack.enter_context(atomic_write(folder / f'{name}.{kind}.jsonl'))
                    lines = stack.enter_context(result.open('w'))
                lines.write(json.dumps({'frame': done, kind: frame.items}) + '\n')
            done += 1
            update(1)
    if done < video.frame_cnt or not done:
        raise ReadError(f'ends after {done} of {video.frame_cnt} frames')


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` items each, of which the last may be shorter. They are taken as needed."""
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch


@contextmanager
def video_writer(path: Path, size: tuple[int, int], frame_rate: float) -> Iterator[cv2.VideoWriter]:
    """An atomic writer for frames (H, W, 3) BGR of a size (width, height).

    Raises:
        ReadError: the format does not allow frames of this size.
        UserError: the disk is full, which OpenCV does not report.
    """
    with atomic_write(path, path.suffix) as draft:  # OpenCV chooses the format by suffix
        rate = frame_rate if 0 < frame_rate < math.inf else FRAME_RATE
        draft.touch()  # OSError with the reason if this is not allowed
        writer = cv2.VideoWriter(str(draft), cv2.VideoWriter_fourcc(*'mp4v'), rate, size)
        try:
            if not writer.isOpened():
                raise ReadError(f'OpenCV cannot write a video of {size[0]} x {size[1]} pixels')
            yield writer
            writer.release()
            if not cv2.VideoCapture(str(draft)).isOpened():  # its index is written last
                raise UserError(f'cannot write all of {path}; is the disk full?')
        finally:
            writer.release()
