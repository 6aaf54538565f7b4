"""A small data set in the format of Fashion-MNIST."""

import gzip
import hashlib

import numpy as np
import pytest

from experiments.position import fashion

TRAIN, TEST = 60, 20  # photographs


def idx_file(array):
    """The content of an idx file: its dimensions as big-endian integers, then its bytes."""
    head = bytes([0, 0, 8, array.ndim])
    return head + np.array(array.shape, '>u4').tobytes() + array.tobytes()


def write_fashion(folder):
    """Write the four files of noise, whose mean tells the class; returns their pins."""
    rng = np.random.default_rng(0)
    pins = {}
    for split, count in (('train', TRAIN), ('t10k', TEST)):
        labels = (np.arange(count) % fashion.CLASSES).astype(np.uint8)
        noise = rng.integers(0, 20, (count, 28, 28))
        images = (noise + 20 * labels[:, None, None]).astype(np.uint8)
        for name, array in (
            (f'{split}-images-idx3-ubyte', images),
            (f'{split}-labels-idx1-ubyte', labels),
        ):
            content = idx_file(array)
            (folder / f'{name}.gz').write_bytes(gzip.compress(content))
            pins[name] = hashlib.sha256(content).hexdigest()
    return pins


@pytest.fixture(scope='module')
def photographs(tmp_path_factory):
    """A folder with the files, which are the pinned ones."""
    folder = tmp_path_factory.mktemp('fashion')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fashion, 'PINNED', write_fashion(folder))
        yield folder
