"""A model for Python programs."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Optional, Union, overload

import numpy as np
from PIL import Image

from ..images.reading import Source, load_image
from ..predictions.kinds import Detections, Prediction, line_about_limit
from ..tooling.command import UserError, check_at_least
from ..tooling.report import amount
from ..tooling.threads import prefetch
from .automatic_tiles import with_tiles
from .opening import open_model, resolve_model
from .options import ImageOptions
from .protocol import Model, Prepared, line_about_threshold, predict_all


class Predictor:
    """A model that predicts from images of any size.

    It can be pickled, and opens the model again in the process that receives it.

    Args:
        model: a file written by cpvt export; where torch is installed, also the name of a trained
            model; where OpenMMLab is installed, also a config, or a checkpoint with its config
            inside.
        checkpoint: with a config, the weights; a path or an address. With the name of a trained
            model, its file, which is otherwise downloaded.
        backend: runtime of an exported model, 'onnxruntime' (the default) or 'openvino'.
        batch_size: images of a list that pass the model together, if their padded sizes are equal.
        score_thr: leave out boxes with a lower score; None takes the model's own threshold.
        shorter_side: shorter side in pixels of the input of an exported or trained model; None
            takes that of the training.
        device: 'cpu', or a device as PyTorch, onnxruntime or OpenVINO name it, such as 'cuda:1',
            'CUDAExecutionProvider' or 'GPU'.
        dtype: 'float32' or, for a model in PyTorch or with the backend 'openvino', 'bfloat16'.
        workers: threads of an exported model that predict from the images of a list, each with its
            share of the cores. Results are the same. With 1, each image has all cores.
        tile: side in pixels of overlapping tiles, into which all images are divided without
            resizing. None: only those that are much larger than a tile, by a model that does not
            resize images, and a warning says so. 0: none.

    Raises:
        UserError: the model cannot be opened; one line that says why.

    Examples:
        >>> predictor = Predictor('examples/trees.onnx', score_thr=0.3)
        >>> predictor('examples/trees/florida.jpg')
        Detections(36: 36 tree)
        >>> for found in predictor(['examples/trees/florida.jpg', 'examples/trees/california.jpg']):
        ...     picture = found.draw()
    """

    def __init__(
        self,
        model: Union[str, Path],
        checkpoint: Union[str, Path, None] = None,
        *,
        backend: Optional[Literal['onnxruntime', 'openvino']] = None,
        batch_size: int = 1,
        score_thr: Optional[float] = None,
        shorter_side: Optional[int] = None,
        device: Optional[str] = None,
        dtype: Literal['float32', 'bfloat16'] = 'float32',
        workers: int = 1,
        tile: Optional[int] = None,
    ) -> None:
        check_at_least('workers', workers, 1)
        self.workers = workers
        self.options = ImageOptions(
            device=device,
            backend=backend,
            dtype=dtype,
            score_thr=score_thr,
            shorter_side=shorter_side,
            batch_size=batch_size,
            tile=tile,
        )
        self.files, rest = resolve_model(
            str(model), [] if checkpoint is None else [str(checkpoint)]
        )
        if rest:
            raise UserError(f'a checkpoint belongs to a config, and {model} is none')
        self._open()
        if line := line_about_threshold(score_thr, self.model):
            warnings.warn(line, stacklevel=2)

    def _open(self) -> None:
        self.model: Model = open_model(self.files, self.options, threads=self.workers)
        self._by_tiles = with_tiles(
            self.model, self.options.tile, advice='tile=0 takes them as a whole'
        )

    def __getstate__(self) -> dict[str, Any]:
        opened = ('model', '_by_tiles')
        return {name: value for name, value in vars(self).items() if name not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    @overload
    def __call__(self, images: Source) -> Prediction: ...

    @overload
    def __call__(self, images: Union[list, tuple]) -> list[Prediction]: ...

    def __call__(self, images: Union[Source, list, tuple]) -> Union[Prediction, list[Prediction]]:
        """Predict.

        Args:
            images: a path, a Pillow image, an array (H, W, 3) RGB uint8 or, for a model of other
                bands, (H, W, bands) float32, or a list of these.

        Returns:
            `Detections` or a `LabelMap`, or a list of these. A warning tells of images
            for which the model has returned as many boxes as it can.

        Raises:
            OSError: not a complete image; the message begins with its path.
            ValueError: an array of another shape or dtype.
            TypeError: none of the above.
        """
        several = images if isinstance(images, (list, tuple)) else [images]
        found = self._predict(several)
        full = [each for each in found if isinstance(each, Detections) and each.is_full]
        if full:
            line = line_about_limit(amount(len(full), 'image'), full[0].limit or 0)
            warnings.warn(f'{line}; `is_full` tells which', stacklevel=2)
        return found if several is images else found[0]

    def _predict(self, images: Sequence[Source]) -> list[Prediction]:
        model = self._by_tiles
        threads = min(model.threads, max(len(images), 1))
        readers = 0 if threads == 1 else threads
        prepared = (ready() for ready in prefetch(self._prepare, images, readers))
        return list(predict_all(model.predict, prepared, self.options.batch_size, threads))

    def _prepare(self, source: Source) -> Prepared:
        try:
            return self._by_tiles.prepare(self._load(source))
        except OSError as error:
            name = 'the image' if isinstance(source, np.ndarray) else source
            raise OSError(f'{name}: {error}') from error

    def _load(self, source: Source) -> np.ndarray:
        if not self.model.bands:
            return load_image(source)
        if isinstance(source, np.ndarray):
            return source
        if isinstance(source, (str, Path)):
            return self.model.read(Path(source))
        count = len(self.model.bands)
        is_picture = isinstance(source, Image.Image)
        got = f'a Pillow image of mode {source.mode}' if is_picture else type(source).__name__
        kind = ValueError if is_picture else TypeError
        raise kind(
            f'the model takes {amount(count, "band")}, as a path or an array (height, width, '
            f'{count}), got {got}'
        )
