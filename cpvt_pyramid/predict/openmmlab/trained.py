"""Models of mm, from a config and a checkpoint to the predictions for images."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from torch import Tensor, nn

from ...accelerate import use_winograd
from ...config.check import check_settings
from ...config.load import config_in_checkpoint, load_config
from ...config.parts import dataset_meta, kind_of, leaves, loaded_bands
from ...mm.amp import replace_forward
from ...padding.batching import map_in_batches
from ...tooling.command import UserError
from ...tooling.explain import explained
from ...tooling.rasters import ReadError
from ..predictions import Prediction
from .grouping import size_in_batch
from .large_images import TileModel, fingerprint, tile_model
from .models import build_model, fetch_checkpoint, load_whole_model
from .postprocessing import skip_unused
from .prediction import is_panoptic, kind_of_results, to_prediction
from .rasters import picture, read_image
from .tiling import Found

SCORE_THR = 0.3  # of the boxes that are kept, unless the user gives another


class Prepared(NamedTuple):
    """An image on its way to the model."""

    source: Any  # the caller's reference to it
    image: np.ndarray  # (H, W, 3) BGR, to draw on
    data: dict  # the output of the pipeline


@contextmanager
def errors_of_model() -> Iterator[None]:
    """Inside this context, in which a model runs, an exception is a UserError of one line."""
    with explained():
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            advice = 'use a smaller --batch-size or --tile'
            raise UserError(f'too little GPU memory; {advice}') from error


class ModelPredictor:
    """A detector or a segmentor with the test pipeline of its config. What is wrong with the config
    becomes a UserError.

    Args:
        meta: `classes` and `palette`.
        batch_size: images that pass the model together, of which none is padded by another.
        score_thr: boxes of a lower score are left out.
        about: what identifies the model, as JSON values; for `in_tiles`.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: Config,
        meta: dict,
        batch_size: int = 1,
        score_thr: float = SCORE_THR,
        about: Optional[dict] = None,
    ) -> None:
        self.model: Any = model
        self.cfg = cfg
        self.meta = meta
        self.batch_size = batch_size
        self.score_thr = score_thr
        self.about = about or {}
        self.kind = kind_of_results(model, cfg)
        self.device = next(model.parameters()).device
        self.bands = loaded_bands(cfg)
        self.pipeline = image_pipeline(cfg)
        skip_unused(model)

    def read(self, path: Path) -> np.ndarray:
        return read_image(path, self.bands)

    def prepare(self, source: Any, image: np.ndarray) -> Prepared:
        """An image, see `read`, in the form that `predict` takes.

        Raises:
            ReadError: the model cannot take it.
        """
        height, width, channels = image.shape
        if self.bands and channels != len(self.bands):  # a frame of a video
            raise ReadError(f'the model takes {len(self.bands)} bands, got {channels}')
        with explained():
            try:
                data = self.pipeline({'img': image, 'img_id': 0})
            except cv2.error as error:
                if error.code != cv2.Error.STS_ASSERT:
                    raise
                data = None  # it would be resized to no pixels
        if data is None:
            raise ReadError(
                f'{width} x {height} pixels are too thin to be resized as the test pipeline says'
            )
        return Prepared(source, picture(image), data)

    def predict(self, images: Iterable[Prepared]) -> Iterator[tuple[Any, Prediction]]:
        """The source and prediction of each, in order."""
        return map_in_batches(self._predict, images, self._size_in_batch, self.batch_size)

    def in_tiles(self) -> TileModel:
        """The model for images larger than memory."""
        ready = tile_model(self.model, self.cfg, self.about, self.meta, self.score_thr)

        def predict(tile: Tensor) -> Union[Tensor, Found]:
            with errors_of_model():
                return ready.predict(tile)

        return ready._replace(predict=predict)

    def _size_in_batch(self, image: Prepared) -> Optional[tuple[int, int]]:
        if 'inputs' not in image.data:  # of a wrong pipeline: the data preprocessor raises an error
            return None
        return size_in_batch(self.model, image.data['inputs'])

    def _predict(self, batch: Sequence[Prepared]) -> list[tuple[Any, Prediction]]:
        for image in batch:
            if 'data_samples' in image.data:  # not so in a wrong pipeline
                image.data['data_samples'].set_metainfo({'score_thr': self.score_thr})
        with errors_of_model(), torch.no_grad():
            samples = self.model.test_step(pseudo_collate([image.data for image in batch]))
            if len(samples) != len(batch):
                raise ValueError(
                    f'the model returned {len(samples)} results for {len(batch)} images'
                )
            found = []
            for image, sample in zip(batch, samples):
                prediction = to_prediction(sample, image.image, self.meta, self.score_thr)
                found.append((image.source, prediction))
        return found


def image_pipeline(cfg: Config) -> Compose:
    """The config's test pipeline, for images in memory and without annotations."""
    steps = []
    dataset: Any = next(leaves(cfg.test_dataloader.dataset))
    for step in dataset.pipeline:
        kind = kind_of(step)
        if kind.endswith(('LoadBands', 'LoadImageFromFile')):
            to_float32 = kind.endswith('LoadBands') or step.get('to_float32', False)
            steps.append({'type': 'LoadImageFromNDArray', 'to_float32': to_float32})
        elif not re.search(r'Load\w*Annotations$', kind):
            steps.append(step)
    return Compose(steps)


def load_trained(
    config: str,
    checkpoint: str,
    *,
    cfg_options: Sequence[str] = (),
    device: Optional[str] = None,
    dtype: str = 'float32',
    batch_size: int = 1,
    score_thr: Optional[float] = None,
) -> ModelPredictor:
    """Build a model and load its weights; for the arguments, see `cpvt infer`."""
    cfg = load_config(config, cfg_options)
    check_settings(cfg, 'test_dataloader')
    weights = fetch_checkpoint(checkpoint)
    model = build_model(cfg, device)
    load_whole_model(model, weights, checkpoint)
    use_winograd(model)
    if dtype == 'bfloat16':
        replace_forward(model)
    if score_thr is None:
        score_thr = SCORE_THR
    about = {**fingerprint(cfg, weights), 'dtype': dtype}
    with explained():
        meta = dataset_meta(cfg, weights)
        return ModelPredictor(model, cfg, meta, batch_size, score_thr, about)


class TrainedModel:
    """A detector or a semantic segmentor of mm, from a checkpoint that has its config inside. The
    runtime imports this by name.

    Raises:
        UserError: not a complete checkpoint, without a config, or of a panoptic model.
    """

    def __init__(self, path: Path) -> None:
        weights = fetch_checkpoint(path)
        cfg = config_in_checkpoint(weights, path)
        model = build_model(cfg, None)
        if is_panoptic(model):
            raise UserError(f'{path} is a panoptic model; run it with cpvt infer')
        load_whole_model(model, weights, path)
        use_winograd(model)
        self.meta = dataset_meta(cfg, weights)
        self.classes = self.meta['classes']
        self.predictor = ModelPredictor(model, cfg, self.meta, score_thr=0.0)
        self.kind_of_results = self.predictor.kind

    def predict(self, images: Sequence[np.ndarray], score_thr: Optional[float]) -> list[Prediction]:
        self.predictor.batch_size = len(images)
        self.predictor.score_thr = SCORE_THR if score_thr is None else score_thr
        prepare = self.predictor.prepare
        inputs = (prepare(None, cv2.cvtColor(image, cv2.COLOR_RGB2BGR)) for image in images)
        found = self.predictor.predict(inputs)
        return [replace(result, image=image) for (_, result), image in zip(found, images)]
