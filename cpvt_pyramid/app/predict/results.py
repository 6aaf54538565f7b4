"""The results of `cpvt infer` in a folder: what is written for which input, and counted."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Union

from ..images.inputs import NamedInput, is_video
from ..images.rasters import import_rasterio
from ..predictions.drawing import font
from ..predictions.formats import ImageObjects, may_be_located, write_coco
from ..predictions.kinds import Detections, Kind, Prediction
from ..tooling.command import UserError
from .contents import Contents, contents_for
from .options import InferOptions
from .result_files import (
    COCO,
    DETECTIONS,
    IMAGE_FILES,
    LABELS,
    VIDEO_FILES,
    ImageFile,
    VideoFile,
    name_results,
    read_labels,
    read_records,
)
from .sinks import Frame, Sink
from .videos import Video


class Results(Sink):
    """Writes what a model finds, and counts it; see `Sink`.

    Args:
        options: what is written, and the folder.
        kind: of the results.
        classes: names.

    Attributes:
        full: images and videos in which the model found as many boxes as it can; others may be
            missing.
    """

    takes_videos = True
    takes_large = True

    def __init__(self, options: InferOptions, kind: Kind, classes: Sequence[str]) -> None:
        self.options = options
        self.folder = Path(options.out_dir)
        self.kind: Kind = kind
        self.classes = classes
        self.image_files = [each for each in IMAGE_FILES if each.is_wanted(kind, options)]
        self.video_files = [each for each in VIDEO_FILES if each.is_wanted(kind, options)]
        self.full: set[Path] = set()
        self.counts: Counter[str] = Counter()  # objects, or pixels, of each class
        self.objects: dict[str, ImageObjects] = {}  # by name, for coco.json
        self.lock = threading.Lock()
        if not options.no_pictures:
            # Fonts import matplotlib, which catches warnings. In one of the threads that draw it
            # would also catch those of the others.
            font(12)

    def check(self, inputs: Sequence[Path]) -> None:
        """Check, before a run, that the results of inputs can be written."""
        form = self.options.format
        videos = [path for path in inputs if is_video(path)]
        if self.kind == 'labels' and self.options.tile:
            if form == 'coco':
                raise UserError(
                    'with --tile, segmentation masks can be written as geojson, got --format coco'
                )
            import_rasterio('--tile with a segmentor, which writes GeoTIFFs,')
        if videos and not self.video_files:
            raise UserError('of a video, a segmentor writes a picture only; drop --no-pictures')
        if videos and form:
            raise UserError(f'--format is for images, but {videos[0]} is a video; run it without')
        if form == 'geojson' and (self.kind == 'labels' or any(map(may_be_located, inputs))):
            import_rasterio('--format geojson')

    def name(self, inputs: Mapping[Path, str]) -> list[NamedInput]:
        return name_results(inputs, self.options.out_dir)

    def exist(self, entry: NamedInput) -> bool:
        """Whether the results of an image or a video are there. Each file of them is complete."""
        path, name = entry
        kinds: Sequence[Union[ImageFile, VideoFile]] = self.image_files
        if is_video(path):
            kinds = self.video_files
        return all(self.file(name, kind).exists() for kind in kinds)

    def file(self, name: str, kind: Union[ImageFile, VideoFile]) -> Path:
        return self.folder / f'{name}{kind.ending}'

    def write(self, entry: NamedInput, found: Prediction) -> None:
        self.write_large(entry, contents_for(found))

    def write_large(self, entry: NamedInput, contents: Contents) -> None:
        path, name = entry
        for kind in self.image_files:
            kind.write(self.file(name, kind), path, contents)
        if contents.is_full:
            self.full.add(path)
        if self.options.format == 'coco':
            self.objects[name] = ImageObjects(path, contents.size, contents.objects)
        counts = contents.counts
        with self.lock:
            self.counts += counts

    def write_video(self, entry: NamedInput, video: Video, frames: Iterator[Frame]) -> None:
        path, name = entry
        with ExitStack() as stack:
            files = [
                stack.enter_context(kind.open(self.file(name, kind), video))
                for kind in self.video_files
            ]
            for frame in frames:
                if isinstance(frame.found, Detections) and frame.found.is_full:
                    self.full.add(path)
                for add in files:
                    add(frame)

    def finish(self, done: Sequence[NamedInput]) -> None:
        """Write what is one file for all images; those that an earlier run has written are read."""
        if self.options.format != 'coco':
            return
        found = []
        for entry in done:
            _, name = entry
            found.append(self.objects[name] if name in self.objects else self.read(entry))
        write_coco(self.folder / COCO, found, self.classes)

    def read(self, entry: NamedInput) -> ImageObjects:
        """What an earlier run, or another process, has written for an image."""
        path, name = entry
        if self.kind == 'labels':
            return read_labels(self.folder / f'{name}{LABELS}', path, self.classes)
        return read_records(self.folder / f'{name}{DETECTIONS}', path)

    def summary(self) -> str:
        """What was found in images: the number of objects of each class, or the share of pixels."""
        total = sum(self.counts.values())
        found = []
        for name, count in self.counts.most_common():
            share = f'{name} {count / total:.1%}'
            found.append(share if self.kind == 'labels' else f'{count} {name}')
        return ', '.join(found) or 'nothing'
