"""From files of images and videos to files of results."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Optional, Protocol

import cv2
import mmcv
import numpy as np
import torch

from ...tooling.command import UserError, one_line
from ...tooling.files import atomic_write
from ...tooling.inputs import Named, is_video
from ...tooling.progress import progress
from ...tooling.rasters import ReadError
from ...tooling.threads import ahead
from ..images import size_of
from ..predictions import Kind, Prediction
from .large_images import TileModel

Skipped = dict[str, str]  # paths of inputs that have no results, and why

FRAME_RATE = 25  # for videos that do not declare one
# What NAME begins of an image and of a video, besides the pictures.
ENDINGS: dict[Kind, list[str]] = {
    'detections': ['detections.json'],
    'labels': ['labels.png'],
    'segments': ['segments.png', 'segments.json'],
}
VIDEO_ENDINGS: dict[Kind, list[str]] = {
    'detections': ['detections.jsonl'],
    'labels': [],  # a picture only
    'segments': ['segments.jsonl'],
}


class InferenceModel(Protocol):
    """A model for files: `trained.ModelPredictor` or `exported.ExportedPredictor`."""

    kind: Kind
    meta: dict  # `classes` and `palette`
    score_thr: float  # boxes of a lower score are left out
    batch_size: int  # images that pass the model together
    bands: Optional[tuple[int, ...]]  # that it takes; None: RGB
    device: torch.device

    def read(self, path: Path) -> np.ndarray:
        """The image that `prepare` takes; ReadError if there is none."""

    def prepare(self, source: Any, image: np.ndarray) -> Any:
        """What `predict` takes, of an image with a reference to it; ReadError if it does not
        fit."""

    def predict(self, images: Iterable[Any]) -> Iterator[tuple[Any, Prediction]]:
        """The reference and the prediction of each image, in order."""

    def in_tiles(self) -> TileModel:
        """The model for images larger than memory."""


def has_results(entry: Named, folder: Path, kind: Kind, pictures: bool) -> bool:
    """Whether the results of an image or a video exist. Each file of them is complete."""
    path, name = entry
    endings = VIDEO_ENDINGS[kind] if is_video(path) else ENDINGS[kind]
    if pictures:
        endings = [*endings, 'overlay.mp4' if is_video(path) else 'overlay.jpg']
    return all((folder / f'{name}.{ending}').exists() for ending in endings)


def write_results(
    model: InferenceModel,
    named: Sequence[Named],
    folder: Path,
    threads: int = 0,
    pictures: bool = True,
) -> Skipped:
    """Write the results of images and videos; returns those that cannot be read. See
    `write_images` and `write_video`."""
    images, videos = images_and_videos(named, model.batch_size)
    skipped: Skipped = {}
    if images:
        with progress(len(images), 'images') as done:
            skipped = write_images(model, images, folder, threads, pictures, done)
    for path, name in videos:
        try:
            write_video(model, path, name, folder, pictures)
        except ReadError as error:
            skipped[str(path)] = one_line(error)
    return skipped


def images_and_videos(named: Sequence[Named], batch_size: int) -> tuple[list[Named], list[Named]]:
    """The images, in an order that fills batches, and the videos among inputs."""
    images = [entry for entry in named if not is_video(entry[0])]
    videos = [entry for entry in named if is_video(entry[0])]
    if batch_size > 1:  # those of one size in turn
        images.sort(key=lambda entry: size_of(entry[0]) or (0, 0))
    return images, videos


def write_images(
    model: InferenceModel,
    named: Sequence[Named],
    folder: Path,
    threads: int = 0,
    pictures: bool = True,
    done: Callable[[int], Any] = lambda count: None,
) -> Skipped:
    """Write the results of images into a folder; returns those that cannot be read.

    Args:
        threads: read images ahead, and as many draw and write results while the model is at the
            next images; 0: neither.
        pictures: also write an overlay for each image.
        done: called with the number of images that are done since the last call.
    """
    skipped: Skipped = {}

    def prepared() -> Iterator[Any]:
        paths = [path for path, _ in named]
        for entry, read in zip(named, ahead(model.read, paths, threads)):
            try:
                yield model.prepare(entry, read())
            except ReadError as error:
                skipped[str(entry[0])] = one_line(error)
                done(1)

    def write(found: tuple[Named, Prediction]) -> None:
        (path, name), prediction = found
        prediction.write(folder, name, path, pictures=pictures)

    for written in ahead(write, model.predict(prepared()), threads):
        written()
        done(1)
    return skipped


def write_video(
    model: InferenceModel, path: Path, name: str, folder: Path, pictures: bool = True
) -> None:
    """Write NAME.overlay.mp4, unless without `pictures`, and, except for semantic segmentors, one
    JSON line per frame to NAME.detections.jsonl or NAME.segments.jsonl.

    Each batch of frames is predicted before the frames of the next are read.

    Raises:
        ReadError: not a video, or one that ends early; frames before the end have results.
    """
    video = mmcv.VideoReader(str(path))
    if not video.width:
        raise ReadError('OpenCV cannot read this video')
    total = max(video.frame_cnt, 0) or None
    count = 0
    with ExitStack() as stack:
        update = stack.enter_context(progress(total, 'frames', name))
        for found in predicted_frames(model, video):
            if pictures:
                picture = np.array(found.draw(legend=False))[..., ::-1]
                if count == 0:
                    size = picture.shape[1], picture.shape[0]
                    overlay = video_writer(folder / f'{name}.overlay.mp4', size, video.fps)
                    pictures_file = stack.enter_context(overlay)
                pictures_file.write(picture)
            if model.kind != 'labels':
                if count == 0:
                    file = folder / f'{name}.{model.kind}.jsonl'
                    draft = stack.enter_context(atomic_write(file))
                    lines = stack.enter_context(draft.open('w'))
                lines.write(json.dumps({'frame': count, model.kind: found.records()}) + '\n')
            count += 1
            update(1)
    if count < video.frame_cnt or not count:
        raise ReadError(f'ends after {count} of {video.frame_cnt} frames')


def predicted_frames(model: InferenceModel, video: mmcv.VideoReader) -> Iterator[Prediction]:
    """The predictions for the frames of a video."""
    frames = (frame for frame in video)  # a VideoReader as such would be read by index
    for batch in batched(frames, model.batch_size):
        for _, found in model.predict(model.prepare(None, frame) for frame in batch):
            yield found


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
        writer = cv2.VideoWriter(str(draft), cv2.VideoWriter.fourcc(*'mp4v'), rate, size)
        try:
            if not writer.isOpened():
                raise ReadError(f'OpenCV cannot write a video of {size[0]} x {size[1]} pixels')
            yield writer
            writer.release()
            if not cv2.VideoCapture(str(draft)).isOpened():  # its index is written last
                raise UserError(f'cannot write all of {path}; is the disk full?')
        finally:
            writer.release()
