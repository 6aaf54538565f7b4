"""Videos, which OpenCV reads and writes."""

import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..images.inputs import VIDEO_OVERLAY, NamedInput
from ..images.rasters import ReadError
from ..images.reading import check_readable, import_cv2
from ..predictions.kinds import Prediction
from ..tooling.command import UserError
from ..tooling.files import atomic_write
from ..tooling.progress import progress
from .protocol import Model, predict_all
from .results import Results

VARIABLE = 1.5  # times the mean duration of a frame: with one that lasts longer, a rate varies
FRAME_RATE = 25.0  # for videos that declare none and have no time stamps
MOST_TICKS = 65_535  # of a second in MPEG-4
# How much earlier than its container a video may end: the sound is often longer.
LATE_SECONDS, LATE_SHARE = 0.5, 0.05
# Quarter turns, counterclockwise, for the orientation that a video declares.
TURNS = {90: 3, 180: 2, 270: 1}
# How files begin that are lists of other files, which FFmpeg would read, whatever their names.
LISTS = b'#EXTM3U', b'ffconcat', b'<'


def write_video(model: Model, entry: NamedInput, results: Results, batch_size: int) -> None:
    """Write NAME.overlay.mp4, unless without pictures, and, except for semantic segmentors, one
    JSON line per frame to NAME.detections.jsonl, with its time in seconds.

    OpenCV writes videos of one rate. A warning tells of a video whose frames have others.

    Raises:
        ReadError: not a video, or one that ends early, which has no results.
    """
    path, name = entry
    length = measure_video(path)
    video = open_video(path)
    if length.is_variable and results.pictures:
        warnings.warn(
            f'{path}: the rate of its frames varies; the overlay shows them at the mean rate of '
            f'{length.rate:.3g} a second (JSON lines have their times)',
            stacklevel=2,
        )
    count = 0
    with ExitStack() as stack:
        update = stack.enter_context(progress(length.frames, 'frames', name))
        for found in predicted_frames(model, video, batch_size):
            results.look_at_number(path, found)
            if results.pictures:
                picture = np.array(found.draw(legend=False))
                if count == 0:
                    size = picture.shape[1], picture.shape[0]
                    file = results.folder / f'{name}{VIDEO_OVERLAY}'
                    overlay = stack.enter_context(video_writer(file, size, length.rate))
                overlay.write(picture[..., ::-1])
            if results.kind != 'labels':
                if count == 0:
                    file = results.folder / f'{name}.{results.kind}.jsonl'
                    draft = stack.enter_context(atomic_write(file))
                    lines = stack.enter_context(draft.open('w'))
                line = {'frame': count, 'time': round(video.times[count], 3)}
                lines.write(json.dumps({**line, results.kind: found.records()}) + '\n')
            count += 1
            update(1)
        if count < length.frames:  # an error of the disk
            raise ReadError(f'ends after {count} of {length.frames} frames')


class VideoLength(NamedTuple):
    """How long a video is."""

    frames: int
    rate: float  # mean frames per second
    is_variable: bool = False  # frames are shown for times that differ by more than rounding


def measure_video(path: Path) -> VideoLength:
    """Count the frames of a video, and compute their rate from their time stamps.

    Containers tell only an estimate of either, which is far off for the recordings of browsers
    (1000 frames per second) and for variable rates. Frames are decoded for it, which takes little
    time next to predictions.

    Raises:
        ReadError: not a video, or one that ends before the end that its container declares.
    """
    cv2 = import_cv2()
    capture = open_video(path).capture
    declared_frames = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    declared_rate = capture.get(cv2.CAP_PROP_FPS)
    times = []
    while capture.grab():
        times.append(capture.get(cv2.CAP_PROP_POS_MSEC) / 1000)
    if not times:
        raise ReadError('a video without frames')
    count, first, last = len(times), times[0], times[-1]
    rate = declared_rate if 0 < declared_rate < math.inf else FRAME_RATE
    seconds = count / rate
    if count > 1 and last > first:
        rate = (count - 1) / (last - first)
        seconds = last - first + 1 / rate
    if count < declared_frames and declared_rate > 0:
        declared = declared_frames / declared_rate
        if seconds < declared - max(LATE_SECONDS, LATE_SHARE * declared):
            raise ReadError(
                f'not a complete video: it ends after {seconds:.1f} of {declared:.1f} seconds; to '
                'use that part, copy it with ffmpeg -i VIDEO -c copy PART'
            )
    # A time is rounded to a tick of the container, a millisecond or less in those of today.
    is_variable = count > 2 and float(np.diff(times).max()) > VARIABLE / rate
    return VideoLength(count, rate, is_variable)


class Video:
    """The frames of a video, upright, as (H, W, 3) RGB uint8.

    OpenCV turns the frames of phones in some of its builds and not in others. Here it does not, and
    they are turned as the video says.
    """

    def __init__(self, capture: Any) -> None:
        cv2 = import_cv2()
        self.capture = capture
        self.times: list[float] = []  # of the frames that were read, in seconds
        self.turns = 0
        if capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0):
            orientation = int(capture.get(cv2.CAP_PROP_ORIENTATION_META))
            self.turns = TURNS.get(orientation % 360, 0)

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            has_frame, frame = self.capture.read()
            if not has_frame:
                return
            self.times.append(self.capture.get(import_cv2().CAP_PROP_POS_MSEC) / 1000)
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


def writable(rate: float) -> float:
    """A frame rate, rounded to what OpenCV can write as MPEG-4: a fraction whose denominator is a
    power of ten up to 1000, and whose numerator is from 1 to `MOST_TICKS`."""
    rate = min(max(rate, 0.01), MOST_TICKS)
    decimals = min(int(math.log10(MOST_TICKS / rate)), 3)
    return round(rate, decimals)


@contextmanager
def video_writer(path: Path, size: Sequence[int], frame_rate: float) -> Iterator[Any]:
    """An atomic writer for frames (H, W, 3) BGR of a size (width, height).

    Raises:
        ReadError: the format does not allow frames of this size.
        UserError: the disk is full, which OpenCV does not report.
    """
    cv2 = import_cv2()
    with atomic_write(path, path.suffix) as draft:  # OpenCV chooses the format by suffix
        draft.touch()  # OSError with the reason if this is not allowed
        writer = cv2.VideoWriter(
            str(draft), cv2.VideoWriter.fourcc(*'mp4v'), writable(frame_rate), size
        )
        try:
            if not writer.isOpened():
                raise ReadError(f'OpenCV cannot write a video of {size[0]} x {size[1]} pixels')
            yield writer
            writer.release()
            if not cv2.VideoCapture(str(draft)).isOpened():  # its index is written last
                raise UserError(f'cannot write all of {path}; is the disk full?')
        finally:
            writer.release()
