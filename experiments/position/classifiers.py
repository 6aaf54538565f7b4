"""Training of the models that classify photographs, as the CPVT paper does it, at desk scale."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

from cpvt_pyramid.archs import ColumnarArch
from cpvt_pyramid.columnar import CPVT
from experiments.runs import muon_and_adamw

from .answers import WEIGHT_DECAY, PositionSettings
from .fashion import CLASSES, Photos, read_fashion

SIDE = 28  # of the training photographs, in pixels
# A patch of 2 makes 14 x 14 tokens, as many as the paper's patch of 16 at 224 pixels.
ARCH = ColumnarArch(dim=32, heads=2, depth=6, mlp_ratio=2, patch_size=2)
EVALUATED = 16_384  # tokens of an evaluated batch
BICUBIC = dict(interpolation=v2.InterpolationMode.BICUBIC, antialias=True)


@dataclass(frozen=True)
class ClassifierSettings(PositionSettings):
    """All that determines the training of a classifier of Fashion-MNIST.

    Args:
        sizes: sides in pixels that test photographs are resized to.
        resized: number of test photographs that are resized, the first of `pictures`.
        least_area: of the random crop of a training photograph, as a share of the photograph.
        data: folder of the files; where they lie changes nothing.
    """

    sizes: tuple[int, ...] = ()
    resized: int = 1000
    least_area: float = 0.35
    data: str = field(default='', compare=False)

    @property
    def label(self) -> str:
        return f'photos-{self.position}'

    def build(self) -> CPVT:
        torch.manual_seed(self.seed)
        return CPVT(
            ARCH,
            num_classes=CLASSES,
            position=self.position,
            position_options=dict(self.options) or None,
            peg=dict(self.peg) or None,
            class_token=self.class_token,
            pretrain_img_size=SIDE,
            in_channels=1,
        )

    def optimizers(self, model: CPVT) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the blocks, AdamW for the rest. AdamW alone, as in the paper,
        learns much less in so few steps."""
        matrices = [layer.weight for layer in model.blocks.modules() if type(layer) is nn.Linear]
        return muon_and_adamw(matrices, model, self.lr, WEIGHT_DECAY)

    def loss(self, model: CPVT, step: int) -> Tensor:
        images, labels = self.draw(step)
        return F.cross_entropy(model(normalized(images)), labels)

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """The photographs (B, 1, 28, 28) of a training step and their classes: random crops,
        resized, every other one mirrored, as in DeiT's training, the paper's."""
        photos = read_fashion(self.data)['train']
        seed = self.seed * 1_000_003 + 1 + step
        chosen = np.random.default_rng(seed).integers(len(photos.labels), size=self.batch)
        augment = v2.Compose(
            [
                v2.RandomResizedCrop(SIDE, scale=(self.least_area, 1), **BICUBIC),
                v2.RandomHorizontalFlip(),
            ]
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            images = torch.stack([augment(photos.images[i]) for i in chosen])
        return images, photos.labels[chosen]

    def evaluate(self, model: CPVT) -> dict[str, float]:
        """The accuracy of a model in evaluation mode.

        Returns:
            'accuracy', of all `pictures` as they are; and 'N px' of the `resized` ones, for each
            of the `sizes` N.
        """
        images, labels = self.test_photos(self.pictures)
        metrics = {'accuracy': accuracy(model, images, labels)}
        for side in self.sizes:
            metrics[size_name(side)] = accuracy(
                model, resized(images[: self.resized], side), labels[: self.resized]
            )
        return metrics

    def test_photos(self, count: int) -> Photos:
        """The first photographs of this run's evaluation, in an order that the seed determines."""
        photos = read_fashion(self.data)[self.split]
        order = np.random.default_rng(self.seed).permutation(len(photos.labels))
        chosen = order[:count]
        return Photos(photos.images[chosen], photos.labels[chosen])


def size_name(side: int) -> str:
    """The metric of test photographs with this side."""
    return f'{side} px'


def normalized(images: Tensor) -> Tensor:
    """Images of bytes as numbers from -1 to 1."""
    return images / 127.5 - 1


def resized(images: Tensor, side: int) -> Tensor:
    """Images (N, 1, H, W) of bytes with another side, by bicubic interpolation."""
    if images.shape[2:] == (side, side):
        return images
    return v2.functional.resize(images, [side, side], **BICUBIC)


@torch.no_grad()
def accuracy(model: CPVT, images: Tensor, labels: Tensor) -> float:
    """The share of the images (N, 1, H, W) that get their label."""
    side = images.shape[2] // model.arch.patch_size
    count = max(1, EVALUATED // side**2)
    right = 0
    for start in range(0, len(images), count):
        logits = model(normalized(images[start : start + count]))
        right += int((logits.argmax(1) == labels[start : start + count]).sum())
    return right / len(images)
