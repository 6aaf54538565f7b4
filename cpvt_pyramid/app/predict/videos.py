"""Videos, which OpenCV reads and writes."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..images.inputs import NamedInput
from ..images.rasters import ReadError
from ..images.reading import check_readable
from ..predictions.kinds import Prediction
from ..tooling.command import UserError, optional_package
from ..tooling.files import atomic_write
from ..tooling.progress import progress
from .model import Model, predict_all
from .results import Results

FRAME_RATE = 25  # for videos that do not declare one
# Quarter turns, counterclockwise, for the orientation that a video declares.
TURNS = {90: 3, 180: 2, 270: 1}
# How files begin that are lists of other files, which FFmpeg would read, whatever their names.
LISTS = b'#EXTM3U', b'ffconcat', b'<'


def import_cv2() -> Any:
    return optional_package('cv2', 'a video', 'opencv-python-headless')


def write_video(model: Model, entry: NamedInput, results: Results, batch_size: int) -> None:
    """Write NAME.overlay.mp4, unless without pictures, and, except for semantic segmentors, one
    JSON line per frame to NAME.detections.jsonl or NAME.segments.jsonl.

    Raises:
        ReadError: not a video, or one that ends early; frames before the end have results.
    """
    path, name = entry
    video = open_video(path)
    expected = max(video.frames, 0)
    count = 0
    with ExitStack() as stack:
        update = stack.enter_context(progress(expected or None, 'frames', name))
        for found in predicted_frames(model, video, batch_size):
            if results.pictures:
                picture = np.array(found.draw(legend=False))
                if count == 0:
                    size = picture.shape[1], picture.shape[0]
                    file = results.folder / f'{name}.overlay.mp4'
                    overlay = stack.enter_context(video_writer(file, size, video.rate))
                overlay.write(picture[..., ::-1])
            if results.kind != 'labels':
                if count == 0:
                    file = results.folder / f'{name}.{results.kind}.jsonl'
                    draft = stack.enter_context(atomic_write(file))
                    lines = stack.enter_context(draft.open('w'))
                lines.write(json.dumps({'frame': count, results.kind: found.records()}) + '\n')
            count += 1
            update(1)
    if count < expected or not count:
        raise ReadError(f'ends after {count} of {expected} frames')


class Video:
    """The frames of a video, upright, as (H, W, 3) RGB uint8.

    OpenCV turns the frames of phones in some of its builds and not in others. Here it does not, and
    they are turned as the video says.
    """

    def __init__(self, capture: Any) -> None:
        cv2 = import_cv2()
        self.capture = capture
        self.frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self.rate = capture.get(cv2.CAP_PROP_FPS)
        self.turns = 0
        if capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0):
            orientation = int(capture.get(cv2.CAP_PROP_ORIENTATION_META))
            self.turns = TURNS.get(orientation % 360, 0)

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            has_frame, frame = self.capture.read()
            if not has_frame:
                return
            yield np.ascontiguousarray(np.rot90(frame[..., ::-1], self.turns))


def open_video(path: Path) -> Video:
    """Open a video.

    Raises:
        ReadError: OpenCV cannot read it.
    """
    try:
        check_readable(path)
        with path.open('rb') as file:
            beginning = file.read(16)
    except OSError as error:
        raise ReadError(str(error)) from error
    if beginning.startswith(LISTS):
        raise ReadError('a list of files, not a video')
    capture = import_cv2().VideoCapture(str(path))
    if not capture.isOpened():
        raise ReadError('OpenCV cannot read this video')
    return Video(capture)


def predicted_frames(model: Model, video: Video, batch_size: int) -> Iterator[Prediction]:
    """The predictions for the frames of a video. Each batch of frames, or one for each thread, is
    predicted before the next frames are read."""
    frames = (model.prepare(frame) for frame in video)
    return predict_all(model.predict, frames, batch_size, model.threads)


@contextmanager
def video_writer(path: Path, size: Sequence[int], frame_rate: float) -> Iterator[Any]:
    """An atomic writer for frames (H, W, 3) BGR of a size (width, height).

    Raises:
        ReadError: the format does not allow frames of this size.
        UserError: the disk is full, which OpenCV does not report.
    """
    cv2 = import_cv2()
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
