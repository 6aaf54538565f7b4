"""Videos, which PyAV reads and writes: each frame at its own time."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Optional

import numpy as np

from ..images.rasters import ReadError
from ..images.reading import check_readable
from ..tooling.command import contexts, one_line, optional_package
from ..tooling.files import atomic_write

FRAME_RATE = Fraction(25)  # for videos that declare none, and frames without a time
# How much earlier than its container a video may end: the sound is often longer.
LATE_SECONDS, LATE_SHARE = 0.5, 0.05
# Formats of files, as FFmpeg calls them. It knows others, some of which are lists of further files
# and addresses, which it would read.
CONTAINERS = 'avi,matroska,webm,mov,mp4,m4v,mpeg,mpegts,mpegvideo'
CODEC = 'libx264'  # H.264, which browsers play
# Without B-frames, whose order would make the declared length of variable rates too short.
QUALITY = {'crf': '20', 'preset': 'veryfast', 'bf': '0'}
REPAIR = 'to use what is whole, copy it with ffmpeg -i VIDEO COPY'


def import_av() -> ModuleType:
    """PyAV, which brings FFmpeg; a UserError says how to install it."""
    return optional_package('av', 'reading videos')


class VideoLength(NamedTuple):
    """How long a video is, by its packets."""

    frames: int  # about
    declared: Optional[float]  # seconds, by the container


def measure_video(path: Path) -> VideoLength:
    """Read a video to its end without decoding it.

    Raises:
        ReadError: not a video, or one that ends before the end that its container declares.
    """
    frames = 0
    first: Optional[int] = None
    end = 0
    with open_video(path) as video:
        for packet in video.packets():
            frames += 1
            if packet.pts is not None:
                first = packet.pts if first is None else min(first, packet.pts)
                end = max(end, packet.pts + (packet.duration or 0))
        declared = video.declared_seconds()
        if not frames:
            raise ReadError('a video without frames')
        if first is None:  # without times
            seconds = float(frames / video.rate)
        else:
            seconds = float((end - first) * video.tick)
    check_end(seconds, declared)
    return VideoLength(frames, declared)


def check_end(seconds: float, declared: Optional[float]) -> None:
    """Raise a ReadError if a video of some seconds ends before its container says."""
    if declared is not None and seconds < declared - max(LATE_SECONDS, LATE_SHARE * declared):
        raise ReadError(
            f'not a complete video: it ends after {seconds:.1f} of {declared:.1f} seconds; {REPAIR}'
        )


def check_all_frames(video: 'Video', length: VideoLength) -> None:
    """Raise a ReadError if a video, of which all frames were read, is not complete."""
    if not video.ticks:
        raise ReadError('a video without frames')
    check_end(float(video.end * video.tick), length.declared)


class Video:
    """The frames of an open video, upright, as (H, W, 3) RGB uint8.

    Attributes:
        tick: the unit of times, in seconds.
        ticks: the times of the frames that were read.
        end: when the last of them ends, in ticks after the first.
        rate: frames per second, on average or as a guess.
    """

    def __init__(self, container: Any, stream: Any) -> None:
        self.container = container
        self.stream = stream
        self.rate = Fraction(stream.average_rate or stream.guessed_rate or FRAME_RATE)
        self.tick = Fraction(stream.time_base or 1 / self.rate)
        self.usual = max(round(1 / self.rate / self.tick), 1)  # ticks of a frame
        self.ticks: list[int] = []
        self.end = 0
        self.size: Optional[tuple[int, ...]] = None

    def packets(self) -> Iterator[Any]:
        """The packets of the video, without those of sound."""
        with errors_of_reading():
            for packet in self.container.demux(self.stream):
                if packet.size:
                    yield packet

    def __iter__(self) -> Iterator[np.ndarray]:
        with errors_of_reading():
            for frame in self.container.decode(self.stream):
                self.add_time(frame)
                if frame.is_corrupt:
                    raise ReadError(
                        f'not a complete video: frame {len(self.ticks) - 1} is damaged; {REPAIR}'
                    )
                pixels = frame.to_ndarray(format='rgb24')
                upright = np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
                if self.size is None:
                    self.size = upright.shape
                if upright.shape != self.size:
                    raise ReadError(
                        f'its frames have several sizes, {self.size[1]} x {self.size[0]} and '
                        f'{upright.shape[1]} x {upright.shape[0]}; {REPAIR}'
                    )
                yield upright

    def add_time(self, frame: Any) -> None:
        """Note when a frame is shown: as it says, but later than the one before."""
        last = self.ticks[-1] if self.ticks else None
        at = frame.pts
        if at is None:
            at = 0 if last is None else last + self.usual
        if last is not None:
            at = max(at, last + 1)
        self.ticks.append(at)
        self.end = at - self.ticks[0] + (frame.duration or self.usual)

    def declared_seconds(self) -> Optional[float]:
        """How long the video is by its container; None if that does not say."""
        if self.stream.duration:
            return float(self.stream.duration * self.tick)
        if self.container.duration:
            return self.container.duration / 1e6
        return None


@contextmanager
def errors_of_reading() -> Iterator[None]:
    """Inside this context, in which FFmpeg reads, its errors are ReadErrors."""
    av = import_av()
    try:
        yield
    except av.FFmpegError as error:
        raise ReadError(f'not a complete video: {error.strerror}; {REPAIR}') from error


@contextmanager
def open_video(path: Path) -> Iterator[Video]:
    """Open a video.

    Raises:
        ReadError: FFmpeg cannot read it.
    """
    av = import_av()
    try:
        check_readable(path)
    except OSError as error:
        raise ReadError(str(error)) from error
    with ExitStack() as stack:
        # FFmpeg takes some names of files for addresses or patterns.
        file = stack.enter_context(path.open('rb'))
        try:
            options = {'format_whitelist': CONTAINERS}
            container = stack.enter_context(av.open(file, options=options))
        except (av.FFmpegError, ValueError) as error:
            raise ReadError(f'not a complete video in one of the formats {CONTAINERS}') from error
        if not container.streams.video:
            raise ReadError('a file without a video stream')
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise ReadError('a video whose codec FFmpeg does not know')
        stream.thread_type = 'AUTO'
        yield Video(container, stream)


class VideoWriter:
    """Writes frames (H, W, 3) RGB uint8 as H.264.

    Sides are even in the format that browsers play: an odd one is longer by a pixel, which repeats
    the last.
    """

    def __init__(self, container: Any, picture: np.ndarray, video: Video) -> None:
        self.frame_of = import_av().VideoFrame.from_ndarray
        self.container = container
        self.video = video
        self.stream = container.add_stream(CODEC, rate=video.rate, options=QUALITY)
        height, width = picture.shape[:2]
        self.stream.height = height + height % 2
        self.stream.width = width + width % 2
        self.stream.pix_fmt = 'yuv420p'
        self.stream.codec_context.time_base = video.tick

    def write(self, picture: np.ndarray, at: int) -> None:
        """Add a frame that is shown from a time on, in ticks of the video."""
        height, width = picture.shape[:2]
        even = np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), 'edge')
        frame = self.frame_of(even, format='rgb24')
        frame.pts = at - self.video.ticks[0]
        frame.time_base = self.video.tick
        self.container.mux(self.stream.encode(frame))

    def finish(self) -> None:
        self.container.mux(self.stream.encode(None))


@contextmanager
def errors_of_file() -> Iterator[None]:
    """Inside this context, in which PyAV writes to a file, the file's OSErrors are raised: PyAV
    fails again when it ends the video, with an error of its own."""
    av = import_av()
    try:
        yield
    except av.FFmpegError as error:
        for earlier in contexts(error):
            if isinstance(earlier, OSError):
                raise earlier from None
        raise


@contextmanager
def video_writer(path: Path, picture: np.ndarray, video: Video) -> Iterator[VideoWriter]:
    """A writer of frames with the size of a picture and the times of a video. The file is complete,
    or does not exist.

    Raises:
        ReadError: the format does not allow frames of this size.
        OSError: it cannot be written.
    """
    av = import_av()
    with atomic_write(path) as draft, draft.open('wb') as file, errors_of_file():
        with av.open(file, 'w', format='mp4') as container:
            try:
                writer = VideoWriter(container, picture, video)
                container.start_encoding()
            except av.FFmpegError as error:
                height, width = picture.shape[:2]
                raise ReadError(
                    f'cannot write a video of {width} x {height} pixels: {one_line(error)}'
                ) from error
            yield writer
            writer.finish()
