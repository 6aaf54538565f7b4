"""The models that speed.py compares: backbones of several libraries, and whole models with them."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.models import ports
from benchmarks.models.ports import Maps, ports_of
from benchmarks.runtimes import RUNTIMES, in_runtimes
from cpvt_pyramid import CPVTPyramid, ops
from cpvt_pyramid.tooling.command import UserError

OURS = ('ours', 'ours_cp', 'ours_plain')  # as is; activation checkpointing; plain operations
NAMES = (*OURS, *ports.PORTS, *ports.OTHERS)
COMPILED = '_compiled'  # suffix of the name of a compiled model
VARIANTS = re.compile(f'({COMPILED}|_({"|".join(RUNTIMES)}))$')  # and of one in a runtime
BOXES = 7  # per training image of a detector


def build(name: str, arch: str, tensors: dict[str, Tensor] | None = None) -> nn.Module:
    """The model of NAMES that makes four maps of an image; `arch` is that of ours and of ports,
    `tensors` the state dict of our model, for models with the same parameters."""
    if name in OURS:
        model = CPVTPyramid(arch, stage_norm=False, with_cp=name == 'ours_cp')
        if tensors:
            model.load_state_dict(tensors)
        return ports.with_eps(Maps(model, in_plain) if name == 'ours_plain' else model).eval()
    tensors = tensors if name in ports_of(arch) else None
    try:
        return ports.with_eps(ports.build(name, arch, tensors, stage_norm=False))
    except (ImportError, ValueError) as error:
        raise UserError(str(error)) from error


def in_plain(model: nn.Module, image: Tensor) -> Sequence[Tensor]:
    with ops.plain():
        return model(image)


def build_all(names: Sequence[str], arch: str, config: str | None = None) -> dict[str, nn.Module]:
    """Models by name. Those with the same parameters have the same random weights; with a config,
    they are the backbones of otherwise identical models."""
    others = [name for name in names if name in ports.OTHERS]
    if config and others:
        available = ', '.join((*OURS, *ports_of(arch)))
        raise UserError(f'--config takes {available} as --models, not {others[0]}')
    tensors = ports.randomize(build('ours', arch)).state_dict()
    whole = build_whole(config) if config else None
    models = {name: build(name, arch, tensors) for name in names}
    return {name: Whole(*whole, model) for name, model in models.items()} if whole else models


def with_variants(
    models: dict[str, nn.Module], compile: bool, runtimes: bool, dynamic: bool
) -> dict[str, nn.Module]:
    """Each model, followed by the same model compiled, with dynamic sizes or for each size, and in
    each runtime."""
    result = {}
    for name, model in models.items():
        result[name] = model
        if compile:
            result[name + COMPILED] = torch.compile(model, dynamic=dynamic)
        if runtimes:
            result |= in_runtimes(name, model)
    return result


class Whole(nn.Module):
    """The model of a config with another backbone: from images to raw outputs or, in training
    mode, to its loss.

    Args:
        model: the config's model; it is copied.
        out_indices: the maps that its neck or head takes.
        backbone: returns four maps.

    Attributes:
        targets: the data samples of a batch.
    """

    def __init__(self, model: nn.Module, out_indices: Sequence[int], backbone: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        # Contiguous, as those of every backbone that is registered in mm.
        self.model.backbone = Maps(
            backbone,
            lambda model, x: [y.contiguous() for i, y in enumerate(model(x)) if i in out_indices],
        )
        self.targets = []

    def annotate(self, size: tuple[int, int], batch: int, device: str) -> None:
        """Set the targets to boxes, masks or label maps, always the same."""
        from benchmarks.models.samples import annotated

        model = self.model
        classes = max(getattr(module, 'num_classes', None) or 0 for module in model.modules())
        corners = torch.rand(BOXES, 2, generator=torch.Generator().manual_seed(0)) * 0.7
        boxes = torch.cat([corners, corners + 0.25], 1) * torch.tensor(size[::-1] * 2)
        labels = [label % classes for label in range(BOXES)]
        is_segmentor = hasattr(model, 'decode_head')
        has_masks = getattr(model, 'with_mask', False)
        sample = annotated(is_segmentor, size, boxes.tolist(), labels, classes, has_masks)
        self.targets = [sample.to(device)] * batch

    def forward(self, images: Tensor) -> list[Tensor] | Tensor:
        if self.training:
            losses = self.model(images, self.targets, mode='loss')
            return self.model.parse_losses(losses)[0]
        outputs = tree_leaves(self.model(images, self.targets, mode='tensor'))
        return [x for x in outputs if isinstance(x, Tensor)]


def read_config(path: str) -> Any:
    """The config at a path; its backbone must be ours, and one that other libraries have."""
    from cpvt_pyramid.config.load import load_config

    cfg = load_config(path)
    backbone = cfg.model.get('backbone') or {}
    if backbone.get('type') != 'CPVTPyramid':
        raise UserError(f'{path}: the backbone must be CPVTPyramid, got {backbone.get("type")}')
    own = set(backbone) - {'type', 'arch', 'out_indices', 'drop_path_rate', 'with_cp', 'init_cfg'}
    if own:
        raise UserError(f'{path}: remove {min(own)} from the backbone; no other library has it')
    for part in (cfg.model, backbone):
        part.pop('init_cfg', None)  # no pretrained weights
    return cfg


def build_whole(config: str) -> tuple[nn.Module, Sequence[int]]:
    """The model of a config with an empty backbone, and the indices of the maps that it takes."""
    from mmengine.logging import MMLogger

    from cpvt_pyramid.predict.openmmlab.models import build_model

    model = build_model(read_config(config), 'cpu')
    out_indices = model.backbone.out_indices
    model.backbone = nn.Identity()
    MMLogger.get_current_instance().setLevel('WARNING')  # not a line per parameter
    model.init_weights()
    for parameter in model.parameters():  # noise, so that all of them affect the result
        deviation = 0.5 / math.sqrt(parameter[0].numel()) if parameter.dim() > 1 else 0.1
        parameter.data += torch.randn_like(parameter) * deviation
    return model, out_indices
