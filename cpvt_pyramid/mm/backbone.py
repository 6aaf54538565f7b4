"""The backbones of MMDetection, MMSegmentation and MMPretrain configs."""

import copy
import re
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn

from .. import columnar, model
from ..checkpoints.fit import LoadReport
from ..checkpoints.loading import fit_checkpoint
from ..padding.mask import check_batch, split_validity
from ..versions import is_compiling
from .valid_region import check_validity, crop_and_run, noted_size, warn_of_normalization


class Configured(nn.Module):
    """Mixin, listed before the core class: adds `init_cfg` and the validity channel.

    Args:
        *args: see the core class.
        init_cfg: mmengine's initialization config, for example
            `dict(type='Pretrained', checkpoint='twins_pcpvt_small.safetensors')`.
        **options: see the core class, which raises an error for unknown ones.
    """

    in_channels: int  # of the core class
    strides: tuple[int, ...]

    def __init__(
        self, *args: Any, init_cfg: Optional[Union[dict, list]] = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.init_cfg = copy.deepcopy(init_cfg)
        self.validity_checked = False
        self.normalization_checked = True  # there are no weights from ImageNet yet
        self.initializing = False

    def init_weights(self) -> None:
        """Initialize as `init_cfg` says.

        Raises:
            ValueError: a pretrained checkpoint is damaged or of another architecture. mmengine
                itself goes on without it.
        """
        self.initializing = True
        try:
            super().init_weights()  # type: ignore[misc]  # of BaseModule
        finally:
            self.initializing = False

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *others: Any) -> None:
        # mmengine's `Pretrained` calls this and no public method. A load hook would come after that
        # of the core class, and no longer see the whole file.
        if self.initializing:
            tensors, report = fit_checkpoint(self, state_dict)  # type: ignore[arg-type]
            if self.in_channels == 3 and is_of_imagenet(state_dict):
                self.normalization_checked = False
            state_dict.clear()
            state_dict.update({f'{prefix}{name}': value for name, value in tensors.items()})
            self.log_load_report(report)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, image: Tensor, valid: Optional[Tensor] = None) -> tuple[Tensor, ...]:
        """The core class's maps, contiguous; zero in the padding of a padded batch.

        Args:
            image: (B, in_channels, H, W), optionally with the validity channel as the last one.
            valid: see the core class; read from the validity channel if there is one.

        Raises:
            TypeError: the images are a list.
            ValueError: the image has one more channel, which is not a validity channel; or
                mmengine's `activation_checkpointing` names this backbone.
        """
        if isinstance(image, (list, tuple)):
            raise TypeError(
                'the images must be a tensor (B, C, H, W), got a list; set model.data_preprocessor'
            )
        check_batch(image, self.in_channels)
        if self.training and not torch.is_grad_enabled():
            refuse_reentrant_checkpointing(self)
        if not self.normalization_checked and not is_compiling():
            warn_of_normalization(image)
            self.normalization_checked = True
        maps: Sequence[Tensor]
        if image.shape[1] != self.in_channels + 1:
            maps = super().forward(image, valid)
        elif size := noted_size(image):
            maps = crop_and_run(super().forward, image[:, :-1], size, self.strides)
        else:
            image, channel, valid = split_validity(image)
            # Only until the first padded batch: reading the result waits for the GPU.
            if not (self.validity_checked or is_compiling()):
                check_validity(channel, valid, self.in_channels)
                self.validity_checked = not channel.all()
            maps = super().forward(image, valid)
        # mmcv's RoIAlign and deformable convolution read raw NCHW memory, whatever the strides.
        return tuple(x.contiguous() for x in maps)

    def log_load_report(self, report: LoadReport) -> None:
        """Print what a `Pretrained` has loaded."""
        print_log(f'backbone: {report}', logger='current')


def is_of_imagenet(tensors: dict[str, Any]) -> bool:
    """True for the tensors of a classifier of ImageNet's 1,000 classes, as weights for a start are
    published."""
    classifier = re.compile(r'(.*\.)?(head|head\.fc|fc|classifier)\.bias')
    return any(
        isinstance(value, Tensor) and value.shape == (1000,) and classifier.fullmatch(name)
        for name, value in tensors.items()
    )


def refuse_reentrant_checkpointing(backbone: nn.Module) -> None:
    """Raise a ValueError if mmengine's `activation_checkpointing` has wrapped the forward pass.

    It is reentrant: outputs have a gradient only if an input has one, and images have none.
    """
    forward: Any = backbone.forward
    while forward is not None:
        home = getattr(forward, '__globals__', {}).get('__name__')
        if home == 'mmengine.runner.activation_checkpointing':
            raise ValueError(
                'activation_checkpointing of the whole backbone would leave it without gradients; '
                'set model.backbone.with_cp=True instead'
            )
        forward = getattr(forward, '__wrapped__', None)


@MODELS.register_module()
class CPVTPyramid(Configured, model.CPVTPyramid, BaseModule):
    """`cpvt_pyramid.CPVTPyramid` for configs: its arguments, and `init_cfg`."""


@MODELS.register_module()
class DenseCPVT(Configured, columnar.DenseCPVT, BaseModule):
    """`cpvt_pyramid.DenseCPVT` for configs: its arguments, and `init_cfg`."""
