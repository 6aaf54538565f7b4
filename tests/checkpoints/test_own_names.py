"""PyTorch's contract: a model loads its own state dict, whatever its parts are called, and
`strict=True` is strict."""

import copy
from collections import OrderedDict

import pytest
import torch
from foreign import TINY, classifier_of_mmpretrain, of_mmseg, of_timm
from support import assert_loaded
from timm.layers import ClassifierHead
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from cpvt_pyramid import CPVT, CPVTPyramid, DenseCPVT, load_weights
from cpvt_pyramid.timm_models import ColumnClassifier, PyramidClassifier
from tests.models.ports import randomize

COLUMN = dict(dim=16, heads=2, depth=2, patch_size=4)


def pyramid(**options: object) -> CPVTPyramid:
    return CPVTPyramid(TINY['pcpvt'], **options)


def with_parts(model: nn.Module, **parts: nn.Module) -> nn.Module:
    """A model with parts of a user's own."""
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def fc_head() -> nn.Module:
    return nn.Sequential(OrderedDict(drop=nn.Dropout(), fc=nn.Linear(16, 7)))


def lists(**leaves: nn.Module) -> nn.Module:
    """A part whose names have two indices."""
    return nn.ModuleList([nn.ModuleList([nn.ModuleDict(leaves)])])


def block_like() -> nn.Module:
    return lists(
        norm1=nn.LayerNorm(8), norm2=nn.LayerNorm(8), attn=nn.ModuleDict(dict(q=nn.Linear(8, 8)))
    )


class Detector(nn.Module):
    def __init__(self, **backbones: nn.Module) -> None:
        super().__init__()
        for name, backbone in backbones.items():
            setattr(self, name, backbone)
        self.neck = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(4, 2)


class Wrapped(nn.Module):
    """As DDP (`module`), torch.compile, FSDP or an average of weights wrap a module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        setattr(self, name, module)


MODELS = {
    'plain': pyramid,
    'a head': lambda: with_parts(CPVT(COLUMN, num_classes=5), head=fc_head()),
    "timm's head": lambda: with_parts(pyramid(), head=ClassifierHead(16, 7, pool_type='')),
    'head and norm': lambda: with_parts(pyramid(), head=fc_head(), norm=nn.LayerNorm(8)),
    'stages': lambda: with_parts(pyramid(), stages=lists(a=nn.Linear(4, 4))),
    "mmseg's names": lambda: with_parts(pyramid(), layers=block_like()),
    "mmpretrain's names": lambda: with_parts(
        pyramid(), stages=block_like(), norm_after_stage0=nn.LayerNorm(8)
    ),
    "PVT's names": lambda: with_parts(
        pyramid(),
        patch_embed1=nn.ModuleDict(dict(proj=nn.Conv2d(3, 8, 4))),
        block1=nn.ModuleList([nn.ModuleDict(dict(norm1=nn.LayerNorm(8)))]),
        norm1=nn.LayerNorm(8),
        norm2=nn.LayerNorm(8),
    ),
    "transformers' names": lambda: with_parts(
        pyramid(), encoder=nn.ModuleDict(dict(layer_norm=nn.ModuleList([nn.LayerNorm(8)])))
    ),
    "ViT's names": lambda: with_parts(
        CPVT(COLUMN), pos_embed2=nn.Linear(2, 2), layers=nn.ModuleList([nn.Linear(2, 2)])
    ),
    'a backbone inside': lambda: with_parts(pyramid(), backbone=pyramid(), module=pyramid()),
    'dense': lambda: with_parts(DenseCPVT(COLUMN), layers=block_like(), head=fc_head()),
    'pyramid classifier': lambda: with_parts(
        PyramidClassifier(TINY['svt'], num_classes=3), head=fc_head()
    ),
    'column classifier': lambda: with_parts(
        ColumnClassifier(COLUMN, num_classes=3), layers=block_like()
    ),
    'a detector': lambda: Detector(backbone=pyramid()),
    'two backbones': lambda: Detector(
        student=pyramid(), teacher=with_parts(pyramid(), layers=block_like())
    ),
    'two architectures': lambda: Detector(rgb=pyramid(), depth=CPVTPyramid(TINY['svt'])),
    'DDP': lambda: Wrapped(pyramid(), 'module'),
    'DDP of compiled': lambda: Wrapped(Wrapped(pyramid(), '_orig_mod'), 'module'),
    'FSDP': lambda: Wrapped(Detector(backbone=pyramid()), '_fsdp_wrapped_module'),
    'Lightning': lambda: Wrapped(with_parts(pyramid(), head=fc_head()), 'model'),
    'an average': lambda: AveragedModel(Detector(backbone=pyramid())),
}


@pytest.mark.parametrize('name', MODELS)
def test_a_model_loads_its_own_state_dict(name):
    """Whole and strictly; a part of it, as any module would."""
    source = randomize(MODELS[name](), seed=1)
    weights = {key: value.clone() for key, value in source.state_dict().items()}
    model = MODELS[name]()
    model.load_state_dict(weights)
    assert_loaded(model, weights)
    # A copy still does, also one of an average or of a pickle.
    copied = copy.deepcopy(MODELS[name]())
    copied.load_state_dict(weights)
    assert_loaded(copied, weights)

    for part in (slice(None, None, 3), slice(len(weights) // 2), slice(-3, None)):
        some = dict(list(weights.items())[part])
        model = randomize(MODELS[name](), seed=2)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        missing, unexpected = model.load_state_dict(some, strict=False)
        assert not unexpected and set(missing) == weights.keys() - some.keys()
        assert_loaded(model, before | some)


@pytest.mark.parametrize(
    'name', [name for name in MODELS if isinstance(MODELS[name](), (CPVTPyramid, CPVT, DenseCPVT))]
)
@pytest.mark.parametrize('prefix', ['', 'module.', 'model.backbone._orig_mod.'])
def test_load_weights_reads_a_models_own_file(name, prefix, tmp_path):
    source = randomize(MODELS[name](), seed=1)
    weights = source.state_dict()
    torch.save({prefix + key: value for key, value in weights.items()}, tmp_path / 'a.pth')
    model = MODELS[name]()
    report = load_weights(model, tmp_path / 'a.pth')
    assert not report.kept and not report.unused and not report.ignored
    assert_loaded(model, weights)


# `strict=True`

ONE = torch.zeros(1)


@pytest.mark.parametrize(
    'extra',
    [
        'head.typo',
        'head.weight.more',
        'heads.weight',
        'norm.x',
        'norm',
        'cls_token',  # of PVT and DeiT, which have tables
        'blocks.7.0.attn.q.weight',
        'blocks.2.9.attn.q.weight',
        'blocks.2.-1.attn.q.weight',
        'blocks.2.0.attn.typo.weight',
        'blocks.2.0.attn.qkv.weight',  # of SVT
        'blocks.2.0.mlp.dwconv.weight',  # of PVTv2
        'blocks.1.0.attn.q.more',
        'blocks.02.0.attn.q.weight',
        'patch_embeds.7.proj.weight',
        'patch_embeds.2.weight',
        'levels.0.proj.weight',
        'neck.weight',
        'layers.0.0.norm1.weight',
        'backbone.norm.weight',
        'module.blocks.0.0.norm1.weight',
        'epoch',
    ],
)
def test_strict_is_strict(extra):
    model = pyramid(out_indices=(0, 1))
    weights = pyramid(out_indices=(0, 1)).state_dict()
    missing, unexpected = model.load_state_dict({**weights, extra: ONE}, strict=False)
    assert not missing and unexpected == [extra]
    with pytest.raises(RuntimeError, match='Unexpected key'):
        model.load_state_dict({**weights, extra: ONE})


def published(name: str) -> tuple[CPVTPyramid, dict[str, Tensor]]:
    """A model of two stages, and a published file of all."""
    if name == 'mmseg':
        theirs = of_mmseg('pcpvt').state_dict()
        theirs |= {'norm.weight': torch.ones(64), 'norm.bias': torch.ones(64)}
    elif name == 'mmpretrain':
        theirs = classifier_of_mmpretrain('pcpvt').state_dict()
    else:
        theirs = of_timm(name).state_dict()
    arch = name if name in TINY else 'pcpvt'
    return CPVTPyramid(TINY[arch], out_indices=(0, 1), stage_norm=arch == 'pvt_v2'), theirs


@pytest.mark.parametrize('name', ['pcpvt', 'svt', 'pvt_v2', 'mmseg', 'mmpretrain'])
def test_what_a_published_file_has_besides_the_model_is_left_out(name):
    """A classifier and stages that are not built; a typo in a file of another format is not."""
    model, theirs = published(name)
    model.load_state_dict(theirs)
    for wrong in ('heads.weight', 'head.typo', 'stages.9.0.norm1.weight', 'layers.x'):
        with pytest.raises(RuntimeError, match='Unexpected key'):
            model.load_state_dict({**theirs, wrong: ONE})
    lost = list(theirs)[3]
    with pytest.raises(RuntimeError, match='Missing key|Unexpected key'):
        model.load_state_dict({k: v for k, v in theirs.items() if k != lost})
    with pytest.raises(RuntimeError, match='Missing key'):
        model.load_state_dict({f'{k}x' if k == lost else k: v for k, v in theirs.items()})


def test_wrappers_are_not_removed():
    """Silently, as a part of a checkpoint, least of all."""
    model = pyramid()
    weights = {f'backbone.{k}': v for k, v in pyramid().state_dict().items()}
    detector = {'epoch': 3, 'state_dict': weights | {'neck.a': ONE, 'bbox_head.b': ONE}}
    for tensors in (detector, weights, {'model': model.state_dict()}):
        with pytest.raises(RuntimeError, match='Missing key'):
            model.load_state_dict(tensors)
