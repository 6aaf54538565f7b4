"""A model for engines that spread batches over processes and machines."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

if TYPE_CHECKING:
    from .writing import InferenceModel


class BatchPredictor:
    """A detector or a segmentor that takes batches of images as Ray Data, Spark and pools of
    processes pass them on: dicts of arrays, and dicts of arrays come back.

    It is pickled as its arguments. In a process that receives it the model is loaded once, however
    often it is received. Results do not depend on how images are divided into batches.

    Args:
        model: a config of OpenMMLab, or an exported model.
        checkpoint: with a config, the weights; a path or an address.
        batch_size: images that pass the model together, of which none is padded by another. With
            more than one, the last digits depend on which ones these are.
        score_thr: boxes of a lower score are left out; by default an exported model's own
            threshold, else 0.3.
        device: of PyTorch, by default a GPU if there is one.
        dtype: float32 or bfloat16, see `cpvt infer`.
        backend: of an exported model, onnxruntime or openvino.
        cfg_options: override settings of the config, such as 'model.test_cfg.score_thr=0.1'.

    Raises:
        UserError: the model cannot be loaded; one line that says why.

    Examples:
        >>> import json
        >>> predict = BatchPredictor('examples/trees.onnx', score_thr=0.3)
        >>> found = predict({'path': ['examples/trees/florida.jpg', 'none.jpg']})
        >>> [item['class'] for item in json.loads(found['records'][0])][:2]
        ['tree', 'tree']
        >>> found['error'].tolist()
        ['', 'no such file']
    """

    def __init__(
        self,
        model: str,
        checkpoint: Optional[str] = None,
        *,
        batch_size: int = 1,
        score_thr: Optional[float] = None,
        device: Optional[str] = None,
        dtype: str = 'float32',
        backend: str = 'onnxruntime',
        cfg_options: Sequence[str] = (),
    ) -> None:
        # mm takes seconds to import: where this class is only named, it is not.
        from .exported import load_exported
        from .trained import load_trained

        self.arguments: dict[str, Any] = {
            'model': str(model),
            'checkpoint': checkpoint if checkpoint is None else str(checkpoint),
            'batch_size': batch_size,
            'score_thr': score_thr,
            'device': device,
            'dtype': dtype,
            'backend': backend,
            'cfg_options': tuple(cfg_options),
        }
        self.model: InferenceModel
        if checkpoint is None:
            self.model = load_exported(
                str(model), backend=backend, batch_size=batch_size, score_thr=score_thr
            )
        else:
            self.model = load_trained(
                str(model),
                str(checkpoint),
                cfg_options=cfg_options,
                device=device,
                dtype=dtype,
                batch_size=batch_size,
                score_thr=score_thr,
            )

    def __call__(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
        """Predict.

        Args:
            batch: `path` of N files, or `image`, N arrays of any sizes, (H, W, 3) RGB uint8 or, for
                a model of other bands, (H, W, bands). Other columns are passed on.

        Returns:
            The columns of the batch but `image`, and of each image:

            - `records`: JSON, the list of what NAME.detections.json or NAME.segments.json holds
            - `pixels`: a PNG file, NAME.labels.png or NAME.segments.png; empty for boxes
            - `error`: why the file could not be read; empty if it could
        """
        from ...tooling.command import one_line
        from ...tooling.rasters import ReadError

        sources = batch['image'] if 'image' in batch else batch['path']
        count = len(sources)
        records = ['[]'] * count
        pixels = [b''] * count
        errors = [''] * count

        def prepared() -> Any:
            for index, source in enumerate(sources):
                try:
                    if 'image' not in batch:
                        image = self.model.read(Path(source))
                    elif self.model.bands:
                        image = source
                    else:
                        image = np.ascontiguousarray(source[..., ::-1])
                    yield self.model.prepare(index, image)
                except ReadError as error:
                    errors[index] = one_line(error)

        for index, found in self.model.predict(prepared()):
            if found.kind != 'labels':
                records[index] = json.dumps(found.records())
            pixels[index] = found.png()
        passed = {name: np.asarray(values) for name, values in batch.items() if name != 'image'}
        return {
            **passed,
            'records': np.array(records, object),
            'pixels': np.array(pixels, object),
            'error': np.array(errors, object),
        }

    def __reduce__(self) -> tuple:
        return loaded_once, (type(self), tuple(self.arguments.items()))


@lru_cache(maxsize=1)
def loaded_once(kind: type[BatchPredictor], arguments: tuple) -> BatchPredictor:
    """The predictor with these arguments; in a process, the last one stays loaded."""
    return kind(**dict(arguments))
