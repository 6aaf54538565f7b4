"""Detectors and segmentors that OpenMMLab has trained and published, by name.

The table is trained.csv. Each row is a config of ours and a file that fits it: the tensors of
MMDetection's or MMSegmentation's own model, which our backbone converts when they are loaded.
Whoever takes these names passes them through `weights_of`, and reads what it returns.
"""

import csv
import difflib
import os
from pathlib import Path
from typing import NamedTuple, Union

PACKAGE = Path(__file__).parent
TABLE = PACKAGE / 'trained.csv'
METRICS = {'COCO': 'box AP', 'ADE20K': 'mIoU', 'Cityscapes': 'mIoU'}
CLASSES = {'COCO': 80, 'ADE20K': 150, 'Cityscapes': 19}
FLOAT = 4  # bytes


class Trained(NamedTuple):
    """A trained model.

    Attributes:
        config: a file in configs/, without `.py`.
        data: what the model was trained on, a key of `METRICS` and `CLASSES`.
        result: the metric at a single scale, as published.
        parameters: of the whole model.
        url: where the file is. The last part of its name begins its SHA-256.
    """

    config: str
    data: str
    result: str
    parameters: int
    url: str

    @property
    def config_path(self) -> Path:
        """The config in the installed package, or in a clone of the repository."""
        folder = PACKAGE / '.mim' / 'configs'
        if not folder.is_dir():
            folder = PACKAGE.parent / 'configs'
        return folder / f'{self.config}.py'

    @property
    def megabytes(self) -> float:
        """The size of the file, as far as the parameters say."""
        return FLOAT * self.parameters / 1e6


def read_table() -> dict[str, Trained]:
    """The trained models by name, in the order of trained.csv."""
    models = {}
    with TABLE.open(newline='', encoding='utf-8') as file:
        for row in csv.DictReader(file):
            models[row['name']] = Trained(
                config=row['config'],
                data=row['data'],
                result=row['result'],
                parameters=int(row['parameters']),
                url=row['url'],
            )
    return models


TRAINED = read_table()


def weights_of(source: Union[str, Path]) -> Union[str, Path]:
    """What `read_checkpoint` of `checkpoints` takes, from that or from the name of a trained model.

    A file or folder comes before a model of its name.

    Raises:
        FileNotFoundError: there is no such file, but a trained model of a similar name.
    """
    name = str(source)
    if '://' in name or os.path.exists(os.path.expanduser(name)):
        return source
    if name in TRAINED:
        return TRAINED[name].url
    if similar := similar_name(name):
        raise FileNotFoundError(f'no checkpoint at {source}; there is a trained model {similar}')
    return source


def similar_name(name: str) -> str:
    """The trained model that a misspelled or shortened name may mean, or ''."""
    name = name.lower()
    for trained in TRAINED:
        if trained.startswith(f'{name}_'):
            return trained
    similar = difflib.get_close_matches(name, TRAINED, n=1, cutoff=0.8)
    return similar[0] if similar else ''
