"""Every variant as a classifier in timm's registry, to pre-train with timm's tools.

Pyramids have their names in `ARCHS`; PVTv2, whose names timm has taken, is `cpvt_pvt_v2_b2` and so
on. The columnar CPVT of the paper is `cpvt_tiny`, `cpvt_small` or `cpvt_base`. The suffix `_0to5`
means a PEG after each of blocks 0 to 5 instead of block 0 alone; `_gap` means average pooling
instead of a class token.

Parameters have the names of the published checkpoints, so that checkpoints of timm's training
script load into the backbones, and every format that `checkpoints` reads loads here.
`pretrained=True` loads the published weights.

Shapes: B batch, H x W map, C channels, N = H * W tokens.

Examples:
    >>> import timm
    >>> import cpvt_pyramid.timm_models  # registers the models
    >>> model = timm.create_model('pcpvt_nano', num_classes=10)
    >>> backbone = timm.create_model('svt_small', features_only=True)  # the maps of `CPVTPyramid`
    >>> backbone.feature_info.channels()
    [64, 128, 256, 512]
    >>> pvt = timm.create_model('pcpvt_nano', position='learned')  # an option of `CPVTPyramid`
"""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Optional, Union

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import FeatureInfo, build_model_with_cfg, generate_default_cfgs, register_model

# `build_model_with_cfg` asks for this class, and `timm.models` has no public name for it.
from timm.models._features import FeatureGetterNet, feature_take_indices
from torch import Tensor, nn

from .archs import ARCHS, COLUMNAR_ARCHS, Arch, find_arch
from .checkpoints.downloads import IN_PACKAGE
from .checkpoints.files import listed
from .checkpoints.formats import to_ours
from .checkpoints.reading import tensors_of
from .columnar import Column
from .layers import LayerNorm
from .model import (
    CPVTPyramid,
    init_pegs,
    init_weights,
    set_checkpointing,
)
from .names import layer_of, role_of
from .position import PEGConfig

LOGGER = logging.getLogger(__name__)
POOLS = ('avg', 'token', '')
PVT_WEIGHTS = 'https://github.com/whai362/PVT/releases/download/v2/{}.pth'
# Options of `timm.create_model` that read files.
READING = {'pretrained', 'pretrained_cfg', 'pretrained_cfg_overlay', 'checkpoint_path', 'cache_dir'}

# By index, the class token (B, 1, C), if there is one, and the map (B, H, W, C).
Outputs = dict[int, tuple[Optional[Tensor], Tensor]]


class Classifier(nn.Module):
    """The interface that timm expects of a model, mixed into a trunk: `CPVTPyramid` or `Column`.

    Args:
        arch: of the trunk.
        num_classes: of the classifier; 0: no classifier, the model returns pooled features.
        in_chans: channels of the image.
        global_pool: input of the classifier: 'avg', the mean of the map; 'token', the class token
            of a columnar model; '': each cell of the map, not pooled.
        img_size: timm's name for the trunk's `pretrain_img_size`.
        drop_rate: dropout before the classifier.
        proj_drop_rate: timm's name for the trunk's `drop_rate`.
        **options: other options of the trunk; unknown ones are an error.
    """

    # Of the trunk:
    blocks: nn.ModuleList
    cls_token: Optional[nn.Parameter]
    peg_config: Optional[PEGConfig]

    def __init__(
        self,
        arch: Any,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        img_size: Union[int, Sequence[int]] = 224,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(
            arch,
            in_channels=in_chans,
            pretrain_img_size=img_size,
            drop_rate=proj_drop_rate,
            **options,
        )
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.distilled_training = False
        self.num_features = self.head_hidden_size = self.feature_info[-1]['num_chs']
        self.norm: nn.Module = LayerNorm(self.num_features, eps=1e-6)
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """num_chs, reduction (stride) and module of each map, that of a stage or of a block."""
        raise NotImplementedError

    def outputs(self, image: Tensor, valid: Optional[Tensor], indices: Collection[int]) -> Outputs:
        """Some of these maps; what comes after the last of them does not run."""
        raise NotImplementedError

    def cut_after(self, last: int) -> None:
        """Remove what comes after a map."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """Logits (B, num_classes), in distilled training twice; see `global_pool` for others."""
        x = self.forward_head(self.forward_features(x))
        if self.distilled_training and self.training:
            return x, x
        return x

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) or, with a class token, (B, 1 + N, C)."""
        return self.forward_intermediates(x, indices=1)[0]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits from the result of `forward_features`, or the input of the classifier."""
        if self.global_pool == 'token':
            x = x[:, 0]
        elif self.global_pool == 'avg' and self.cls_token is None:
            x = x.mean(dim=(2, 3))
        elif self.global_pool == 'avg':
            x = x[:, 1:].mean(dim=1)
        x = self.head_drop(x)
        if pre_logits:
            return x
        if self.global_pool or self.cls_token is not None:
            return self.head(x)
        return self.head(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # of each cell of the map

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Union[int, list[int], None] = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        valid: Optional[Tensor] = None,
    ) -> Union[list[Tensor], tuple[Tensor, list[Tensor]]]:
        """The result of `forward_features`, and intermediate maps.

        Arguments are those of timm's models, and `valid`, the size of each image in a padded batch,
        as in `CPVTPyramid.forward`. The final norm is applied to maps that have its channels.
        """
        if output_fmt not in ('NCHW', 'NHWC'):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        wanted, last = feature_take_indices(len(self.blocks), indices)
        end = len(self.blocks) - 1
        if stop_early:
            end = last
        outputs = self.outputs(x, valid, {*wanted, end})
        maps = []
        for i in sorted({*wanted}):
            y = outputs[i][1]  # (B, H, W, C)
            if norm and y.shape[-1] == self.num_features:
                y = self.norm(y)
            maps.append(y.permute(0, 3, 1, 2) if output_fmt == 'NCHW' else y)
        if intermediates_only:
            return maps
        class_token, out = outputs[end]
        if class_token is not None:
            out = torch.cat([class_token, out.flatten(1, 2)], dim=1)
        if end == len(self.blocks) - 1:
            out = self.norm(out)
        if class_token is None:
            out = out.permute(0, 3, 1, 2)
        return out, maps

    def prune_intermediate_layers(
        self, indices: Union[int, list[int]] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the layers that these maps of `forward_intermediates` do not need; returns their
        indices, counted from the first map."""
        wanted, last = feature_take_indices(len(self.blocks), indices)
        cut = last < len(self.blocks) - 1
        if cut:
            self.cut_after(last)
            self.num_features = self.head_hidden_size = self.feature_info[last]['num_chs']
        if cut or prune_norm:
            self.norm = nn.Identity()
        if cut or prune_head:
            self.reset_classifier(0, '')
        return wanted

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Replace the classifier and, if given, the pooling."""
        pool = self.global_pool if global_pool is None else global_pool
        if pool not in POOLS or (pool == 'token' and self.cls_token is None):
            # The type that timm's models raise, and that its tools expect.
            raise AssertionError(
                f"global_pool must be 'avg', '' or, if the model was created with it, 'token', got "
                f'{pool!r}'
            )
        self.num_classes = num_classes
        self.global_pool = pool
        like = next(self.parameters())
        self.head: nn.Module = nn.Identity()
        if num_classes > 0:
            self.head = nn.Linear(self.num_features, num_classes).to(like.device, like.dtype)
        init_weights(self.head)
        self.head.train(self.training)

    def init_weights(self) -> None:
        """Draw all weights, for example of a model that was created on the meta device."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Conv2d)):
                init_weights(module)
            else:  # tables and tokens
                for parameter in module.parameters(recurse=False):
                    nn.init.trunc_normal_(parameter, std=0.02)
        init_pegs(self, self.peg_config)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        set_checkpointing(self, enable)

    def set_distilled_training(self, enable: bool = True) -> None:
        """Let timm's `TokenDistillationTask` train the classifier on labels and on a teacher, like
        DeiT without a distillation token (arXiv 2012.12877, section 4): in training, both logits
        that the task expects are the classifier's."""
        self.distilled_training = enable

    def no_weight_decay(self) -> set[str]:
        """Tables, tokens and PEGs, as in the code of DeiT and Twins."""
        names = [name for name, _ in self.named_parameters()]
        return {name for name in names if role_of(name) in ('position', 'token')}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """The layer of a parameter's name, for learning rates that grow layer by layer."""
        return partial(layer_of, self)


class PyramidClassifier(Classifier, CPVTPyramid):
    """A pyramid followed by a norm, pooling and a linear layer.

    As in timm, maps have no norms by default, but those of PVTv2 and MiT; these have no other norm
    before the classifier.
    """

    forward: Callable[..., Any]  # of `Classifier`, whose type is not that of `CPVTPyramid`
    cls_token = None

    def __init__(
        self,
        arch: Union[str, Arch, dict],
        *,
        global_pool: str = 'avg',
        stage_norm: Optional[bool] = None,
        **options: Any,
    ) -> None:
        if global_pool == 'token':
            raise ValueError("a pyramid has no class token; global_pool must be 'avg' or ''")
        found = find_arch(arch, Arch)
        if stage_norm is None:
            stage_norm = not found.classifier_norm
        super().__init__(found, global_pool=global_pool, stage_norm=stage_norm, **options)
        if not found.classifier_norm:
            self.norm = nn.Identity()

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return [
            dict(num_chs=dim, reduction=stride, module=f'norm_list.{i}')
            for i, (dim, stride) in enumerate(zip(self.arch.dims, self.arch.strides))
        ]

    def outputs(self, image: Tensor, valid: Optional[Tensor], indices: Collection[int]) -> Outputs:
        maps = self.stage_maps(image, valid, indices)
        return {i: (None, x.permute(0, 2, 3, 1)) for i, x in maps.items()}

    def cut_after(self, last: int) -> None:
        for name, part in self.named_children():
            if isinstance(part, nn.ModuleList):  # of one entry for each stage
                setattr(self, name, part[: last + 1])


class ColumnClassifier(Classifier, Column):
    """The columnar CPVT, a map after each of its blocks, followed by a norm, pooling and a linear
    layer."""

    def __init__(self, arch: Any, *, global_pool: str = 'avg', **options: Any) -> None:
        has_token = global_pool == 'token'
        super().__init__(arch, global_pool=global_pool, class_token=has_token, **options)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        return [
            dict(num_chs=self.arch.dim, reduction=self.arch.patch_size, module=f'blocks.{i}')
            for i in range(self.arch.depth)
        ]

    def outputs(self, image: Tensor, valid: Optional[Tensor], indices: Collection[int]) -> Outputs:
        return self.block_outputs(image, self.padding(image, valid), indices)

    def cut_after(self, last: int) -> None:
        self.blocks = self.blocks[: last + 1]
        self.pos_block = nn.ModuleDict(
            {i: peg for i, peg in self.pos_block.items() if int(i) <= last}
        )


class Features(FeatureGetterNet):
    """What `features_only` returns: the maps of a classifier without its head.

    `forward` also takes `valid`, see `CPVTPyramid.forward`.
    """

    model: Any  # a Classifier

    def forward(self, x: Tensor, valid: Optional[Tensor] = None) -> list[Tensor]:
        return self.model.forward_intermediates(
            x,
            self.out_indices,
            norm=self.norm,
            output_fmt=self.output_fmt,
            intermediates_only=True,
            valid=valid,
        )

    def init_weights(self) -> None:
        self.model.init_weights()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.model.set_grad_checkpointing(enable)


def build(
    model_cls: type[Classifier],
    device: Optional[torch.device] = None,
    dtype: Optional[torch.dtype] = None,
    **options: Any,
) -> Classifier:
    with nullcontext() if device is None else torch.device(device):
        return model_cls(**options).to(dtype=dtype)


def checkpoint_filter_fn(state_dict: dict, model: Optional[nn.Module] = None) -> dict[str, Tensor]:
    """Our names for a checkpoint of any format, of a model or of a larger one that it is part of.

    The `filter_fn` of timm's functions that load checkpoints, before they adapt stem and head.

    Norm and classifier of a model keep their values, with a warning, if the checkpoint has none.

    Raises:
        ValueError: see `checkpoints.formats.to_ours`.

    Examples:
        >>> model = timm.create_model('pcpvt_nano')
        >>> timm.models.load_checkpoint(model, 'detector.pth', filter_fn=checkpoint_filter_fn)
    """
    tensors = to_ours(tensors_of(state_dict))
    if model is None or any(role_of(name) == 'classifier' for name in tensors):
        return tensors
    own = {n: value for n, value in model.state_dict().items() if role_of(n) == 'classifier'}
    if own:
        LOGGER.warning(
            'the checkpoint is of a backbone: %s keep their initial values', listed(list(own))
        )
    return tensors | own


def create(
    name: str, pretrained: bool = False, output_stride: Optional[int] = None, **options: Any
) -> nn.Module:
    """Build a model of `VARIANTS`, with the options of `timm.create_model` and of its class."""
    model_cls, published = VARIANTS[name]
    if options.get('features_only'):
        options['feature_cls'] = Features
    model = build_model_with_cfg(
        partial(build, model_cls),
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=4),
        **published | options,
    )
    info = model.feature_info
    maps = info.get_dicts() if isinstance(info, FeatureInfo) else info
    stride = maps[-1]['reduction']
    if output_stride not in (None, stride):
        raise ValueError(
            f'output_stride must be {stride}, the stride of the last map, got {output_stride}: '
            f'stages cannot be dilated. Leave out the last maps with out_indices '
            f'(encoder_depth in segmentation_models_pytorch)'
        )
    return model


def classifier(model_name: str, **options: Any) -> nn.Module:
    """Build a model of this module by its name in timm's registry, with random weights.

    Args:
        model_name: the name.
        **options: options of the model. Those of `timm.create_model` that read files are refused.

    Examples:
        >>> model = classifier('cpvt_tiny_gap', num_classes=10)
    """
    known = timm.list_models(module='timm_models')
    if model_name not in known:
        raise ValueError(f'unknown model {model_name!r}; one of {", ".join(known)}')
    for name in READING & options.keys():
        raise ValueError(f'{name} cannot be an option; load the weights into the model')
    return timm.create_model(model_name, **options)


# How timm prepares images, as for its own Twins.
CFG: dict[str, Any] = dict(
    num_classes=1000,
    input_size=(3, 224, 224),
    fixed_input_size=False,
    crop_pct=0.9,
    interpolation='bicubic',
    mean=IMAGENET_DEFAULT_MEAN,
    std=IMAGENET_DEFAULT_STD,
    classifier='head',
    license='apache-2.0',
)


def registered_name(arch: str) -> str:
    """The name in timm's registry of a pyramid; PVTv2's own are those of timm's models."""
    return f'cpvt_{arch}' if arch.startswith('pvt_v2_') else arch


def source_of(arch: str) -> tuple[str, dict[str, Any]]:
    """The key of a pyramid in `default_cfgs`, and the size of its map and where its weights are."""
    name = registered_name(arch)
    family = arch.split('_')[0]
    if arch == 'pcpvt_nano':
        return name, dict(pool_size=(7, 7), file=str(IN_PACKAGE / f'{arch}.safetensors'))
    if family == 'mit':
        repository = f'nvidia/{arch.replace("_", "-")}'
        return f'{name}.in1k', dict(pool_size=(7, 7), hf_hub_id=repository, license='other')
    if arch.startswith('pvt_v2_'):
        return f'{name}.in1k', dict(pool_size=(7, 7), hf_hub_id=f'timm/{arch}.in1k')
    if family == 'pvt':  # the published classifier reads a class token
        return f'{name}.in1k', dict(pool_size=(7, 7), url=PVT_WEIGHTS.format(arch), num_classes=0)
    return f'{name}.in1k', dict(pool_size=(7, 7), hf_hub_id=f'timm/twins_{arch}.in1k')


# The variants of the columnar models in the CPVT paper, with their options.
AFTER_SIX = dict(peg=dict(after=tuple(range(6))))
COLUMNS: dict[str, dict[str, Any]] = {}
for _name in COLUMNAR_ARCHS:
    COLUMNS[_name] = dict(arch=_name, global_pool='token')
    COLUMNS[f'{_name}_gap'] = dict(arch=_name, global_pool='avg')
    COLUMNS[f'{_name}_0to5'] = dict(arch=_name, **AFTER_SIX, global_pool='token')
    COLUMNS[f'{_name}_0to5_gap'] = dict(arch=_name, **AFTER_SIX, global_pool='avg')

_cfgs: dict[str, Any] = {}
for _name in ARCHS:
    _key, _source = source_of(_name)
    _cfgs[_key] = dict(CFG, first_conv='patch_embeds.0.proj') | _source
for _name, _options in COLUMNS.items():
    _size = None if _options['global_pool'] == 'token' else (14, 14)
    _cfgs[_name] = dict(CFG, pool_size=_size, first_conv='patch_embed.proj')
default_cfgs = generate_default_cfgs(_cfgs)

# By its name in timm's registry, the class of each model and its options.
VARIANTS: dict[str, tuple[type[Classifier], dict[str, Any]]] = {}
for _name in ARCHS:
    VARIANTS[registered_name(_name)] = (PyramidClassifier, dict(arch=_name))
for _name, _options in COLUMNS.items():
    VARIANTS[_name] = (ColumnClassifier, _options)


def entry_point(name: str) -> Callable[..., nn.Module]:
    """The function that timm's registry calls to build a model."""

    def build_variant(pretrained: bool = False, **options: Any) -> nn.Module:
        return create(name, pretrained, **options)

    build_variant.__name__ = build_variant.__qualname__ = name
    return build_variant


for _name in VARIANTS:
    globals()[_name] = register_model(entry_point(_name))
