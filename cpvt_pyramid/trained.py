"""Detectors and segmentors that OpenMMLab has trained and published, by name.

The table is trained.csv. Each row is a config of ours and a file that fits it: the tensors of
MMDetection's or MMSegmentation's own model, which our backbone converts when they are loaded.
`local_file` of `checkpoints` downloads the files.
"""

import csv
import difflib
from pathlib import Path
from typing import NamedTuple

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


def similar_name(name: str) -> str:
    """The trained model that a misspelled or shortened name may mean, or ''."""
    name = name.lower()
    for trained in TRAINED:
        if trained.startswith(f'{name}_'):
            return trained
    similar = difflib.get_close_matches(name, TRAINED, n=1, cutoff=0.8)
    return similar[0] if similar else ''
