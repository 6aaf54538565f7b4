"""Models that a session runs: those exported by cpvt export, with numpy, Pillow and onnxruntime or
OpenVINO, and, in `pytorch`, trained ones.

Shapes: images (B, C, H, W), padded at the right and bottom; `valid` (B, 2), the true height and
width of each in pixels. The padded sizes of a batch are equal: no image is padded by another.
"""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from ..images.rasters import ReadError
from ..images.reading import read_image, rescaled_size, resize_image, resize_scores
from ..predictions.drawing import Color, class_palette
from ..predictions.kinds import Detections, Kind, LabelMap, Prediction
from ..tooling import memory
from ..tooling.command import UserError
from ..tooling.threads import Budget
from .masks import enlarge_masks, paste_masks
from .metadata import read_metadata
from .options import DEFAULTS, ModelOptions
from .protocol import Prepared, TooLarge
from .sessions import (
    OutOfMemory,
    Session,
    open_session,
    padded_input,
    padded_inputs,
    run_session,
)
from .tiles import ALIGN, TILE, Boxes, Suppression

# Memory for a pixel of the input, of a label map and of masks; see `SessionModel.memory_estimate`.
INPUT_BYTES, LABEL_BYTES, MASK_BYTES = 1000, 80, 100
PIXEL_BYTES = 15  # of an input pixel at the very least: three floats, and three bytes before
SMALLEST = np.finfo(np.float32).tiny  # probability, which has a logarithm
LONGEST = 10  # times the shorter side, where neither the file nor the user says more


class SessionModel:
    """A model that a session runs, with its pre- and post-processing; see `protocol.Model`.

    Args:
        path: of its file, or its name.
        session: runs it.
        about: metadata, as in a file; docs/export.md lists the keys.
        options: the threshold, by default that in the metadata, and the shorter side of the input,
            by default that in the metadata, or of the image.
        threads: that will call `predict` at the same time.

    Attributes:
        resize: the longest shorter and longer side of the input in pixels, or None.
    """

    bands: Optional[tuple[int, ...]] = None  # RGB

    def __init__(
        self,
        path: Path,
        session: Session,
        about: dict[str, Any],
        options: ModelOptions = DEFAULTS,
        threads: int = 1,
    ) -> None:
        self.path = path
        self.session = session
        self.about = about
        self.threads = threads
        self.score_thr: float = about['score_thr']
        if options.score_thr is not None:
            self.score_thr = options.score_thr
        self.classes: Sequence[str] = self.about['classes']
        self.palette: Sequence[Color] = class_palette(self.classes, self.about['palette'])
        self.suppression = Suppression()
        self.least_score = 0.0
        if nms := self.about.get('nms'):
            self.suppression = Suppression(nms['iou_threshold'], nms['class_agnostic'])
            self.least_score = float(nms.get('score_thr') or 0.0)
        self.most_boxes = session.rows
        self.takes_tiles = not about['masks']
        segments = self.about['task'] == 'segmentation'
        self.kind: Kind = 'labels' if segments else 'detections'
        resize = self.about['resize']
        self.resize = resize and (resize['short'], resize['long'])
        if options.shorter_side is not None:
            self.resize = self.sides_for(options.shorter_side)
        self.memory = Budget(memory.available() / 2 if threads > 1 else math.inf)

    def with_shorter_side(self, short: int) -> 'SessionModel':
        """The same model with another shorter side of the input, and the longer in proportion."""
        other = copy.copy(self)
        other.resize = self.sides_for(short)
        return other

    def sides_for(self, short: int) -> tuple[float, float]:
        """The longest shorter and longer side of the input for another shorter side."""
        if self.resize:
            return short, short / self.resize[0] * self.resize[1]
        return short, LONGEST * short

    def with_score_thr(self, score_thr: float) -> 'SessionModel':
        """The same model with another threshold for the scores of boxes."""
        other = copy.copy(self)
        other.score_thr = score_thr
        return other

    @property
    def own_tile(self) -> Optional[int]:
        """Side of the tiles that show what a whole image shows; see `protocol.Model`. A file of a
        fixed size takes tiles of this size."""
        if self.resize or not self.takes_tiles:
            return None
        sides = [TILE, *(side for side in self.session.shapes['images'][2:] if side)]
        return min(sides) // ALIGN * ALIGN or None

    def read(self, path: Path) -> np.ndarray:
        """The image at a path, (H, W, 3) RGB uint8."""
        return read_image(path)

    def prepare(self, image: np.ndarray) -> Prepared:
        """An image (H, W, 3) RGB uint8 in its input size.

        Raises:
            ReadError: its input would not fit into memory.
        """
        size = self.input_size(image.shape[:2])
        too_large = ReadError(
            f'an input of {size[1]} x {size[0]} pixels does not fit into memory; reduce it with '
            '--shorter-side'
        )
        if PIXEL_BYTES * math.prod(size) > memory.available():
            raise too_large
        try:
            resized = self.to_input_size(image)
        except MemoryError:
            raise too_large from None
        return Prepared(image, resized, self.padded_size(image.shape[:2]))

    def predict(self, batch: Sequence[Prepared]) -> list[Prediction]:
        """The results of images with one padded size."""
        images = [prepared.image for prepared in batch]
        resized: list[np.ndarray] = [prepared.data for prepared in batch]
        with self.memory.take(self.memory_estimate(images)), self.one_line_if_too_large(resized):
            outputs = self.run_batch(resized, [image.shape[:2] for image in images])
            found: list[Prediction] = []
            for output, image, small in zip(outputs, images, resized):
                input_size = small.shape[:2]
                if self.kind == 'labels':
                    found.append(self.label_map(output, image, input_size))
                else:
                    found.append(self.detections(output, image, input_size))
            return found

    def predict_tiles(self, tiles: Sequence[np.ndarray]) -> list[Union[np.ndarray, Boxes]]:
        """The boxes in each tile (h, w, 3), or the scores of its pixels. A model that returns
        labels votes, with the weights of blended scores, where tiles overlap."""
        return [self._predict_tile(tile) for tile in tiles]

    def _predict_tile(self, tile: np.ndarray) -> Union[np.ndarray, Boxes]:
        [output] = self.run_batch([tile], [tile.shape[:2]])
        if self.kind == 'detections':
            used = output['labels'] >= 0
            height, width = tile.shape[:2]
            output['boxes'] = output['boxes'].clip(0, np.array([width, height] * 2, np.float32))
            return Boxes(*(output[name][used] for name in Boxes._fields))
        if 'probabilities' in output:
            planes = enumerate(output['probabilities'])
            return np.stack([self.class_scores(plane, label) for label, plane in planes])
        classes = np.arange(len(self.classes))[:, None, None]
        return (output['labels'] == classes).astype(np.float32)

    def to_labels(self, scores: np.ndarray) -> np.ndarray:
        """The labels (h, w) for scores (K, h, w)."""
        return scores.argmax(0)

    @contextmanager
    def one_line_if_too_large(self, resized: Sequence[np.ndarray]) -> Iterator[None]:
        """Raise `TooLarge` if images in the input size do not fit into memory together."""
        height, width = max((image.shape[:2] for image in resized), key=math.prod)
        try:
            yield
        except (MemoryError, OutOfMemory) as error:
            what = f'an input of {width} x {height} pixels does'
            if len(resized) > 1:
                what = f'{len(resized)} inputs of up to {width} x {height} pixels do'
            raise TooLarge(
                f'{what} not fit into memory ({memory.free_text()}); reduce the input with '
                '--shorter-side'
            ) from error

    def memory_estimate(self, images: Sequence[np.ndarray]) -> float:
        """An estimate of the bytes of a prediction: maps at the size of the input and, at that of
        the image, label maps, masks or probabilities of all classes."""
        full = 0  # bytes for a pixel of the image
        if self.kind == 'labels':
            full = LABEL_BYTES
        elif self.about['masks']:
            full = MASK_BYTES
        if 'probabilities' in self.session.names:
            full += 4 * len(self.classes)
        needed = 0.0
        for image in images:
            size = image.shape[:2]
            needed += INPUT_BYTES * math.prod(self.input_size(size)) + full * math.prod(size)
        return needed

    def label_map(
        self, output: dict[str, np.ndarray], image: np.ndarray, input_size: tuple[int, int]
    ) -> LabelMap:
        """The model's output for an image in its input size, at the image's own size."""
        size = image.shape[:2]
        if 'labels' in output:
            return LabelMap(image, self.classes, self.palette, output['labels'])
        probabilities = output['probabilities']
        labels = np.zeros(size, np.uint8 if len(probabilities) <= 256 else np.int32)
        best = np.full(size, -np.inf, np.float32)
        # One class at a time: all take 150 floats a pixel for ADE20K.
        for label, plane in enumerate(probabilities):
            plane = self.class_scores(plane, label)
            if size != input_size:
                plane = resize_scores(plane, size)
            labels[plane > best] = label
            np.maximum(best, plane, out=best)
        return LabelMap(image, self.classes, self.palette, labels)

    def detections(
        self, output: dict[str, np.ndarray], image: np.ndarray, input_size: tuple[int, int]
    ) -> Detections:
        """Those with at least the model's threshold, in pixels of the image; see `label_map`."""
        size = image.shape[:2]
        scale = input_size[0] / size[0], input_size[1] / size[1]
        keep = (output['scores'] >= self.score_thr) & (output['labels'] >= 0)
        boxes, scores, labels = (output[name][keep] for name in ('boxes', 'scores', 'labels'))
        boxes = boxes / np.array([scale[1], scale[0]] * 2, np.float32)
        masks = None
        if self.about['masks'] == 'box':
            masks = paste_masks(output['masks'][keep], boxes, size)
        elif self.about['masks'] == 'image':
            masks = enlarge_masks(output['masks'][keep], scale, size)
        if 'valid' not in self.session.shapes:  # boxes may reach into the padding
            boxes = boxes.clip(0, np.array([size[1], size[0]] * 2, np.float32))
        common = image, self.classes, self.palette
        return Detections(*common, boxes, scores, labels, masks, self.most_boxes)

    def input_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width that an image is resized to for the model."""
        if self.resize:
            size = rescaled_size(size, *self.resize)
        height, width = size
        fixed_height, fixed_width = self.session.shapes['images'][2:]
        scale = 1.0
        if fixed_height:
            scale = min(scale, fixed_height / height)
        if fixed_width:
            scale = min(scale, fixed_width / width)
        return max(int(height * scale), 1), max(int(width * scale), 1)

    def to_input_size(self, image: np.ndarray) -> np.ndarray:
        """Resize an image (H, W, 3) for the model."""
        return resize_image(image, self.input_size(image.shape[:2]))

    def padded_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the padded input of an image of this size, which is resized first."""
        return padded_input(self.input_size(size), self.session.shapes, self.about['stride'])

    def class_scores(self, probabilities: np.ndarray, label: int) -> np.ndarray:
        """What is resized and averaged, of one class: logits, up to a constant of each pixel, as in
        MMSegmentation, except for models whose queries have none."""
        if self.about.get('resized') == 'probabilities':
            return probabilities
        share = 1.0
        if len(self.classes) == 2:
            threshold = self.about.get('threshold') or 0.5  # of the second
            share = threshold if label == 1 else 1 - threshold
        return np.log(np.maximum(probabilities, SMALLEST) / np.float32(share))

    def run_batch(
        self, images: Sequence[np.ndarray], originals: Sequence[tuple[int, int]]
    ) -> list[dict[str, np.ndarray]]:
        """The outputs for images (H, W, 3) RGB uint8 in the input size, in one batch of one padded
        size: maps without padding, label maps in the heights and widths of `originals`."""
        sizes = [image.shape[:2] for image in images]
        room = self.session.shapes['images'][2:]
        height, width = np.max(sizes, axis=0)
        if any(n and side > n for n, side in zip(room, (height, width))):
            raise UserError(
                f'{self.path} takes images of up to {room[0]} x {room[1]}, got {height} x '
                f'{width}; export it without --size, or reduce --tile'
            )
        inputs = padded_inputs(images, self.session.shapes, originals)
        outputs = run_session(self.path, self.session, inputs)
        if not all(map(len, outputs.values())):  # OpenVINO raises no error then
            raise OutOfMemory(f'{self.path} returned nothing: too little memory')
        found = []
        for i, (size, original) in enumerate(zip(sizes, originals)):
            output = {name: x[i] for name, x in outputs.items()}
            if self.kind == 'labels':  # values in the padding are arbitrary
                for name, x in output.items():
                    rows, columns = original if name == 'labels' else size
                    output[name] = x[..., :rows, :columns]
            elif 'valid' not in inputs and size != inputs['images'].shape[2:]:
                # The file takes the padding for image, and may find objects there.
                x1, y1 = output['boxes'][:, :2].T
                outside = (x1 >= size[1]) | (y1 >= size[0])
                output['labels'] = np.where(outside, -1, output['labels'])
            self.check(output)
            found.append(output)
        return found

    def check(self, output: dict[str, np.ndarray]) -> None:
        """Warn of NaN; raise a UserError if a label has no name."""
        count = len(output.get('probabilities', ()))
        if 'labels' in output:
            count = max(count, int(output['labels'].max(initial=0)) + 1)
        if count > len(self.classes):
            raise UserError(
                f'{self.path} returns {count} classes, but its metadata names '
                f'{len(self.classes)}; export the model again'
            )
        for name, x in output.items():
            if x.dtype.kind == 'f' and np.isnan(x.min(initial=0)):
                advice = 'results are incomplete; check its weights, and export it without --half'
                text = f'{self.path} returned NaN in {name}: {advice}'
                warnings.warn(text, RuntimeWarning, stacklevel=2)


class ExportedModel(SessionModel):
    """A model exported by cpvt export.

    Args:
        path: the .onnx file, or an OpenVINO model (.xml) made from one.
        options: how it is opened; by default, boxes are those above the threshold in the file.
        threads: that will call `predict` at the same time, each with its share of the cores. Other
            devices than CPUs serve one at a time.
    """

    def __init__(self, path: Path, options: ModelOptions = DEFAULTS, threads: int = 1) -> None:
        session = open_session(path, options, threads)
        super().__init__(path, session, read_metadata(path, session), options, threads)
