"""Photographs in packages, and random crops of them."""

import importlib.resources
import io
import math
from typing import NamedTuple, Union

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from cpvt_pyramid.demo.trees import DEEPFOREST
from cpvt_pyramid.demo.wheels import Package, open_wheel

MACHINE_VISION_TOOLBOX = Package(
    'mvtb-data',
    '1.6.1',
    'mvtb_data-1.6.1-py3-none-any.whl',
    '0ca9c30e100fa272421068a167ea6529085ff8f4afdca72e5fad681c52cabdbf',
)


class Source(NamedTuple):
    """Photographs in a package.

    Attributes:
        package: the name of one that is installed, or one whose wheel is downloaded.
        folder: of the files, within the package or wheel.
        files: their names.
        licence: theirs.
    """

    package: Union[str, Package]
    folder: str
    files: tuple[str, ...]
    licence: str


SCIKITS = (
    Source(
        'skimage',
        'data',
        (
            'astronaut.png',
            'brick.png',
            'camera.png',
            'chelsea.png',
            'coffee.png',
            'coins.png',
            'grass.png',
            'gravel.png',
            'hubble_deep_field.jpg',
            'ihc.png',
            'moon.png',
            'motorcycle_left.png',
            'motorcycle_right.png',
            'retina.jpg',
            'rocket.jpg',
        ),
        'public domain or CC0, but for ihc and coins: no known copyright restrictions',
    ),
    Source('sklearn', 'datasets/images', ('china.jpg', 'flower.jpg'), 'CC BY 2.0'),
    Source('matplotlib', 'mpl-data/sample_data', ('grace_hopper.jpg',), 'public domain'),
)
HELD_OUT = (1070492, 1070502, 1070508, 1070511, 1070513)  # by the package, in another folder
PLACES = Source(
    MACHINE_VISION_TOOLBOX,
    'mvtbdata/images',
    (
        'building2-3.png',
        *(f'campus/P{number}.png' for number in range(1070491, 1070516) if number not in HELD_OUT),
        'church.png',
        'eiffel-1.png',
        'eiffel-2.png',
        *(f'flowers{number}.png' for number in range(1, 10)),
        'lab-scene.png',
        'mosaic/aerial-08.png',
        'mosaic/aerialphoto.png',
        'notre-dame.png',
        'parks.png',
        'road.png',
        'rocks2-l.png',
        'roof.png',
        'street.png',
        'walls-l.png',
    ),
    'MIT, as part of the package',
)
# Not in this list: the photographs of trees on which detectors are validated and tested.
FORESTS = Source(
    DEEPFOREST,
    'deepforest/data',
    (
        '2019_YELL_2_528000_4978000_image_crop2.png',
        'SOAP_031.png',
        'AWPE Pigeon Lake 2020 DJI_0005.JPG',
    ),
    'MIT, as part of the package; the first two are photographs of NEON (CC0)',
)
GROUPS = (SCIKITS, (PLACES,), (FORESTS,))

SMALLEST_CROP = 64  # pixels, side of the part of a photograph that is enlarged or reduced
MIXED = 0.5  # share of the batches in which pairs of crops are blended


def load_photographs() -> list[list[Tensor]]:
    """The photographs of each group, each (3, H, W) uint8."""
    return [[image for source in group for image in images_of(source)] for group in GROUPS]


def images_of(source: Source) -> list[Tensor]:
    if isinstance(source.package, Package):
        with open_wheel(source.package) as wheel:
            return [decoded(wheel.read(f'{source.folder}/{name}')) for name in source.files]
    folder = importlib.resources.files(source.package).joinpath(source.folder)
    return [decoded(folder.joinpath(name).read_bytes()) for name in source.files]


def decoded(content: bytes) -> Tensor:
    image = Image.open(io.BytesIO(content)).convert('RGB')
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


class Crops:
    """Batches of random crops: of random place, zoom, orientation and color, half of them blended.

    The teacher and the student get the same pixels, and blends make pictures that no photograph
    has, as in "Knowledge distillation: A good teacher is patient and consistent" (arXiv
    2106.05237), section 3.

    Args:
        groups: of photographs, each (3, H, W) uint8. All groups have the same chance; within a
            group, that of a photograph grows with the root of its area.
        side: of a crop, in pixels.
        seed: of everything random.
    """

    def __init__(self, groups: list[list[Tensor]], side: int, seed: int) -> None:
        self.groups = groups
        self.side = side
        self.rng = np.random.default_rng(seed)
        lengths = [np.sqrt([photograph[0].numel() for photograph in group]) for group in groups]
        self.chances = [group / group.sum() for group in lengths]

    def batch(self, count: int) -> Tensor:
        """(count, 3, side, side) float32 from 0 to 1."""
        crops = torch.stack([self.crop() for _ in range(count)])
        if self.rng.random() < MIXED:
            shares = torch.from_numpy(self.rng.random((count, 1, 1, 1), np.float32))
            crops = shares * crops + (1 - shares) * crops.flip(0)
        return crops

    def crop(self) -> Tensor:
        """(3, side, side) float32 from 0 to 1."""
        group = self.rng.integers(len(self.groups))
        number = self.rng.choice(len(self.groups[group]), p=self.chances[group])
        photograph = self.groups[group][number]
        height, width = photograph.shape[1:]
        # The zoom is uniform in octaves; the aspect ratio from 3:4 to 4:3.
        largest = min(height, width, 4 * self.side)
        length = math.exp(self.rng.uniform(math.log(SMALLEST_CROP), math.log(largest)))
        stretch = math.exp(self.rng.uniform(math.log(3 / 4), math.log(4 / 3)) / 2)
        rows = min(round(length * stretch), height)
        columns = min(round(length / stretch), width)
        top = self.rng.integers(height - rows + 1)
        left = self.rng.integers(width - columns + 1)
        part = photograph[:, top : top + rows, left : left + columns].float()
        part = F.interpolate(part[None], (self.side, self.side), mode='bilinear', antialias=True)[0]
        part = torch.rot90(part, int(self.rng.choice(4, p=(0.7, 0.1, 0.1, 0.1))), (1, 2))
        if self.rng.random() < 0.5:
            part = part.flip(2)
        return self.recolored(part / 255)

    def recolored(self, crop: Tensor) -> Tensor:
        """The crop with another brightness, contrast, saturation and balance of colors."""
        brightness, contrast, saturation = self.rng.uniform(0.6, 1.4, 3).tolist()
        balance = torch.from_numpy(self.rng.uniform(0.85, 1.15, (3, 1, 1)).astype(np.float32))
        crop = crop * brightness * balance
        crop = crop.mean() + contrast * (crop - crop.mean())
        gray = crop.mean(0, keepdim=True)
        crop = gray + saturation * (crop - gray)
        return crop.clamp(0, 1)
