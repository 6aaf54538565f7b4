import gc
import importlib.util
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

# Before torch is imported: graphs for all sizes are captured in almost half of the time without
# this cache.
os.environ.setdefault('TORCH_FAKE_TENSOR_DISPATCH_CACHE', '0')

# Else each of the processes that tests start compiles the package again.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)

import lacking
import pytest
import torch
from hypothesis import register_random, settings
from support import clear_global_instances
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background process of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Imports make millions of objects that stay: to look for garbage takes seconds and frees nothing.
gc.disable()


class TorchRandom:
    """PyTorch's random numbers, for Hypothesis, which seeds them before each example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # Hypothesis keeps a weak reference
register_random(TORCH_RANDOM)
# Every run tries the same examples; those of `make fuzz` differ.
settings.register_profile('repeatable', derandomize=True, deadline=None)
settings.load_profile('repeatable')

IN_EMPTY_FOLDERS = {
    'data',
    'evaluate',
    'exported',
    'images',
    'predict',
    'predictions',
    'tooling',
    'training',
}
HAS_MM = importlib.util.find_spec('mmengine') is not None
IMPORTS_MM = re.compile(
    r'^\s*(from|import) (foreign|mm\w+|'
    r'cpvt_pyramid\.(mm|app\.(config|data|training|predict\.openmmlab)))\b',
    re.M,
)


def pytest_ignore_collect(collection_path: Path) -> Optional[bool]:
    """Leave out the files that need the mm packages where these are missing."""
    if HAS_MM or not collection_path.match('test_*.py'):
        return None
    if collection_path.name == 'test_doctor.py':  # it finds the whole environment in order
        return True
    return True if IMPORTS_MM.search(collection_path.read_text()) else None


@pytest.fixture(scope='session', autouse=True)
def _temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Killed processes leave temporary files, and torchrun leaves folders: where pytest removes
    them, and not in the system's folder."""
    folder = str(tmp_path_factory.mktemp('temporary'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TMPDIR', folder)
        patch.setattr(tempfile, 'tempdir', folder)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fork this process come first: autograd refuses to work in the forks of a process
    in which it has started threads, as some tests make it do."""
    items.sort(key=lambda item: not hasattr(getattr(item, 'module', None), 'in_processes'))
    lacking.skip(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    # With the default thresholds a tenth of the time of the tests is spent looking for garbage.
    gc.set_threshold(50_000, 10, 50)
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if os.environ.get('CPVT_RECORD') and exitstatus in (0, 1):  # not interrupted
        from tested import record

        counts = {
            n: len(terminalreporter.stats.get(n, ())) for n in ('passed', 'failed', 'skipped')
        }
        record(config.args if config.args_source.name == 'ARGS' else [], counts)


@pytest.fixture(autouse=True)
def _no_data_workers() -> Iterator[None]:
    """End the workers of data loaders that a test leaves in a cycle. The garbage collector closes
    their queues first, and then waits 5 seconds for each, in whatever test runs at that time."""
    yield
    if multiprocessing.active_children():
        for each in gc.get_objects():
            if type(each) is _MultiProcessingDataLoaderIter:
                each._shutdown_workers()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _empty_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test of these parts in an empty folder."""
    if request.path.parent.name in IN_EMPTY_FOLDERS:
        monkeypatch.chdir(request.getfixturevalue('tmp_path'))


@pytest.fixture(autouse=True)
def _no_global_instances() -> Iterator[None]:
    """Clear the global state of mmengine after each test."""
    yield
    clear_global_instances()


@pytest.fixture
def quick_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes longer than a tiny training: to lay its config out, and to draw its
    curves (see training/test_pictures.py)."""
    monkeypatch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (f'{text}\n', True))
    monkeypatch.setattr('cpvt_pyramid.app.training.pictures.write_curves', lambda *_: None)


@pytest.fixture(scope='session')
def sample_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random data set in both layouts: 8 training and 4 validation images."""
    from small_data import write_small_data

    root = tmp_path_factory.mktemp('data') / 'sample'
    write_small_data(root, train=8, val=4)
    return root


@pytest.fixture(scope='session')
def pages_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set of pages: 8 for training and 4 for validation."""
    from cpvt_pyramid.app.demo.pages import make_pages

    root = tmp_path_factory.mktemp('pages') / 'pages'
    make_pages(root, train=8, val=4)
    return root


@pytest.fixture(scope='session')
def trees_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of trees, of small images without trees."""
    from trees_package import random_boxes, use_package

    from cpvt_pyramid.app.demo.trees import make_trees

    folder = tmp_path_factory.mktemp('trees')
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_package(folder / 'cache', random_boxes(), monkeypatch)
        make_trees(folder / 'trees')
    return folder / 'trees'


@pytest.fixture(scope='session')
def configs(sample_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Config files of a tiny detector and a tiny segmentor, by name."""
    pytest.importorskip('mmengine')
    from tiny_mm import write_configs

    return write_configs(tmp_path_factory.mktemp('configs'), sample_dataset)


@pytest.fixture(scope='session')
def untrained(
    configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """By name, the config and a checkpoint of an untrained model with many detections or labels."""
    from cpvt_pyramid.app.config.load import load_config
    from cpvt_pyramid.app.predict.openmmlab.loading import build_model

    folder, commands = tmp_path_factory.mktemp('untrained'), {}
    for name, layer in (
        ('detector', 'bbox_head.retina_cls'),
        ('segmentor', 'decode_head.conv_seg'),
    ):
        torch.manual_seed(1)
        model = build_model(load_config(configs[name]), 'cpu')
        model.init_weights()
        torch.nn.init.normal_(model.get_submodule(layer).weight, std=0.2)
        torch.save({'state_dict': model.state_dict()}, folder / f'{name}.pth')
        commands[name] = [str(configs[name]), str(folder / f'{name}.pth')]
    return commands


@pytest.fixture
def fcn(tmp_path: Path) -> Path:
    """A config without our backbone, fcn.py in the test's folder."""
    path = tmp_path / 'fcn.py'
    path.write_text("""
default_scope = 'mmseg'
model = dict(
    type='EncoderDecoder',
    backbone=dict(type='ResNetV1c', depth=50, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4)),
    decode_head=dict(type='FCNHead', in_channels=2048, in_index=3, channels=8, num_classes=3),
    test_cfg=dict(mode='whole'))
""")
    return path


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Accelerated models compute small maps, too, as they compute large ones."""
    from cpvt_pyramid.acceleration import attention, blocks, embeddings, norms, ordinary

    monkeypatch.setattr(ordinary, 'FEW_OPERATIONS', 0)
    monkeypatch.setattr(ordinary, 'FEW_TOKENS', 0)
    monkeypatch.setattr(norms, 'FEW_VALUES', 0)
    monkeypatch.setattr(attention, 'FEWEST_TOKENS', 0)
    monkeypatch.setattr(attention, 'FEWEST_KEYS', 0)
    monkeypatch.setattr(blocks, 'FEWEST_TOKENS', 0)
    monkeypatch.setattr(embeddings, 'FEWEST_PATCHES', 0)
    monkeypatch.setattr(blocks, 'FEWEST_ROWS', 0)
