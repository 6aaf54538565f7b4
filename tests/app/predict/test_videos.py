"""Videos of all rates, whole and cut, with a tiny exported model."""

import json
import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from support import photograph

from cpvt_pyramid.app.commands.infer import main
from cpvt_pyramid.app.images.rasters import ReadError
from cpvt_pyramid.app.predict import videos
from cpvt_pyramid.app.predict.videos import VideoLength, measure_video, video_writer, writable


class Capture:
    """A video as OpenCV opens it: what its container declares, and the time stamps."""

    def __init__(self, frames: float, rate: float, stamps: list[float]) -> None:
        self.values = {cv2.CAP_PROP_FRAME_COUNT: frames, cv2.CAP_PROP_FPS: rate}
        self.stamps = iter(stamps)

    def get(self, key: int) -> float:
        return self.values.get(key, 0.0)

    def set(self, key: int, value: float) -> bool:
        return False

    def grab(self) -> bool:
        stamp = next(self.stamps, None)
        if stamp is None:
            return False
        self.values[cv2.CAP_PROP_POS_MSEC] = stamp
        return True


def measured(monkeypatch, frames: float, rate: float, stamps: list[float]) -> VideoLength:
    video = videos.Video(Capture(frames, rate, stamps))
    monkeypatch.setattr(videos, 'open_video', lambda path: video)
    return measure_video(Path('a.webm'))


def test_rates_are_those_of_the_time_stamps(monkeypatch):
    """Of a slow motion, of the recordings of browsers, and of variable rates."""
    variable = [33.0 * i for i in range(10)] + [330 + 200.0 * i for i in range(10)]
    for frames, rate, stamps, expected in (
        (30, 30.0, [1000 / 30 * i for i in range(30)], 30),
        (30, 211.222, [1000 / 211.222 * i for i in range(30)], 211.222),
        (-9.2e18, 1000.0, [42.0 * i for i in range(20)], 1000 / 42),
        (65, 30.0, variable, 19 / 2.13),
        (20, 8.0, variable, 19 / 2.13),
        (20, 12.5, [500 + 80.0 * i for i in range(20)], 12.5),  # which begins late
        (7, 10.0, [0.0] * 7, 10),  # no time stamps
        (1, 24.0, [0.0], 24),
        (0, float('nan'), [0.0] * 3, videos.FRAME_RATE),
        (330, 30.0, [1000 / 30 * i for i in range(320)], 30),  # and a third of a second of sound
    ):
        length = measured(monkeypatch, frames, rate, stamps)
        assert length.frames == len(stamps)
        assert length.rate == pytest.approx(expected)
        assert length.is_variable == (stamps is variable)


def test_a_video_that_ends_early(monkeypatch):
    for frames, rate, stamps in (
        (300, 30.0, [1000 / 30 * i for i in range(150)]),
        (65, 30.0, [33.0 * i for i in range(10)]),
        (100, 10.0, [0.0] * 50),
    ):
        with pytest.raises(ReadError, match='it ends after .* of .* seconds; to use that part, '):
            measured(monkeypatch, frames, rate, stamps)
    with pytest.raises(ReadError, match='a video without frames'):
        measured(monkeypatch, 9, 30.0, [])


@pytest.mark.parametrize(
    'rate', [0.0001, 0.2, 1, 12.5, 23.976, 29.97, 59.94, 95.1234, 211.222, 239.7602, 1000, 30_000.7]
)
def test_all_rates_can_be_written(rate):
    with video_writer(Path('a.mp4'), (64, 48), rate) as writer:
        for _ in range(3):
            writer.write(np.zeros((48, 64, 3), np.uint8))
    written = cv2.VideoCapture('a.mp4')
    assert written.get(cv2.CAP_PROP_FRAME_COUNT) == 3
    assert written.get(cv2.CAP_PROP_FPS) == pytest.approx(writable(rate), rel=1e-3)
    assert writable(rate) == pytest.approx(max(rate, 0.01), rel=5e-4)


def film(path: str, codec: str, rate: float, count: int) -> None:
    writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*codec), rate, (96, 64))
    assert writer.isOpened()
    for i in range(count):
        writer.write(photograph(64, 96, seed=i))
    writer.release()


def test_a_cut_video_is_skipped_each_time(model, capsys):
    """It has no results, so that a run with --skip-existing does not take it for done."""
    Path('in').mkdir()
    film('in/cut.avi', 'MJPG', 10, 40)
    film('in/whole.avi', 'MJPG', 10, 40)
    os.truncate('in/cut.avi', os.path.getsize('in/cut.avi') // 2)
    for already in (0, 1):
        assert main([str(model('detection')), 'in', '--skip-existing']) == 1
        said = capsys.readouterr()
        assert said.err.count('skipped in/cut.avi: not a complete video: it ends after') == 1
        assert f'{already} of 2 are already done\n' in said.out
        assert sorted(os.listdir('predictions')) == [
            'inputs.json',
            'run.json',
            'whole.detections.jsonl',
            'whole.overlay.mp4',
        ]
    lines = Path('predictions/whole.detections.jsonl').read_text().splitlines()
    assert [json.loads(line)['frame'] for line in lines] == list(range(40))
    times = [json.loads(line)['time'] for line in lines]
    assert times[0] < 0.1 and all(a < b for a, b in zip(times, times[1:]))


def test_an_overlay_lasts_as_long_as_its_video(model, capsys):
    film('slow.avi', 'MJPG', 211.222, 6)
    assert main([str(model('detection')), 'slow.avi']) == 0, capsys.readouterr().err
    overlay = cv2.VideoCapture('predictions/slow.overlay.mp4')
    assert overlay.get(cv2.CAP_PROP_FPS) == pytest.approx(211.222, rel=1e-3)
    assert overlay.get(cv2.CAP_PROP_FRAME_COUNT) == 6
