"""Models to be measured, by their names on the command line."""

import difflib
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from cpvt_pyramid import ARCHS, COLUMNAR_ARCHS, CPVTPyramid, load_weights
from cpvt_pyramid.checkpoints.reading import listed, read_checkpoint, tensors_of
from cpvt_pyramid.columnar import Column
from cpvt_pyramid.lab.probes import Subject
from cpvt_pyramid.tooling.command import UserError, one_line

# Of random weights that a checkpoint should replace. No checkpoint should have been made with it.
UNLIKELY_SEED = 987_654_321


def load_subject(name: str, checkpoint: Optional[str], size: int) -> Subject:
    """A model with weights or, without a checkpoint, random ones; `size` is that of its images."""
    try:
        model = load_model(name, checkpoint, size)
    except UserError:
        raise
    except (ConnectionError, FileNotFoundError) as error:  # of the checkpoint
        raise UserError(str(error)) from error
    except Exception as error:  # builders of other packages fail in many ways
        weights = f' with {checkpoint}' if checkpoint else ''
        what = f'{type(error).__name__}: {one_line(error)}'
        raise UserError(f'cannot build --model {name}{weights}: {what}') from error
    label = Path(name).stem if name.endswith('.py') else name
    return Subject(label if checkpoint else f'{label}, random weights', model)


def load_model(name: str, checkpoint: Optional[str], size: int) -> nn.Module:
    """The backbone that a name stands for."""
    torch.manual_seed(0)
    library, _, rest = name.partition(':')
    if library == 'timm':
        return timm_backbone(rest, checkpoint, size)
    if library == 'torchvision':
        return torchvision_backbone(rest, checkpoint, size)
    if name in ARCHS or name in COLUMNAR_ARCHS:
        return own_backbone(name, checkpoint)
    if name.endswith('.py'):
        return backbone_of_config(name, checkpoint)
    names = ', '.join((*ARCHS, *COLUMNAR_ARCHS))
    raise UserError(
        f'unknown --model {name!r}; timm:NAME, torchvision:NAME, an OpenMMLab config (.py) or one '
        f'of {names}'
    )


def own_backbone(name: str, checkpoint: Optional[str]) -> nn.Module:
    model = CPVTPyramid(name) if name in ARCHS else Column(name)
    if checkpoint:
        load_weights(model, checkpoint)
    return model


def backbone_of_config(path: str, checkpoint: Optional[str]) -> nn.Module:
    from cpvt_pyramid.config.load import load_config
    from cpvt_pyramid.predict.openmmlab.models import (
        build_model,
        fetch_checkpoint,
        load_whole_model,
    )

    model = build_model(load_config(path), 'cpu')
    if checkpoint:
        load_whole_model(model, fetch_checkpoint(checkpoint), checkpoint)
    return model.backbone


def timm_backbone(name: str, checkpoint: Optional[str], size: int) -> nn.Module:
    import timm

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), 3)
        raise UserError(f'timm has no model {name!r}; close: {", ".join(close) or "none"}')
    if not checkpoint:
        return build_timm(name, size)
    weights = tensors_of(read_checkpoint(checkpoint)) or {'': torch.zeros(0)}
    source = {'state_dict': weights, 'custom_load': False}
    model = build_timm(name, size, UNLIKELY_SEED, pretrained=True, pretrained_cfg_overlay=source)
    # timm loads what it finds. Random weights that stay as they were are not in the file.
    untrained = build_timm(name, size, UNLIKELY_SEED).state_dict()
    missing = []
    for key, value in model.state_dict().items():
        is_random = value.dim() > 1 and value.std() > 0
        if is_random and torch.equal(value, untrained[key]):
            missing.append(key)
    if missing:
        raise UserError(f'{checkpoint} lacks weights of {name}: {listed(missing)}')
    return model


def build_timm(name: str, size: int, seed: int = 0, **options: Any) -> nn.Module:
    """The maps of a timm model; `seed` is that of its random weights."""
    import timm

    # Models of a fixed size are built for this one and must take others: padded images are larger.
    # Their options differ, and other models have none of them.
    for any_size in ({'strict_img_size': False}, {'dynamic_img_size': True}):
        torch.manual_seed(seed)
        try:
            return timm.create_model(name, features_only=True, img_size=size, **any_size, **options)
        except TypeError:
            continue
    torch.manual_seed(seed)
    return timm.create_model(name, features_only=True, **options)


def torchvision_backbone(name: str, checkpoint: Optional[str], size: int) -> nn.Module:
    """The maps of a torchvision classifier, the last of each resolution, by tracing."""
    import torchvision
    from torchvision.models.feature_extraction import create_feature_extractor

    if name not in torchvision.models.list_models(torchvision.models):
        raise UserError(f'torchvision has no classifier {name!r}')
    model = torchvision.models.get_model(name, weights=None)
    if checkpoint:
        model.load_state_dict(tensors_of(read_checkpoint(checkpoint)))
    if hasattr(model, 'layer4'):
        nodes = [f'layer{i}' for i in range(1, 5)]
    elif hasattr(model, 'features'):
        nodes = [f'features.{child}' for child, _ in model.features.named_children()]
    else:
        raise UserError(f'torchvision:{name} has neither layer1 to layer4 nor features')
    extractor = create_feature_extractor(model.eval(), nodes)
    maps = Subject(name, extractor).maps(torch.zeros(1, 3, size, size))
    last_of_size = {map_.shape[2:]: node for node, map_ in zip(nodes, maps)}
    return create_feature_extractor(model, list(last_of_size.values()))
