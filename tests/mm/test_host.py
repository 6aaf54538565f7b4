"""What importing the plugin changes in its host, in a new process: its own names are added."""

import sys

from support import run

COMPARE = """
import gc, logging, os, random, signal, sys, warnings

import mmcv
import mmengine.hooks
import mmengine.model
import mmengine.optim
import torch
from mmengine.registry import Registry
from mmengine.runner import CheckpointLoader

# What the host has imported, and what of the plugin is imported then.
STEPS = (
    ((), ('cpvt_pyramid.mm',)),
    (('mmdet.models', 'mmseg.models'), ('cpvt_pyramid.mm.detection', 'cpvt_pyramid.mm.segmentation')),
)
FLAGS = (
    torch.get_default_dtype,
    torch.get_num_threads,
    torch.get_float32_matmul_precision,
    torch.is_grad_enabled,
    torch.is_anomaly_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
)


def flags():
    found = {flag.__name__: flag() for flag in FLAGS}
    found['seed'] = torch.initial_seed()
    for backend in (torch.backends.cudnn, torch.backends.mkldnn, torch.backends.cuda.matmul):
        for name in ('enabled', 'benchmark', 'deterministic', 'allow_tf32'):
            found[f'{backend.__name__ if hasattr(backend, "__name__") else backend} {name}'] = (
                getattr(backend, name, None))
    if hasattr(torch.serialization, 'get_safe_globals'):
        found['safe globals'] = list(torch.serialization.get_safe_globals())
    return found


def loggers():
    found = {}
    for name in (None, *logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        found[name] = logger.level, logger.propagate, logger.disabled, list(logger.handlers)
    return found


def functions():
    '''Of the host: those that a plugin could replace.'''
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split('.')[0] in ('mmcv', 'mmengine', 'mmdet', 'mmseg', 'torch'):
            for key, value in list(vars(module).items()):
                if callable(value) and getattr(value, '__module__', None) == name:
                    found[name, key] = id(value)
                    if isinstance(value, type) and not name.startswith('torch'):
                        for method, function in list(vars(value).items()):
                            if callable(function):
                                found[name, key, method] = id(function)
    return found


def state():
    registries = [each for each in gc.get_objects() if isinstance(each, Registry)]
    return {
        'environment': dict(os.environ),
        'filters of warnings': list(warnings.filters),
        'registries': {
            (each.scope, each.name, id(each), name): value
            for each in registries for name, value in each.module_dict.items()
        },
        'schemes': dict(CheckpointLoader._schemes),
        'loggers': loggers(),
        'flags': flags(),
        'functions': functions(),
        'paths': dict(enumerate(sys.path)),
        'hooks': (sys.excepthook, sys.displayhook, sys.meta_path[:], sys.path_hooks[:]),
        'signals': {s: signal.getsignal(s) for s in signal.valid_signals()},
        'random': random.getstate(),
    }


def loaders():
    names = ['a.pth', 'https://a/b.pth', 'http://a/b.pth', 's3://a/b.pth', 'open-mmlab://a',
             'torchvision://resnet50', 'mmcls://a', 'modelzoo://a']
    return [CheckpointLoader._get_checkpoint_loader(name) for name in names]


def compare(before, after):
    for what, old in before.items():
        new = after[what]
        if not isinstance(old, dict):
            assert new == old, what
            continue
        for key, value in old.items():
            assert key in new and new[key] == value, (what, key)
        for key in new.keys() - old.keys():
            if what in ('registries', 'schemes'):
                assert new[key].__module__.startswith('cpvt_pyramid.'), key
            elif what == 'loggers':
                assert new[key] == (logging.NOTSET, True, False, []), key
            else:  # modules of the host may be imported now
                assert what == 'functions', (what, key)


for host, plugin in STEPS:
    for module in host:
        __import__(module)
    before, before_loaders = state(), loaders()
    for module in plugin:
        __import__(module)
    compare(before, state())
    assert loaders() == before_loaders
print('nothing has changed')
"""


def test_the_plugin_only_adds_its_names():
    done = run(sys.executable, '-W', 'ignore', '-c', COMPARE)
    assert done.stdout.strip() == 'nothing has changed', done.stderr[-2000:]
