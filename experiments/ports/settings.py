"""What is compared. Importing this file imports neither torch nor mm."""

from dataclasses import dataclass
from typing import NamedTuple

METRICS, BATCHES = ('AP', 'mIoU'), (1, 8)
PADDING = (0.0, 0.4, 0.7, 1.0)  # bins of the share of a padded image that is padding
CHANGES = ('vanished', 'appeared', 'class', 'moved', 'score')  # of boxes


@dataclass(frozen=True)
class RunSettings:
    """All that determines a run.

    Args:
        model: whose backbone: 'cpvt_pyramid', 'mmseg', 'timm' (PCPVT), or 'resnet'.
        position: 'peg' or 'learned', of ours.
        region: whether the model is told the region of each image in a padded batch.
        lr: the peak learning rate.
        seed: of the weights and all pictures.
        split: 'tuning' or 'test'. The photographs of the test appear in nothing else.
        steps: of training.
        batch: pictures in a step.
        pictures: of the evaluation.
        scales: factors of the image size in the evaluation.
    """

    model: str = 'cpvt_pyramid'
    position: str = 'peg'
    region: bool = True
    lr: float = 2e-3
    seed: int = 0
    split: str = 'test'
    steps: int = 300
    batch: int = 8
    pictures: int = 104
    scales: tuple = (0.5, 1, 1.5, 2)


REFERENCE = 'ours, valid region'
ARMS = {  # settings that tell the arms apart
    name: dict(model=model, position=position, region=region)
    for name, model, position, region in (
        (REFERENCE, 'cpvt_pyramid', 'peg', True),
        ('ours, without', 'cpvt_pyramid', 'peg', False),
        ('mmsegmentation', 'mmseg', 'peg', False),
        ('timm', 'timm', 'peg', False),
        ('ours, learned table', 'cpvt_pyramid', 'learned', True),
        ('ResNet-18', 'resnet', 'peg', False),
    )
}
TUNED = 'ours, without'  # all arms take its learning rate, which favours the ports, if any


class Preset(NamedTuple):
    """How much work the answer is worth."""

    seeds: int
    rates: tuple[float, ...]  # of which the best is chosen, with another seed and other pictures
    steps: int = 300
    pictures: int = 104
    scales: tuple[float, ...] = (0.5, 1, 1.5, 2)
    arms: tuple[str, ...] = tuple(ARMS)


PRESETS = {
    'smoke': Preset(2, (1e-3, 2e-3), 3, 5, (1,), (REFERENCE, 'ours, without', 'ResNet-18')),
    'small': Preset(3, (2e-3,), arms=(REFERENCE, 'ours, without', 'ResNet-18')),
    'full': Preset(5, (1e-3, 2e-3)),
}
