"""A detector or a segmentor on images and on videos, in batches, from file to file."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Callable, NamedTuple

import cv2
import mmcv
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.structures import BaseDataElement
from torch import nn
from tqdm import tqdm

from ..mm.valid_region import AppendsValidity
from .launch import leaves
from .prediction import detections, draw_prediction, read_image, write_results
from .resume import appearing_whole

FRAME_RATE = 25  # of a video that does not tell
WAITING = 64  # images in memory at most, for others of their size to fill a batch with


class Prepared(NamedTuple):
    """An image on its way to the model."""

    source: Any  # what the caller knows it by
    image: np.ndarray  # (H, W, 3) BGR
    data: dict  # what the pipeline made of it


class Predictor:
    """A model with what goes before it and after it.

    Detectors take images of several sizes in a batch, if their backbone is told what is padding.
    In other batches all are of one size: the heads of segmentors enlarge their scores to that of
    the batch, and an image would get other labels in it than alone.

    Args:
        model: a detector or a segmentor.
        cfg: its config, for the test pipeline.
        meta: `classes` and `palette`.
        batch_size: images that pass the model together.
        score_thr: boxes of a lower score are left out.
    """

    def __init__(
        self, model: nn.Module, cfg: Config, meta: dict, batch_size: int, score_thr: float
    ) -> None:
        self.model, self.meta = model, meta
        self.batch_size, self.score_thr = batch_size, score_thr
        self.pipeline = image_pipeline(cfg)
        preprocessor = model.data_preprocessor
        told = isinstance(preprocessor, AppendsValidity) and preprocessor.valid_region
        self.pads = told and cfg.default_scope == 'mmdet'

    def prepare(self, source: Any, image: np.ndarray) -> Prepared:
        return Prepared(source, image, self.pipeline({'img': image, 'img_id': 0}))

    def predict(
        self, images: Iterable[Prepared]
    ) -> Iterator[tuple[Any, np.ndarray, BaseDataElement]]:
        """The source, the image and the prediction of each; those of one size stay in order."""
        waiting = {}  # a batch in the making for each size
        for prepared in images:
            size = None if self.pads else prepared.data['inputs'].shape
            batch = waiting.setdefault(size, [])
            batch.append(prepared)
            if len(batch) == self.batch_size or sum(map(len, waiting.values())) >= max(
                WAITING, self.batch_size
            ):
                fullest = max(waiting, key=lambda size: len(waiting[size]))
                yield from self._predict(waiting.pop(fullest))
        for batch in waiting.values():
            yield from self._predict(batch)

    def _predict(
        self, batch: Sequence[Prepared]
    ) -> Iterator[tuple[Any, np.ndarray, BaseDataElement]]:
        with torch.no_grad():
            samples = self.model.test_step(pseudo_collate([image.data for image in batch]))
        for prepared, sample in zip(batch, samples):
            yield prepared.source, prepared.image, sample


def image_pipeline(cfg: Config) -> Compose:
    """The config's test pipeline, for images that are in memory and have no annotations."""
    steps = []
    for step in next(leaves(cfg.test_dataloader.dataset)).pipeline:
        if step.type.endswith('LoadImageFromFile'):
            steps.append(
                {'type': 'LoadImageFromNDArray', 'to_float32': step.get('to_float32', False)}
            )
        elif not step.type.endswith('LoadAnnotations'):
            steps.append(step)
    return Compose(steps)


def infer_images(
    predictor: Predictor,
    named: Sequence[tuple[Path, str]],
    folder: Path,
    skip: Callable[[Path, Exception], None],
) -> None:
    """Write the results of images; those that are none, or torn, are reported to `skip`.

    Args:
        predictor: the model.
        named: images, and names for their results.
        folder: for the results.
        skip: is told of an image without results, and why.
    """

    def read() -> Iterator[Prepared]:
        for path, name in named:
            try:
                yield predictor.prepare((path, name), read_image(path))
            except (OSError, cv2.error) as error:  # torn, no image, or too thin to be resized
                skip(path, error)
                bar.update()

    with tqdm(total=len(named), unit='image', disable=None) as bar:
        for (path, name), image, sample in predictor.predict(read()):
            write_results(folder, name, path, image, sample, predictor.meta, predictor.score_thr)
            bar.update()


def infer_video(predictor: Predictor, path: Path, name: str, folder: Path) -> None:
    """Write NAME.overlay.mp4 and, of a detector, NAME.detections.jsonl, a line for each frame.

    Frames are read as they are needed.

    Raises:
        OSError: it is no video, or ends early; what there was of it has its results then.
    """
    video = mmcv.VideoReader(str(path))
    if not video.width:
        raise OSError('not a video that OpenCV can read')
    frames = (predictor.prepare(i, frame) for i, frame in enumerate(video))
    done = 0
    with ExitStack() as stack:
        total = max(video.frame_cnt, 0) or None
        bar = stack.enter_context(tqdm(total=total, unit='frame', desc=name, disable=None))
        show = tell = None
        for index, image, sample in predictor.predict(frames):
            picture = draw_prediction(image, sample, predictor.meta, predictor.score_thr, False)
            if not show:
                writer = video_writer(folder / f'{name}.overlay.mp4', picture.size, video.fps)
                show = stack.enter_context(writer)
            show.write(np.array(picture)[..., ::-1])
            if 'pred_sem_seg' not in sample:
                if not tell:
                    result = appearing_whole(folder / f'{name}.detections.jsonl')
                    tell = stack.enter_context(stack.enter_context(result).open('w'))
                found = detections(sample, predictor.meta, predictor.score_thr)
                tell.write(json.dumps({'frame': index, 'detections': found}) + '\n')
            done += 1
            bar.update()
    if done < video.frame_cnt or not done:
        raise OSError(f'ends after {done} of {video.frame_cnt} frames')


@contextmanager
def video_writer(path: Path, size: tuple[int, int], frame_rate: float) -> Iterator[cv2.VideoWriter]:
    """To write frames (H, W, 3) BGR of a size (width, height) with; it appears whole."""
    with appearing_whole(path) as partial:
        draft = partial.with_name(partial.name + path.suffix)  # OpenCV goes by the suffix
        rate = frame_rate if 0 < frame_rate < math.inf else FRAME_RATE
        writer = cv2.VideoWriter(str(draft), cv2.VideoWriter_fourcc(*'mp4v'), rate, size)
        try:
            if not writer.isOpened():
                raise OSError(f'OpenCV cannot write a video of {size[0]} x {size[1]} pixels')
            yield writer
            writer.release()
            os.replace(draft, partial)
        finally:
            writer.release()
            draft.unlink(missing_ok=True)
