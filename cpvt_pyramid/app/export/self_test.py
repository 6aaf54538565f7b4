"""The test data in an exported file: PyTorch's outputs for synthetic images.

They tell whether a runtime gives the same outputs on a device, without torch and images.
"""

import base64
import io
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..predict.metadata import parse_metadata
from ..predict.sessions import Session, padded_input, padded_inputs, run_session
from ..tooling.command import UserError, one_line
from .comparison import (
    TOLERANCES,
    Arrays,
    Check,
    Tolerances,
    compare_outputs,
    inside,
    is_detection,
    worst,
)

# Height and width of the images. The last two are padded to one size, and so make a batch.
SIZES = ((192, 256), (131, 97), (150, 123))
VALUES = 2048  # of each output that are compared at most
CELLS = 512  # of each mask

# By group and name: 'image' has the seed, size and original size; 'shapes' those of the outputs,
# 'outputs' their values.
Sample = dict[str, dict[str, np.ndarray]]


def draw(seed: int, height: int, width: int) -> np.ndarray:
    """An image (height, width, 3) RGB uint8 of waves and boxes.

    It is computed in whole numbers, and so is the same on every platform.
    """
    random = np.random.RandomState(seed)  # whose numbers NumPy will not change

    def numbers(low: int, high: int, count: int) -> np.ndarray:
        return random.randint(low, high, count, dtype=np.int64)

    y, x = np.ogrid[:height, :width]
    image = np.full((height, width, 3), 1 << 15, np.int64)
    for _ in range(8):
        rows, columns = numbers(-3000, 3000, 2)
        phases = numbers(0, 1 << 16, 3)
        angle = (rows * y + columns * x)[..., None] + phases & 0xFFFF  # 65536 to the circle
        angle -= 1 << 15
        image += angle * ((1 << 15) - abs(angle)) >> 15  # almost 8192 * sin
    for _ in range(5):
        (top,) = numbers(0, height, 1)
        (left,) = numbers(0, width, 1)
        rows, columns = numbers(8, 80, 2)
        image[top : top + rows, left : left + columns] += numbers(-(1 << 15), 1 << 15, 3)
    return (image >> 8).clip(0, 255).astype(np.uint8)


def thinned(outputs: Arrays) -> dict[str, np.ndarray]:
    """Evenly spaced values of the outputs for an image and cells of masks, but all boxes."""
    if not is_detection(outputs):
        return {name: spaced(x, VALUES) for name, x in outputs.items()}
    result = dict(outputs)
    if 'masks' in outputs:
        masks = outputs['masks']
        cells = masks.reshape(len(masks), int(np.prod(masks.shape[1:]))) >= 0.5
        step = max(math.ceil(cells.shape[1] / CELLS), 1)
        result['masks'] = cells[:, ::step]
    return result


def spaced(x: np.ndarray, count: int) -> np.ndarray:
    """Evenly spaced values of an array, at most `count`."""
    step = max(math.ceil(x.size / count), 1)
    return x.reshape(-1)[::step]


def pack(samples: Sequence[Sample]) -> str:
    """Samples as text for the metadata of a file."""
    arrays = {}
    for number, sample in enumerate(samples):
        for group, values in sample.items():
            for name, x in values.items():
                arrays[f'{number} {group} {name}'] = x
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return base64.b64encode(file.getvalue()).decode()


def unpack(text: str) -> list[Sample]:
    samples: dict[str, Sample] = defaultdict(lambda: defaultdict(dict))
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as file:
        for key in file:
            number, group, name = key.split()
            samples[number][group][name] = file[key]
    return list(samples.values())


def verify_session(path: Path, session: Session, dtype: str = 'float32') -> list[Check]:
    """Compare the outputs of an opened file with those of PyTorch: of each image alone, and of each
    batch of images whose padded sizes are equal, or else of an image twice. The dtype is that in
    which the session was opened.

    Raises:
        UserError: the file has no test data, or cannot be run.
    """
    about = parse_metadata(path, session)
    if session.test is None:
        raise UserError(f'{path} has no test data; export it again')
    try:
        samples = unpack(session.test)
        images = [drawn(sample) for sample in samples]
        tolerances = TOLERANCES[about['dtype'] if dtype == 'float32' else dtype]
        stride = int(about['stride'])
    except Exception as error:  # of base64, zipfile, zlib and NumPy
        raise UserError(f'{path}: damaged test data: {one_line(error)}') from error
    checks = []
    for batch in batches_of(images, session, stride):
        given = [images[i] for i in batch]
        originals = [samples[i]['image']['original'].tolist() for i in batch]
        outputs = run_session(path, session, padded_inputs(given, session.shapes, originals))
        found: list[Check] = []
        for place, i in enumerate(batch):
            own = {name: x[place] for name, x in outputs.items()}
            found += compare_sample(own, samples[i], tolerances)
        checks += worst(found, given, session.device)
    return checks


def drawn(sample: Sample) -> np.ndarray:
    """The image of a sample, in the size of the input."""
    height, width = sample['image']['size'].tolist()
    return draw(int(sample['image']['seed']), height, width)


def batches_of(images: Sequence[np.ndarray], session: Session, stride: int) -> list[list[int]]:
    """The indices of the images in each batch: each image alone, and those of one padded size, or
    else an image twice."""
    batches = [[i] for i in range(len(images))]
    by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, image in enumerate(images):
        by_size[padded_input(image.shape[:2], session.shapes, stride)].append(i)
    together = [batch for batch in by_size.values() if len(batch) > 1]
    return batches + (together or [[0, 0]])


def compare_sample(outputs: Arrays, sample: Sample, tolerances: Tolerances) -> list[Check]:
    """Compare the outputs for an image with those of PyTorch."""
    results = {}
    for name, shape in sample['shapes'].items():
        results[name] = inside(outputs[name], shape.tolist())
    return list(compare_outputs(thinned(results), sample['outputs'], tolerances))


def own_test(session: Session, given: str) -> str:
    """Test data of a file that differs from PyTorch by more than rounding: its own outputs.

    Args:
        session: of the file, on a device that is trusted.
        given: test data of the file that it was made from, with the same images.
    """
    samples = unpack(given)
    for sample in samples:
        original = sample['image']['original'].tolist()
        inputs = padded_inputs([drawn(sample)], session.shapes, [original])
        found = {name: x[0] for name, x in session.run(inputs).items()}
        outputs = {}
        for name, shape in sample['shapes'].items():
            outputs[name] = inside(found[name], shape.tolist())
        if is_detection(outputs):
            used = outputs['labels'] >= 0
            outputs = {name: x[used] for name, x in outputs.items()}
        sample['outputs'] = thinned(outputs)
    return pack(samples)
