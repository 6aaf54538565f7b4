"""bfloat16: every shipped config trains and predicts, near float32, and nothing but the parts for
which `bfloat16` says so computes in it."""

import copy
import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import mmcv._ext
import numpy as np
import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, init_default_scope
from support import CONFIGS, ORIGINAL_MM, ROOT, poison_memory
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from cpvt_pyramid import CPVTPyramid
from cpvt_pyramid.app.training import train as run
from cpvt_pyramid.archs import ARCHS, COLUMNAR_ARCHS
from cpvt_pyramid.mm.amp import BFloat16OptimWrapper, bfloat16
from cpvt_pyramid.versions import VERSION
from tests.models.families import FAMILIES, batch, build, shrink
from tests.models.ports import randomize
from tests.models.samples import random_data

# What the original mm packages cannot do.
UPSTREAM = {
    'dino_cpvt_s.py': (RuntimeError, 'DINO must have 256 channels'),
}
# The layers of detectors' heads that compute in bfloat16.
LAYERS_OF_HEADS = {
    'RetinaNet': {'bbox_head.cls_convs', 'bbox_head.reg_convs'},
    'MaskRCNN': {
        'rpn_head.rpn_conv',
        'roi_head.bbox_head.shared_fcs',
        'roi_head.mask_head.convs',
    },
}
SIDE = 128
SIZES = [(96, 128), (128, 80)]  # padded to SIDE x SIDE


def tiny(cfg: Config) -> dict:
    """The config's model with an eighth of the channels and few blocks."""
    model = shrink(cfg.model.to_dict(), 8)
    backbone = model['backbone']
    if backbone['type'] == 'DenseCPVT':
        arch = COLUMNAR_ARCHS[backbone['arch']]
        backbone['arch'] = arch._replace(dim=arch.dim // 8, depth=6)._asdict()
    else:
        arch = ARCHS[backbone['arch']]
        dims = tuple(dim // 8 for dim in arch.dims)
        backbone['arch'] = arch._replace(dims=dims, depths=(2, 1, 1, 1))._asdict()
    if cfg.default_scope == 'mmseg':
        model['data_preprocessor']['size'] = (SIDE, SIDE)
    if model['type'] == 'DINO':
        model['bbox_head']['embed_dims'] = 256 // 8  # it takes them from no other setting
    return model


def data_for(model: nn.Module, sizes: list) -> dict:
    boxes = (8, 10, 40, 50), (30, 20, 75, 90)
    segmentor = hasattr(model, 'decode_head')
    labels = (3, 4)
    classes = min(model.decode_head.num_classes, 11) if segmentor else 11
    if getattr(getattr(model, 'bbox_head', None), 'num_classes', None) == 1:
        labels = (0, 0)
    return random_data(segmentor, sizes, boxes=boxes, labels=labels, classes=classes, masks=True)


@contextmanager
def watched(model: nn.Module) -> Iterator[set[str]]:
    """The modules that are called in autocast, or whose weights are used in it. Outside them
    nothing may be bfloat16, and mmcv's operations, most of which have no bfloat16 kernel on a GPU,
    never may."""
    called = set()

    def check(what: object, inputs: object) -> None:
        dtypes = {getattr(value, 'dtype', None) for value in tree_flatten(inputs)[0]}
        assert torch.bfloat16 not in dtypes, what

    def enter(name: str, *inputs: object) -> None:
        if torch.is_autocast_cpu_enabled():
            called.add(name)
        else:
            check(name, inputs)

    def leave(name: str, module: nn.Module, output: object) -> None:
        if any(True for _ in module.parameters(recurse=False)) and is_rounded(output):
            called.add(name)

    def refuse(function: object, *args: object, **options: object) -> object:
        check(function, [args, options])
        return function(*args, **options)

    operations = {k: v for k, v in vars(mmcv._ext).items() if callable(v) and k[0] != '_'}
    watched = {name: partial(refuse, function) for name, function in operations.items()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(mmcv._ext, **watched))
        for name, module in model.named_modules():
            hook = lambda _, args, options, name=name: enter(name, args, options)  # noqa: E731
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            hook = lambda module, _, output, name=name: leave(name, module, output)  # noqa: E731
            stack.enter_context(module.register_forward_hook(hook))
        yield called


def part_of(name: str, parts: set[str]) -> str:
    """The part of a model that has a module, or the module itself."""
    return next((part for part in parts if f'{name}.'.startswith(f'{part}.')), name)


def is_rounded(value: object) -> bool:
    """True for what was computed in bfloat16, whatever its dtype is."""
    return isinstance(value, Tensor) and torch.equal(value, value.bfloat16().to(value.dtype))


@cache  # configs that differ in depth or schedule alone have one tiny model
def trained(scope: str, model: str) -> SimpleNamespace:
    """A training step in float32 and one in bfloat16, and then a prediction."""
    init_default_scope(scope)
    before = randomize(MODELS.build(ConfigDict(json.loads(model))))
    found = SimpleNamespace(logs=[])
    for kind in (OptimWrapper, BFloat16OptimWrapper):
        torch.manual_seed(0)
        np.random.seed(0)
        after = copy.deepcopy(before).train()
        wrapper = kind(torch.optim.SGD(after.parameters(), lr=1e-3))
        with watched(after) as found.in_autocast:
            found.logs.append(after.train_step(data_for(after, SIZES), wrapper))
        found.moved = [not torch.equal(*ab) for ab in zip(before.parameters(), after.parameters())]
        assert all(p.isfinite().all() for p in after.parameters())
    with torch.no_grad(), watched(after), bfloat16(after):
        found.sample, *_ = after.eval().test_step(data_for(after, SIZES[:1]))
    return found


@pytest.mark.parametrize('name', CONFIGS)
def test_shipped_configs(name, request):
    """On a CPU `--amp` is bfloat16. Plain autocast fails there in RoIAlign, and on GPUs in focal
    loss, too."""
    if ORIGINAL_MM and name in UPSTREAM:
        error, reason = UPSTREAM[name]
        request.applymarker(pytest.mark.xfail(raises=error, reason=reason, strict=True))
    cfg = Config.fromfile(ROOT / 'configs' / name)
    run.use_mixed_precision(cfg)
    assert cfg.optim_wrapper.type == 'BFloat16OptimWrapper'
    result = trained(cfg.default_scope, json.dumps(tiny(cfg)))
    expected, near = result.logs
    assert near['loss'] != expected['loss'] and all(value.isfinite() for value in near.values())
    torch.testing.assert_close(near['loss'], expected['loss'], rtol=0.03, atol=0)
    assert all(result.moved)
    parts = ('backbone', 'neck', 'decode_head', 'auxiliary_head')
    expected = {part for part in parts if cfg.model.get(part)}
    if cfg.model.get('decode_head', {}).get('type') == 'Mask2FormerHead':
        expected.remove('decode_head')  # deformable attention
    expected |= LAYERS_OF_HEADS.get(cfg.model.type, set())
    assert {part_of(name, expected) for name in result.in_autocast} == expected
    if cfg.default_scope == 'mmseg':
        assert result.sample.seg_logits.data.isfinite().all()
    else:
        boxes, scores = result.sample.pred_instances.bboxes, result.sample.pred_instances.scores
        assert boxes.dtype == scores.dtype == torch.float32
        assert len(boxes) and boxes.isfinite().all()


@pytest.mark.foreign
@pytest.mark.parametrize('name', FAMILIES)
def test_families(name):
    """Detectors and segmentors of the mm packages."""
    model = build(FAMILIES[name])
    data = batch(FAMILIES[name], model)
    state = copy.deepcopy(model.state_dict())
    with watched(model) as called, bfloat16(model):
        losses = model.train()(**copy.deepcopy(data), mode='loss')
        total, logs = model.parse_losses(losses)
        total.backward()
        model.eval().load_state_dict(state, strict=False)
        with torch.no_grad():
            model(**copy.deepcopy(data), mode='predict')
    assert 'backbone' in {name.partition('.')[0] for name in called}
    assert all(value.isfinite() for value in logs.values())
    assert all(p.grad.isfinite().all() for p in model.backbone.parameters())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        return {'out': [self.head(self.backbone(x))]}


class Narrow(nn.Module):
    """Other people's neck on our backbone: P6 and P7 of a small image are one pixel wide."""

    def __init__(self):
        super().__init__()
        arch = ARCHS['mit_b0']._replace(
            dims=(32, 32, 32, 32), depths=(1, 1, 1, 1), heads=(1, 1, 1, 1)
        )
        self.backbone = CPVTPyramid(arch, out_indices=(3,))
        self.neck = nn.Sequential(
            nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(64, 64, 3, 2, 1)
        )

    def forward(self, image):
        return self.neck(self.backbone(image)[0])


def test_necks_of_others_in_bfloat16():
    """By our optimizer wrapper, and in the context `bfloat16`."""
    model = randomize(Narrow()).train()
    image = torch.randn(1, 3, 33, 40)
    expected = torch.autograd.grad(model(image).square().sum(), model.neck.parameters())
    wrapper = BFloat16OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    for context in (wrapper.optim_context(model), bfloat16(model)):
        poison_memory()
        with context:
            out = model(image)
        poison_memory()
        found = torch.autograd.grad(out.square().sum(), model.neck.parameters())
        for a, b in zip(found, expected):
            assert (a - b).norm() < 0.1 * b.norm()


class Normed(nn.Module):
    """Other people's neck with a layer norm on our backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = CPVTPyramid('pcpvt_nano', out_indices=(0,))
        layers = dict(linear=nn.Linear(32, 32), norm=nn.LayerNorm(32))
        self.neck = nn.Sequential(OrderedDict(layers))  # with numbers, each would return float32

    def forward(self, image: Tensor) -> Tensor:
        return self.neck(self.backbone(image)[0].permute(0, 2, 3, 1))


def test_layer_norms_of_others_in_bfloat16():
    """The gradient of a bias is the sum of 4096 gradients, all of which are 1."""
    model = randomize(Normed()).train()
    image = torch.randn(1, 3, 256, 256)
    wrapper = BFloat16OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    for context in (wrapper.optim_context(model), bfloat16(model)):
        with context:
            out = model(image)
        (found,) = torch.autograd.grad(out.sum(), [model.neck.norm.bias])
        torch.testing.assert_close(found, torch.full((32,), 4096.0))


@pytest.mark.parametrize('way', ['plain', 'forward', 'in place', 'wrapped'])
def test_the_context_ends(way):
    """Also for compiled modules, which are not recompiled for it in every step."""
    model, x = Net(), torch.randn(2, 4)
    compiled = []
    backend = lambda graph, inputs: compiled.append(graph) or graph.forward  # noqa: E731
    with torch.no_grad():
        expected = model.backbone(x)
        if way == 'forward':
            model.forward = torch.compile(model.forward, backend=backend)
        elif way == 'in place':
            model.backbone.compile(backend=backend)
        elif way == 'wrapped':
            model.backbone = torch.compile(model.backbone, backend=backend)
        for _ in range(3):
            with pytest.raises(KeyError), bfloat16(model):
                near = model.backbone(x)
                assert model(x)['out'][0].dtype == near.dtype == torch.float32
                assert not torch.equal(near, expected)
                raise KeyError
            assert torch.equal(model.backbone(x), expected)
            model(x)
    if VERSION >= (2, 7):  # the compiler of PyTorch 2.1 makes one more, or none
        assert len(compiled) <= 2 and bool(compiled) == (way != 'plain')
    with bfloat16(part := nn.Linear(4, 4)):  # a model without such parts
        near = part(x)
    assert near.dtype == torch.float32 and not torch.equal(near, part(x))


def test_a_compiled_training_step():
    """dynamo deleted the replaced `forward` twice."""
    model, x = Net(), torch.randn(2, 4)
    wrapper = BFloat16OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))

    def loss() -> Tensor:
        with wrapper.optim_context(model):
            return model(x)['out'][0].sum()

    expected = loss()
    assert torch.equal(torch.compile(loss, backend='aot_eager')(), expected)
    assert not torch.equal(model(x)['out'][0].sum(), expected)


@pytest.mark.parametrize(
    'given',
    [
        dict(type='BFloat16OptimWrapper'),
        dict(type=BFloat16OptimWrapper),
        dict(type=OptimWrapper),
        dict(type='AmpOptimWrapper', loss_scale=512.0),
        {},
    ],
    ids=str,
)
def test_amp_keeps_the_choice_of_a_config_and_is_float16_on_a_gpu(given, monkeypatch):
    monkeypatch.setattr(run, 'get_device', lambda: 'cuda')
    cfg = Config({'optim_wrapper': {**given, 'accumulative_counts': 2}})
    run.use_mixed_precision(cfg)
    used = given if given.get('type', OptimWrapper) != OptimWrapper else {'type': 'AmpOptimWrapper'}
    assert cfg.optim_wrapper == dict(**used, accumulative_counts=2)
