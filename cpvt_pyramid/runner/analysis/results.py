"""Reading the results of a test."""

import io
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pycocotools.coco import COCO

from ...data.coco import is_number
from ...predict.records import coco_fields
from ...tooling.command import UserError, one_line


class SafeUnpickler(pickle.Unpickler):
    """Reads results of mm without executing code from the file."""

    ALLOWED = {
        'collections': {'OrderedDict'},
        'torch._utils': {'_rebuild_tensor_v2'},
        'numpy': {'dtype', 'ndarray'},
        'numpy.core.multiarray': {'_reconstruct', 'scalar'},
        'numpy.core.numeric': {'_frombuffer'},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ('torch.storage', '_load_from_bytes'):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if name not in self.ALLOWED.get(module.replace('numpy._core', 'numpy.core'), ()):
            raise pickle.UnpicklingError(f'it holds a {module}.{name}')
        return super().find_class(module, name)


def read_list(path: Path) -> list[dict]:
    """The predictions that cpvt test --out wrote, or COCO results (JSON)."""
    try:
        with path.open('rb') as file:
            found = json.load(file) if path.suffix == '.json' else SafeUnpickler(file).load()
    except Exception as error:  # pickle raises many kinds
        raise UserError(f'cannot read {path}: {one_line(error, 120)}') from error
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise UserError(f'{path} must hold a list of predictions')
    return found


def another_data_set(path: Path, missing: str) -> UserError:
    return UserError(f'{path} has results for another data set: there is no {missing}')


def read_detections(path: Path, truth: COCO, categories: Sequence[int]) -> list[dict]:
    """Detections as COCO results, from such a file or one of cpvt test --out.

    Args:
        path: of the file.
        truth: the annotated data set.
        categories: the category of each label.
    """
    if path.suffix == '.json':
        results = read_list(path)
    else:
        results = []
        for sample in read_list(path):
            results.extend(as_coco(sample, path, truth, categories))
    for number, result in enumerate(results):
        check_result(result, f'{path}: result {number}')
        for key, known in (('image_id', truth.imgs), ('category_id', truth.cats)):
            value = result.get(key)
            if not isinstance(value, (int, str)) or value not in known:
                raise another_data_set(path, f'{key} {value!r}')
    return results


def check_result(result: dict, name: str) -> None:
    """Check that a COCO result has a score, and a box or a mask."""
    box = result.get('bbox') or []
    numbers = [result.get('score')]
    numbers += box if isinstance(box, list) else [box]
    has_box = len(numbers) == 5
    has_mask_alone = not box and result.get('segmentation')
    if not (has_box or has_mask_alone) or not all(map(is_number, numbers)):
        raise UserError(
            f'{name} must have a finite score and a bbox of four numbers or a segmentation, '
            f'got {numbers}'[:300]
        )


def as_coco(
    sample: dict, path: Path, truth: COCO, categories: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The detections in a sample of cpvt test --out as COCO results."""
    found = prediction_in(sample, 'pred_instances', path)
    number = sample['img_id']
    name = Path(sample['img_path']).name
    if number not in truth.imgs or Path(truth.imgs[number]['file_name']).name != name:
        raise another_data_set(path, f'image {number} {name}')
    boxes = found['bboxes'].tolist()
    scores = found['scores'].tolist()
    labels = found['labels'].tolist()
    if labels and max(labels) >= len(categories):
        raise another_data_set(path, f'label {max(labels)}')
    masks = found.get('masks') or [None] * len(scores)
    for box, score, label, mask in zip(boxes, scores, labels, masks):
        fields = coco_fields({'box': box, 'score': score, 'mask': mask})
        yield {'image_id': number, 'category_id': categories[label], **fields}


def prediction_in(sample: dict, key: str, path: Path) -> dict:
    if key not in sample:
        raise UserError(f'{path} has no {key}; it holds {", ".join(sorted(sample))[:120]}')
    return sample[key]
