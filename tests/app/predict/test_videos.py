"""Videos of all rates, whole and damaged, with a tiny exported model."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Optional

import av
import cv2
import numpy as np
import pytest
from PIL import Image
from support import photograph

from cpvt_pyramid.app.commands.infer import main
from cpvt_pyramid.app.predict import videos
from cpvt_pyramid.app.predict.videos import measure_video, open_video, video_writer

MILLISECOND = Fraction(1, 1000)
TENTH = Fraction(1, 10)
VARIABLE = [0, 40, 80, 500, 540, 1200]  # milliseconds


def film(
    path: str,
    frames: Sequence[np.ndarray],
    times: Sequence[int] = VARIABLE,
    codec: str = 'libx264',
    pixels: str = 'yuv420p',
    turn: int = 0,
    has_sound: bool = False,
    tick: Fraction = MILLISECOND,
) -> None:
    """Write a video by PyAV; `turn` is counterclockwise."""
    with av.open(path, 'w') as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        stream.codec_context.time_base = tick
        if turn:
            stream.set_display_rotation(turn)
        if has_sound:
            sound = container.add_stream('aac', rate=16000)
            silence = np.zeros((1, 32000), np.int16)
            samples = av.AudioFrame.from_ndarray(silence, format='s16', layout='mono')
            samples.rate = 16000
        for pixels_of_frame, at in zip(frames, times):
            frame = av.VideoFrame.from_ndarray(pixels_of_frame, format='rgb24')
            frame.pts, frame.time_base = at, tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if has_sound:
            container.mux(sound.encode(samples))
            container.mux(sound.encode(None))


class Seen(NamedTuple):
    """What a video shows."""

    frames: list[np.ndarray]
    times: list[float]
    seconds: Optional[float]


def seen(path: str) -> Seen:
    with av.open(path) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        times = [float(frame.pts * stream.time_base) for frame in frames]
        seconds = float(stream.duration * stream.time_base) if stream.duration else None
        return Seen([frame.to_ndarray(format='rgb24') for frame in frames], times, seconds)


def photographs(count: int, height: int = 64, width: int = 96) -> list[np.ndarray]:
    return [photograph(height, width, seed=i) for i in range(count)]


def lines_of(name: str) -> list[dict[str, Any]]:
    content = Path(f'predictions/{name}.detections.jsonl').read_text()
    return [json.loads(line) for line in content.splitlines()]


@pytest.mark.parametrize(
    'name, codec', [('a.mp4', 'libx264'), ('a.mkv', 'libx264'), ('a.webm', 'libvpx-vp9')]
)
def test_each_frame_keeps_its_time(name, codec, model, capsys):
    """In the lines and in the overlay, which is H.264 in the pixels that browsers show."""
    film(name, photographs(6), codec=codec)
    assert main([str(model('detection')), name]) == 0, capsys.readouterr().err
    expected = [milliseconds / 1000 for milliseconds in VARIABLE]
    assert [line['time'] for line in lines_of('a')] == pytest.approx(expected, abs=1e-3)
    assert [line['frame'] for line in lines_of('a')] == list(range(6))
    overlay = seen('predictions/a.overlay.mp4')
    assert overlay.times == pytest.approx(expected, abs=1e-3)
    assert overlay.seconds >= 1.2  # else the last frame would not be shown
    with av.open('predictions/a.overlay.mp4') as container:
        codec_context = container.streams.video[0].codec_context
        assert (codec_context.name, codec_context.pix_fmt) == ('h264', 'yuv420p')
    assert capsys.readouterr().err == ''


def test_times_begin_with_the_first_frame(model):
    film('a.mkv', photographs(3), [500, 580, 660])
    assert main([str(model('detection')), 'a.mkv']) == 0
    assert [line['time'] for line in lines_of('a')] == pytest.approx([0, 0.08, 0.16], abs=1e-3)


@pytest.mark.parametrize('size', [(57, 101), (1, 1), (58, 102)])
def test_odd_sizes(size, model):
    """The format of the overlay has even sides: the last pixels are repeated."""
    film('a.avi', photographs(3, *size), range(3), 'mjpeg', 'yuvj444p', tick=Fraction(1, 25))
    assert main([str(model('detection')), 'a.avi']) == 0
    (frame, *_), times, _ = seen('predictions/a.overlay.mp4')
    assert len(times) == 3 and frame.shape[0] % 2 == frame.shape[1] % 2 == 0
    assert frame.shape[1] >= size[1]


@pytest.mark.parametrize('turn', [90, -90, 180])
def test_frames_are_upright(turn, model):
    """As OpenCV shows them, and as telephones write them."""
    frame = np.zeros((64, 96, 3), np.uint8)
    frame[:20, :20] = 250
    film('a.mp4', [frame] * 3, range(0, 120, 40), turn=turn)
    with open_video(Path('a.mp4')) as video:
        (upright, *_) = list(video)
    capture = cv2.VideoCapture('a.mp4')
    capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)
    clockwise = int(capture.get(cv2.CAP_PROP_ORIENTATION_META))
    expected = np.rot90(frame, -clockwise // 90)
    assert clockwise and upright.shape == expected.shape
    assert np.abs(upright.astype(int) - expected).mean() < 4


def test_sound_is_left_out(model):
    film('a.mp4', photographs(6), has_sound=True)
    assert main([str(model('detection')), 'a.mp4']) == 0
    assert len(lines_of('a')) == 6
    with av.open('predictions/a.overlay.mp4') as container:
        assert len(container.streams) == 1


def test_a_cut_video_is_skipped_each_time(model, capfd):
    """It has no results, so that a run with --skip-existing does not take it for done."""
    Path('in').mkdir()
    times = range(40)
    for name in ('cut', 'whole'):
        path = f'in/{name}.avi'
        film(path, photographs(40), times, 'mjpeg', 'yuvj420p', tick=TENTH)
    os.truncate('in/cut.avi', os.path.getsize('in/cut.avi') // 2)
    for already in (0, 1):
        assert main([str(model('detection')), 'in', '--skip-existing']) == 1
        said = capfd.readouterr()
        (line,) = said.err.splitlines()  # and none of FFmpeg
        assert 'skipped in/cut.avi: not a complete video: ' in line
        assert f'{already} of 2 are already done\n' in said.out
        assert sorted(os.listdir('predictions')) == [
            'inputs.json',
            'run.json',
            'whole.detections.jsonl',
            'whole.overlay.mp4',
        ]
    assert len(lines_of('whole')) == 40


def write_cut_mp4(path: str) -> None:
    film(path, photographs(6))
    os.truncate(path, os.path.getsize(path) // 2)


def write_png(path: str) -> None:
    Image.new('RGB', (64, 64)).save(path, 'PNG')


def write_sound(path: str) -> None:
    with av.open(path, 'w') as container:
        stream = container.add_stream('aac', rate=16000)
        silence = np.zeros((1, 16000), np.int16)
        frame = av.AudioFrame.from_ndarray(silence, format='s16', layout='mono')
        frame.rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def write_no_frames(path: str) -> None:
    """A complete file of a recording that was stopped at once."""
    with av.open(path, 'w') as container:
        stream = container.add_stream('mpeg4', rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = 'yuv420p'
        container.start_encoding()


BROKEN = {
    'cut.mp4': (write_cut_mp4, 'not a complete video in one of the formats'),
    'list.mp4': (
        '#EXTM3U\n#EXTINF:9,\n/etc/passwd\n',
        'not a complete video in one of the formats',
    ),
    'parts.mp4': ("ffconcat version 1.0\nfile 'a.mp4'\n", 'not a complete video in one of the'),
    'picture.mp4': (write_png, 'not a complete video in one of the formats'),
    'empty.mp4': ('', 'the file is empty'),
    'sound.mp4': (write_sound, 'a file without a video stream'),
    'nothing.avi': (write_no_frames, 'a video without frames'),
}


@pytest.mark.parametrize('name', BROKEN)
def test_what_is_no_video(name, model, capfd):
    make, said = BROKEN[name]
    if isinstance(make, str):
        Path(name).write_text(make)
    else:
        make(name)
    assert main([str(model('detection')), name]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert f'skipped {name}: {said}' in line
    assert not os.listdir('predictions')


def test_damage_inside_is_an_error_or_concealed(model, capfd):
    """FFmpeg decodes most damage to something; never is a video half written."""
    film('a.mp4', photographs(20), range(0, 800, 40))
    content = Path('a.mp4').read_bytes()
    random = np.random.default_rng(0)
    for number in range(20):
        damaged = bytearray(content)
        for at in random.integers(0, len(content), 30):
            damaged[at] ^= int(random.integers(1, 256))
        Path('b.mp4').write_bytes(damaged)
        status = main([str(model('detection')), 'b.mp4', '--out-dir', str(number)])
        said = capfd.readouterr().err
        results = {path.name for path in Path(str(number)).iterdir()} - {'inputs.json', 'run.json'}
        if status == 0:
            assert results == {'b.detections.jsonl', 'b.overlay.mp4'}
            assert len(seen(f'{number}/b.overlay.mp4').times) > 0
        else:
            assert status == 1 and not results
            assert said.count('\n') == 1 and 'skipped b.mp4: ' in said


def test_times_that_go_back_or_are_missing():
    """As of files that a damaged recorder wrote."""

    class Stream:
        average_rate = guessed_rate = Fraction(10)
        time_base = Fraction(1, 1000)

    class Frame:
        def __init__(self, pts: Optional[int]) -> None:
            self.pts, self.duration = pts, None

    video = videos.Video(None, Stream())
    for pts in (5, 105, 90, None, None, 400):
        video.add_time(Frame(pts))
    assert video.ticks == [5, 105, 106, 206, 306, 400] and video.end == 495


def test_frames_of_several_sizes(model, capsys):
    for name, size in (('a', (64, 96)), ('b', (48, 96))):
        film(f'{name}.avi', photographs(3, *size), range(3), 'mjpeg', 'yuvj420p', tick=TENTH)
    with av.open('both.avi', 'w') as target, av.open('a.avi') as first, av.open('b.avi') as second:
        stream = target.add_stream_from_template(first.streams.video[0])
        for number, source in enumerate((first, second)):
            for packet in source.demux(video=0):
                if packet.size:
                    packet.pts = packet.dts = packet.dts + 3 * number
                    packet.stream = stream
                    target.mux(packet)
    assert main([str(model('detection')), 'both.avi']) == 1
    assert 'its frames have several sizes, 96 x 64 and 96 x 48' in capsys.readouterr().err
    assert not list(Path('predictions').glob('both*'))


def test_a_size_that_the_format_does_not_have(model, capsys):
    frames = [np.zeros((64, 17000, 3), np.uint8)] * 2
    film('a.avi', frames, range(2), 'mjpeg', 'yuvj420p', tick=Fraction(1, 25))
    assert main([str(model('detection')), 'a.avi']) == 1
    assert 'skipped a.avi: cannot write a video of 170' in capsys.readouterr().err
    assert main([str(model('detection')), 'a.avi', '--no-pictures']) == 0


@pytest.mark.parametrize('room', [100, 8192])
def test_a_full_disk(room, model, capsys):
    """No file can grow beyond some bytes: of the first packets, or when the file is finished."""
    film('a.mp4', photographs(60, 200, 300), range(0, 2400, 40))
    path = str(model('detection'))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with (
            open_video(Path('a.mp4')) as video,
            pytest.raises(OSError, match='a.overlay.mp4'),
            video_writer(Path('a.overlay.mp4'), next(iter(video)), video) as writer,
        ):
            for number, frame in enumerate(video, 1):
                writer.write(frame, video.ticks[number])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(os.listdir()) == sorted(['a.mp4', path])


def test_a_killed_run_leaves_no_overlay_or_a_whole_one(model):
    film('a.mp4', photographs(100, 48, 48), range(0, 4000, 40))
    command = [sys.executable, '-m', 'cpvt_pyramid', 'infer', str(model('detection')), 'a.mp4']
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    partial = Path('predictions/.a.overlay.mp4.partial')
    deadline = time.monotonic() + 60
    while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = Path('predictions/a.overlay.mp4')
    assert partial.exists() != found.exists()
    if found.exists():
        assert len(seen(str(found)).times) == 100


def test_without_pyav_one_line_says_what_to_install(model, capsys, monkeypatch):
    film('a.mp4', photographs(3))
    monkeypatch.setitem(sys.modules, 'av', None)
    assert main([str(model('detection')), 'a.mp4']) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'reading videos needs av; pip install av' in line


def test_a_long_video_is_measured_without_decoding(monkeypatch):
    film('a.mp4', photographs(6))
    monkeypatch.setattr(videos.Video, '__iter__', None)
    assert measure_video(Path('a.mp4')).frames == 6
