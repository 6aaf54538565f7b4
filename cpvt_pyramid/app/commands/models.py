"""List the models that commands take by name: trained detectors and segmentors, and backbones.

    cpvt models

Detectors and segmentors were trained and published by OpenMMLab, which is not needed to run them:
segmentors need torch, and detectors also torchvision. A model is downloaded when it is first used,
into the cache of torch.hub ($TORCH_HOME/hub/checkpoints, by default in ~/.cache/torch):

    cpvt infer retinanet_pvt_v2_b2_coco photos/

Without a network, put the file there, or give its path after the name. To export a backbone, give
cpvt export the architecture and a checkpoint.
"""

from collections.abc import Sequence
from typing import Optional

from ..tooling.command import run_command

GROUP = 'training'


def models() -> None:
    """Print the table of the detectors and segmentors, and the names of the architectures."""
    from ...archs import ARCHS, COLUMNAR_ARCHS
    from ...tasks.trained import CLASSES, METRICS, TRAINED
    from ..tooling.report import text_table

    head = ['', 'data', 'classes', 'published', 'parameters', 'download', 'needs', 'weights']
    rows = []
    for name, model in TRAINED.items():
        rows.append(
            [
                name,
                model.data,
                str(len(CLASSES[model.data])),
                f'{model.result} {METRICS[model.data]}',
                f'{model.parameters / 1e6:.1f}M',
                f'{model.megabytes:.0f} MB',
                model.needs,
                model.licence,
            ]
        )
    print(text_table(head, rows))
    print(f'\narchitectures of backbones: {", ".join([*ARCHS, *COLUMNAR_ARCHS])}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(models, argv)
