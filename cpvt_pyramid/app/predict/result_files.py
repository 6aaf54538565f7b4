"""The folder of results of `cpvt infer`: a row for each kind of file in it, and their names."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from ..images.formats import open_image
from ..images.inputs import NamedInput
from ..predictions.formats import ImageObjects, objects_of_labels, write_geojson
from ..predictions.kinds import Kind, save_overlay
from ..predictions.records import write_records
from ..tooling.command import UserError, one_line, rank
from ..tooling.files import (
    atomic_write,
    distinct_name,
    files_below,
    make_folder,
    path_from,
    shortened,
    write_text,
)
from .contents import Contents
from .options import InferOptions
from .sinks import Frame
from .videos import Video, VideoWriter, video_writer

COCO = 'coco.json'  # all objects of a run
OWNERS = 'inputs.json'  # the input of each name, relative to the folder
# Endings of the files with predictions
DETECTIONS, LABELS, TILED = '.detections.json', '.labels.png', '.labels.tif'

Wanted = Callable[[Kind, InferOptions], bool]  # whether a file is written, by the kind of results


class ImageFile(NamedTuple):
    """A kind of file that is written for an image."""

    ending: str  # after the name of the results
    is_wanted: Wanted
    write: Callable[[Path, Path, Contents], None]  # the file, for the image


class VideoFile(NamedTuple):
    """A kind of file that is written for a video."""

    ending: str
    is_wanted: Wanted
    # The file of a video, as a context that gives a function to call with each frame
    open: Callable[[Path, Video], AbstractContextManager[Callable[[Frame], None]]]


def write_overlay(file: Path, image: Path, contents: Contents) -> None:
    save_overlay(contents.draw(), file)


def write_labels(file: Path, image: Path, contents: Contents) -> None:
    contents.save(file)


def write_detections(file: Path, image: Path, contents: Contents) -> None:
    write_records(file, image, contents.size, 'detections', contents.objects)


def write_features(file: Path, image: Path, contents: Contents) -> None:
    write_geojson(file, image, contents.features())


@contextmanager
def open_overlay(file: Path, video: Video) -> Iterator[Callable[[Frame], None]]:
    writer: Optional[VideoWriter] = None
    with ExitStack() as stack:

        def add(frame: Frame) -> None:
            nonlocal writer
            picture = np.array(frame.found.draw(legend=False))
            if writer is None:  # the first picture has the size of all
                writer = stack.enter_context(video_writer(file, picture, video))
            writer.write(picture, frame.tick)

        yield add


@contextmanager
def open_lines(file: Path, video: Video) -> Iterator[Callable[[Frame], None]]:
    with atomic_write(file) as draft, draft.open('w') as lines:

        def add(frame: Frame) -> None:
            line = {'frame': frame.number, 'time': round(frame.seconds, 3)}
            lines.write(json.dumps({**line, 'detections': frame.found.records()}) + '\n')

        yield add


# In the order in which they are written: overlays and features of a label map in tiles are made
# from its file. Others are drawn first, which needs most memory.
IMAGE_FILES = (
    ImageFile(TILED, lambda kind, options: kind == 'labels' and bool(options.tile), write_labels),
    ImageFile('.overlay.jpg', lambda kind, options: not options.no_pictures, write_overlay),
    ImageFile(DETECTIONS, lambda kind, options: kind == 'detections', write_detections),
    ImageFile(LABELS, lambda kind, options: kind == 'labels' and not options.tile, write_labels),
    ImageFile('.geojson', lambda kind, options: options.format == 'geojson', write_features),
)
VIDEO_FILES = (
    VideoFile('.overlay.mp4', lambda kind, options: not options.no_pictures, open_overlay),
    VideoFile('.detections.jsonl', lambda kind, options: kind == 'detections', open_lines),
)
RESULTS = tuple(kind.ending for kind in (*IMAGE_FILES, *VIDEO_FILES))


# What an earlier run, or another process, has written


def has_results(folder: Path) -> bool:
    """Whether a run has written something about an input."""
    if not (folder / OWNERS).is_file():
        return False
    return (folder / COCO).is_file() or any(file.is_file() for file in possible_files(folder))


def possible_files(folder: Path) -> Iterator[Path]:
    """The files that there can be for the inputs of earlier runs.

    Raises:
        UserError: see `read_owners`.
    """
    for name in read_owners(folder):
        for ending in RESULTS:
            yield folder / f'{name}{ending}'


def read_records(file: Path, image: Path) -> ImageObjects:
    """What a file says of an image.

    Raises:
        UserError: it is damaged.
    """
    try:
        content = json.loads(file.read_text(encoding='utf-8'))
        for item in content['detections']:
            if not (len(item['box']) == 4 and isinstance(item['score'], float) and item['class']):
                raise ValueError('not a detection')
        size = content['height'], content['width']
        return ImageObjects(image, size, content['detections'])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f'{file} must have the detections of cpvt infer; remove it, and run that again'
        ) from error


def read_labels(file: Path, image: Path, classes: Sequence[str]) -> ImageObjects:
    """The classes in the file of a label map, as objects."""
    with open_image(file) as picture:
        labels = np.asarray(picture)
    height, width = labels.shape
    return ImageObjects(image, (height, width), objects_of_labels(labels, classes))


def detections_in(folder: Path) -> Iterator[tuple[str, ImageObjects]]:
    """The detections in the images of a folder of results, each with the name of its results.

    Raises:
        UserError: a file is damaged.
    """
    for name, image in read_owners(folder).items():
        file = folder / f'{name}{DETECTIONS}'
        if file.is_file():  # else of a video, or of an image that was skipped
            yield name, read_records(file, Path(os.path.normpath(folder / image)))


# Names


def read_owners(folder: Path) -> dict[str, str]:
    """The input of each name in a folder of results, relative to it.

    Raises:
        UserError: the folder has no results, or the file that says it is damaged.
    """
    file = folder / OWNERS
    try:
        return dict(json.loads(file.read_text(encoding='utf-8')))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f'{file} is not complete: {one_line(error)}') from error


def is_result(path: Path) -> bool:
    """Whether a file is a result of an earlier run: it is called like one, and is below a folder
    that has `inputs.json`."""
    if not path.name.endswith(RESULTS):
        return False
    return any((folder / OWNERS).is_file() for folder in Path(os.path.realpath(path)).parents)


def remove_results(folder: Path) -> None:
    """Remove what an earlier run wrote, and nothing else."""
    with suppress(UserError):
        for file in possible_files(folder):
            file.unlink(missing_ok=True)
    for name in (OWNERS, COCO):
        (folder / name).unlink(missing_ok=True)


def name_results(found: Mapping[Path, str], out_dir: str) -> list[NamedInput]:
    """Name the results of inputs, see `find_inputs`, and create the folders for them.

    A name gets a number if its files would overwrite an input, or results of another input, also of
    an earlier run. `inputs.json` in the folder tells which name is whose.
    """
    folder = make_folder(out_dir)
    owners: dict[str, str] = {}
    with suppress(UserError):
        owners = read_owners(folder)
    owner_of = {name.casefold(): source for name, source in owners.items()}
    inputs = {os.path.realpath(path) for path in found}
    sources = {path: path_from(folder, path) for path in found}
    all_sources = set(sources.values())
    there = {path.relative_to(folder).as_posix() for path in files_below(folder)}

    def conflicts(name: str, source: str) -> bool:
        files = [f'{name}{ending}' for ending in RESULTS]
        files = [file for file in files if file in there]
        owner = owner_of.get(name.casefold(), source)
        if owner != source and (owner in all_sources or files):
            return True
        return any(os.path.realpath(folder / file) in inputs for file in files)

    named: list[NamedInput] = []
    taken: set[str] = set()
    for path, wanted in found.items():
        name = distinct_name(shortened(wanted), taken, partial(conflicts, source=sources[path]))
        named.append((path, name))
    for subfolder in {(folder / name).parent for _, name in named}:
        make_folder(subfolder)
    if rank() == 0:
        owners |= {name: sources[path] for path, name in named}
        write_text(folder / OWNERS, json.dumps(owners, indent=1))
    return named
