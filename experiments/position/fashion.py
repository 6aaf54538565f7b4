"""Fashion-MNIST (arXiv 1708.07747): 70,000 photographs of products, 28 x 28 pixels, ten classes.

By Zalando, MIT license. The files are in Debian's package dataset-fashion-mnist.
"""

import gzip
import hashlib
import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cpvt_pyramid.app.tooling.command import UserError

CLASSES = 10
TUNING = 12  # the last twelfth of the training files, 5,000 photographs, trains no model
# SHA-256 of the files' contents, without the compression, which differs between sources
PINNED = {
    'train-images-idx3-ubyte': 'c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888',
    'train-labels-idx1-ubyte': 'bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9',
    't10k-images-idx3-ubyte': '5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b',
    't10k-labels-idx1-ubyte': '0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34',
}
HOW_TO_GET = (
    '`apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-mnist_*.deb fashion` '
    '(31 MB) puts the files into fashion/usr/share/datasets/fashion-mnist, the folder for --data'
)


class Photos(NamedTuple):
    """Photographs with their classes."""

    images: Tensor  # (N, 1, height, width), uint8
    labels: Tensor  # (N,), int64


@lru_cache
def read_fashion(folder: str) -> Mapping[str, Photos]:
    """The splits 'train', 'tuning' and 'test', read from the four files of the data set.

    Args:
        folder: of the files, as they are or compressed by gzip (.gz).

    Raises:
        UserError: a file is missing or unreadable, or it is not the pinned one.
    """
    parts = {name: idx_array(content_of(Path(folder), name)) for name in PINNED}
    splits = {}
    for split in ('train', 't10k'):
        images = torch.from_numpy(parts[f'{split}-images-idx3-ubyte'])[:, None]
        labels = torch.from_numpy(parts[f'{split}-labels-idx1-ubyte']).long()
        splits[split] = Photos(images, labels)
    images, labels = splits['train']
    trained = len(labels) - len(labels) // TUNING
    found = {
        'train': Photos(images[:trained], labels[:trained]),
        'tuning': Photos(images[trained:], labels[trained:]),
        'test': splits['t10k'],
    }
    return MappingProxyType(found)  # it is kept, and must not be changed


def content_of(folder: Path, name: str) -> bytes:
    """The content of a file of the data set, whose SHA-256 is checked."""
    plain = folder / name
    compressed = folder / f'{name}.gz'
    path = compressed if compressed.is_file() else plain
    if not path.is_file():
        raise UserError(f'--data: there is no {name} or {name}.gz in {folder}; {HOW_TO_GET}')
    try:
        if path == compressed:
            with gzip.open(path) as file:
                content = file.read()
        else:
            content = path.read_bytes()
    except PermissionError:
        raise  # which `run_command` shows in a line
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f'--data: cannot read {path} ({error}); {HOW_TO_GET}') from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != PINNED[name]:
        raise UserError(
            f'--data: the SHA-256 of what is in {path} must be {PINNED[name]}, got {digest}: the '
            f'file is damaged, or of another data set; {HOW_TO_GET}'
        )
    return content


def idx_array(content: bytes) -> np.ndarray:
    """The array of unsigned bytes in the content of an idx file.

    The format of MNIST: two zeros, the type (8: unsigned bytes), the number of dimensions, each
    dimension as a big-endian 32-bit integer, then the values.
    """
    dimensions = content[3]
    shape = np.frombuffer(content, '>u4', dimensions, offset=4)
    values = np.frombuffer(content, np.uint8, math.prod(map(int, shape)), 4 + 4 * dimensions)
    return values.reshape(shape).copy()  # writable, as torch wants it
