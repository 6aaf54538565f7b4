"""What is compared. Importing this file imports neither torch nor mm."""

from dataclasses import dataclass
from typing import NamedTuple

# Width and height of the landscape images, and how often they are drawn; portrait ones are turned.
# At half the size all sides are multiples of 32: no image is padded alone, in any library.
SIZES = ((192, 128), (128, 128), (128, 64))
SHARES = (0.5, 0.25, 0.25)
METRICS, BATCHES = ('AP', 'mIoU'), (1, 8)
PADDING = (0.0, 0.4, 0.7, 1.0)  # bins of the share of a padded image that is padding
CHANGES = ('vanished', 'appeared', 'class', 'moved', 'score')  # of boxes


@dataclass(frozen=True)
class RunSettings:
    """All that determines a run.

    Args:
        model: whose backbone: 'cpvt_pyramid', 'mmseg', 'timm' (PCPVT), 'svt' (ours), or 'resnet'.
        position: 'peg' or 'learned', of ours.
        region: whether the backbone is told the region of each image in a padded batch.
        window_padding: of SVT.
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
    window_padding: str = 'mask'
    lr: float = 2e-3
    seed: int = 0
    split: str = 'test'
    steps: int = 300
    batch: int = 8
    pictures: int = 104
    scales: tuple = (0.5, 1, 1.5, 2)


REFERENCE, SVT = 'ours, valid region', 'SVT, masked windows'
OURS = dict(model='cpvt_pyramid', position='peg', region=True, window_padding='mask')
ARMS = {  # settings that tell the arms apart
    name: {**OURS, **other}
    for name, other in {
        REFERENCE: {},
        'ours, without': dict(region=False),
        'mmsegmentation': dict(model='mmseg', region=False),
        'timm': dict(model='timm', region=False),
        'ours, learned table': dict(position='learned'),
        'ResNet-18': dict(model='resnet', region=False),
        SVT: dict(model='svt'),
        'SVT, zero windows': dict(model='svt', window_padding='zero'),
    }.items()
}
COMPARED = {  # with what; a ResNet is compared with nothing
    'ours, without': REFERENCE,
    'mmsegmentation': REFERENCE,
    'timm': REFERENCE,
    'ours, learned table': REFERENCE,
    'SVT, zero windows': SVT,
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
    batch: int = 8


PRESETS = {
    'smoke': Preset(2, (1e-3, 2e-3), 1, 2, (1,), (REFERENCE, 'ours, without', 'ResNet-18'), 2),
    'small': Preset(3, (2e-3,), arms=(REFERENCE, 'ours, without', 'ResNet-18')),
    'full': Preset(5, (1e-3, 2e-3)),
}
