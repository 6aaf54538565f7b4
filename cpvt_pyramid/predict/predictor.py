"""From images to predictions at their own size.

Shapes: images (B, C, H, W), padded at the right and bottom; `valid` (B, 2), the true height and
width of each in pixels. The padded sizes of a batch are equal: no image is padded by another.
"""

import copy
import importlib
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union, overload

import numpy as np

from ..padding.batching import map_in_batches
from ..tooling import memory
from ..tooling.command import UserError
from ..tooling.images import IMAGE_ENDINGS
from ..tooling.inputs import local_path
from ..tooling.threads import Budget, map_in_threads
from .drawing import class_palette
from .images import Source, load_image, rescaled_size, resize_image, resize_scores, size_of
from .masks import enlarge_masks, paste_masks
from .metadata import read_metadata
from .predictions import Detections, Kind, LabelMap, Prediction
from .sessions import Session, open_session, padded_input, padded_inputs, run_session

# Memory for a pixel of the input, of a label map and of masks; see `ExportedModel.needed`.
INPUT_BYTES, LABEL_BYTES, MASK_BYTES = 1000, 80, 100
PIXEL_BYTES = 15  # of an input pixel at the very least: three floats, and three bytes before
SMALLEST = np.finfo(np.float32).tiny  # probability, which has a logarithm
EXPORTED = ('.onnx', '.xml')  # .xml: OpenVINO's own format
TRAINED = '.openmmlab.trained'  # wraps checkpoints; needs torch and mm, which this does not


class Predictor:
    """A model that predicts from images of any size.

    Args:
        model: a file written by cpvt export, or, where torch and OpenMMLab are
            installed, a checkpoint of a training, whose config is inside.
        backend: 'onnxruntime' or 'openvino'; not used for a checkpoint.
        batch_size: images of a list that pass the model together, if their padded sizes are equal.
        score_thr: leave out boxes with a lower score; None takes the model's own threshold.
        size: shorter side of the model's input in pixels; None takes that of the training.
        device: an execution provider of onnxruntime, such as 'CUDAExecutionProvider', or a device
            of OpenVINO, such as 'GPU'.
        workers: threads that predict from the images of a list, each with its share of the cores.
            Results are the same. With 1, each image has all cores. Other devices serve one thread
            at a time, while the others read and write images. For a checkpoint, always 1.

    Raises:
        UserError: the model cannot be opened; one line that says why.

    Examples:
        >>> predictor = Predictor('examples/trees.onnx', score_thr=0.3)
        >>> predictor('examples/trees/florida.jpg')
        Detections(35: 35 tree)
        >>> for found in predictor(['examples/trees/florida.jpg', 'examples/trees/california.jpg']):
        ...     picture = found.draw()
    """

    def __init__(
        self,
        model: Union[str, Path],
        backend: str = 'onnxruntime',
        batch_size: int = 1,
        score_thr: Optional[float] = None,
        size: Optional[int] = None,
        device: Optional[str] = None,
        workers: int = 1,
    ) -> None:
        for name, value in (('batch_size', batch_size), ('size', size), ('workers', workers)):
            if value is not None and value < 1:
                raise UserError(f'{name} must be at least 1, got {value}')
        check_score_thr(score_thr)
        self.batch_size = batch_size
        self.score_thr = score_thr
        path = local_path(str(model)).expanduser()
        if path.suffix in EXPORTED:
            exported = ExportedModel(path, backend, device, workers)
            self.model: Any = exported.with_size(size) if size else exported
        else:
            self.model = _trained(path, size)  # with `predict`, `classes` and so on
            workers = 1
        self.threads = workers if workers > 1 else 0  # besides the caller's, see `map_in_threads`
        check_score_thr(score_thr, self.model.kind_of_results)

    @overload
    def __call__(self, images: Source) -> Prediction: ...

    @overload
    def __call__(self, images: Union[list, tuple]) -> list[Prediction]: ...

    def __call__(self, images: Union[Source, list, tuple]) -> Union[Prediction, list[Prediction]]:
        """Predict.

        Args:
            images: a path, a Pillow image, an array (H, W, 3) RGB uint8, or a list of these.

        Returns:
            `Detections` or a `LabelMap`, or a list of these.

        Raises:
            OSError: not a complete image; the message begins with its path.
        """
        if not isinstance(images, (list, tuple)):
            return self([images])[0]

        def load(source: Source) -> np.ndarray:
            try:
                return load_image(source)
            except OSError as error:
                raise OSError(f'{source}: {error}') from error

        def predict(batch: Sequence[Source]) -> list[Prediction]:
            return self.predict_together([load(source) for source in batch])

        threads = self.threads if len(images) > self.batch_size else 0
        found = map_in_threads(predict, images, self.batch_key, self.batch_size, threads)
        return list(found)

    def predict_together(self, images: Sequence[np.ndarray]) -> list[Prediction]:
        """The results of images (H, W, 3) RGB uint8, in one batch for each padded size."""
        return self.model.predict(images, self.score_thr) if images else []

    def batch_key(self, source: Source) -> Optional[tuple[int, int]]:
        """What the images of a full batch have in common, as far as an image's header tells."""
        size = size_of(source) if self.batch_size > 1 else None
        if size is None or not isinstance(self.model, ExportedModel):
            return size
        return self.model.canvas(size)


def check_score_thr(score_thr: Optional[float], kind: Kind = 'detections') -> None:
    """Raise a UserError unless a threshold for scores is valid, and the results have scores."""
    if score_thr is None:
        return
    if not 0 <= score_thr <= 1:  # refuses nan too
        raise UserError(f'score_thr must be in [0, 1], got {score_thr}')
    if kind != 'detections':
        raise UserError(
            f'score_thr is for scores of boxes, but the model predicts {kind}; leave it out'
        )


def _trained(path: Path, size: Optional[int]) -> Any:
    """The model in a training checkpoint."""
    if size is not None:
        raise UserError(f'size is for exported models; {path} has the size of its training')
    if not path.is_file():
        raise UserError(f'no model at {path}')
    if path.suffix.lower() in IMAGE_ENDINGS:
        raise UserError(f'{path} is an image; the model comes first, then the images')
    try:
        trained = importlib.import_module(TRAINED, __package__)
    except ImportError as error:
        raise UserError(
            f'{path} is not an exported model ({", ".join(EXPORTED)}), and checkpoints of a '
            'training need torch and OpenMMLab; run make setup in a clone of cpvt_pyramid, or '
            f"pip install '.[mm]' there ({error})"
        ) from error
    return trained.TrainedModel(path)


class ExportedModel:
    """A model exported by cpvt export, with its pre- and post-processing; see `Predictor`.

    Attributes:
        about: the metadata in the file; docs/deployment.md lists its keys.
        resize: the longest shorter and longer side of the input in pixels, or None.
    """

    def __init__(
        self,
        path: Path,
        backend: str = 'onnxruntime',
        device: Optional[str] = None,
        workers: int = 1,
    ) -> None:
        self.path = path
        self.session: Session = open_session(path, backend, device, workers)
        self.about = read_metadata(path, self.session)
        self.classes = self.about['classes']
        self.palette = class_palette(self.classes, self.about['palette'])
        segments = self.about['task'] == 'segmentation'
        self.kind_of_results: Kind = 'labels' if segments else 'detections'
        resize = self.about['resize']
        self.resize = resize and (resize['short'], resize['long'])
        self.memory = Budget(memory.available() / 2 if workers > 1 else math.inf)

    def with_size(self, short: int) -> 'ExportedModel':
        """The same model with another shorter side of the input, and the longer in proportion."""
        long = math.inf
        if self.resize:
            long = short / self.resize[0] * self.resize[1]
        other = copy.copy(self)
        other.resize = short, long
        return other

    def predict(self, images: Sequence[np.ndarray], score_thr: Optional[float]) -> list[Prediction]:
        """The results of images (H, W, 3) RGB uint8. Those with the same canvas pass the model
        together."""

        def canvas(image: np.ndarray) -> tuple[int, int]:
            return self.canvas(image.shape[:2])

        predict = partial(self.predict_batch, score_thr=score_thr)
        return list(map_in_batches(predict, images, canvas, self.batch_size(len(images))))

    def predict_batch(
        self, images: Sequence[np.ndarray], score_thr: Optional[float]
    ) -> list[Prediction]:
        """The results of images with the same canvas, in one batch; see `predict`."""
        score_thr = self.about['score_thr'] if score_thr is None else score_thr
        with self.memory.take(self.needed(images)), self.one_line_if_too_large(images):
            resized = [self.to_input_size(image) for image in images]
            outputs = self.run_batch(resized, [image.shape[:2] for image in images])
            found: list[Prediction] = []
            for output, image, small in zip(outputs, images, resized):
                input_size = small.shape[:2]
                if self.kind_of_results == 'labels':
                    found.append(self.label_map(output, image, input_size))
                else:
                    found.append(self.detections(output, image, input_size, score_thr))
            return found

    @contextmanager
    def one_line_if_too_large(self, images: Sequence[np.ndarray]) -> Iterator[None]:
        """Raise a UserError if images in the input size do not fit into memory."""
        sizes = [self.input_size(image.shape[:2]) for image in images]
        height, width = max(sizes, key=math.prod)
        error = UserError(
            f'{self.path}: an input of {width} x {height} pixels does not fit into memory; '
            'reduce the size or the batch'
        )
        pixels = sum(math.prod(size) for size in sizes)
        if PIXEL_BYTES * pixels > memory.available():
            raise error
        try:
            yield
        except MemoryError:
            raise error from None

    def needed(self, images: Sequence[np.ndarray]) -> float:
        """An estimate of the bytes of a prediction: maps at the size of the input and, at that of
        the image, label maps, masks or probabilities of all classes."""
        full = 0  # bytes for a pixel of the image
        if self.kind_of_results == 'labels':
            full = LABEL_BYTES
        elif self.about['masks']:
            full = MASK_BYTES
        if 'probabilities' in self.session.names:
            full += 4 * len(self.classes)
        most = self.resize[0] * self.resize[1] if self.resize else math.inf
        needed = 0.0
        for image in images:
            pixels = image.shape[0] * image.shape[1]
            needed += INPUT_BYTES * min(pixels, most) + full * pixels
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
        self,
        output: dict[str, np.ndarray],
        image: np.ndarray,
        input_size: tuple[int, int],
        score_thr: float,
    ) -> Detections:
        """Those with at least a score, in pixels of the image; see `label_map`."""
        size = image.shape[:2]
        scale = input_size[0] / size[0], input_size[1] / size[1]
        keep = (output['scores'] >= score_thr) & (output['labels'] >= 0)
        boxes, scores, labels = (output[name][keep] for name in ('boxes', 'scores', 'labels'))
        boxes = boxes / np.array([scale[1], scale[0]] * 2, np.float32)
        masks = None
        if self.about['masks'] == 'box':
            masks = paste_masks(output['masks'][keep], boxes, size)
        elif self.about['masks'] == 'image':
            masks = enlarge_masks(output['masks'][keep], scale, size)
        return Detections(image, self.classes, self.palette, boxes, scores, labels, masks)

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

    def canvas(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the padded input of an image of this size, which is resized first."""
        return padded_input(self.input_size(size), self.session.shapes, self.about['stride'])

    def batch_size(self, wanted: int) -> int:
        """Images that pass the model together: at most those of a file with a fixed batch."""
        fixed = self.session.shapes['images'][0]
        return max(min(wanted, fixed or wanted), 1)

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
        found = []
        for i, (size, original) in enumerate(zip(sizes, originals)):
            output = {name: x[i] for name, x in outputs.items()}
            if self.kind_of_results == 'labels':  # values in the padding are arbitrary
                for name, x in output.items():
                    rows, columns = original if name == 'labels' else size
                    output[name] = x[..., :rows, :columns]
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
