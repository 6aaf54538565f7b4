"""Run timm's tests/test_models.py, of the installed version, over our models: `make test-timm`.

Arguments are passed to pytest, which uses this file as a plugin. timm's wheels have no tests: its
source distribution is downloaded to build/ once.
"""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import timm

import cpvt_pyramid.timm_models  # noqa: F401 registers the models

ROOT = Path(__file__).parents[1]
OURS = timm.list_models(module='timm_models')
# Models of tests that are not parametrized by `list_models`, and ours instead of them.
INSTEAD = {'twins_svt_small': 'svt_small', 'resnet18': 'pcpvt_nano'}
LEFT_OUT = {
    'test_model_load_pretrained': 'downloads the published weights',
    'test_model_features_pretrained': 'downloads the published weights',
    'test_model_forward_torchscript': 'compiles the Python of layers',
    'test_pruned_features_torchscript': 'compiles the Python of layers',
    'test_model_forward_fx': 'traces the Python of layers',
    'test_model_backward_fx': 'traces the Python of layers',
    'test_model_forward_fx_torchscript': 'compiles the Python of layers',
    'test_model_forward_features_fx': 'traces the Python of layers',
    'test_forward_intermediates_stop_early_final_norm': "takes arguments of Twins' constructor",
}
all_models = timm.list_models


def of_ours(
    filter: str = '',
    module: str = '',
    pretrained: bool = False,
    exclude_filters: str = '',
    name_matches_cfg: bool = False,
    include_tags: bool | None = None,
) -> list[str]:
    """`timm.list_models` of our models, of which those with a class token are the ones that timm's
    tests call non-standard."""
    names = all_models(OURS, '', pretrained, '', name_matches_cfg, include_tags)
    if 'twins_*' in exclude_filters:
        return [name for name in names if timm.get_pretrained_cfg(name).pool_size]
    return names if not filter or 'twins_*' in filter else []


def pytest_configure(config: pytest.Config) -> None:
    timm.list_models = of_ours


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    def is_for_ours(item: pytest.Function) -> bool:
        params = item.callspec.params if hasattr(item, 'callspec') else {}
        name = str(params.get('model_name')).partition('.')[0]
        return name in OURS and item.originalname not in LEFT_OUT

    items[:] = filter(is_for_ours, items)


def timms_tests() -> Path:
    """timm's test file, with our models' names in it."""
    version = importlib.metadata.version('timm')
    folder = ROOT / 'build' / f'timm-{version}'
    archive = folder.parent / f'timm-{version}.tar.gz'
    if not archive.exists():
        pip = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps']
        source = ['--no-binary', ':all:', '--dest', str(archive.parent), f'timm=={version}']
        subprocess.run([*pip, *source], check=True)
    with tarfile.open(archive) as files:
        text = files.extractfile(f'timm-{version}/tests/test_models.py').read().decode()
    for theirs, ours in INSTEAD.items():
        text = text.replace(f"'{theirs}'", f"'{ours}'")
    folder.mkdir(exist_ok=True)
    path = folder / 'test_models.py'
    path.write_text(text)
    return path


def main() -> int:
    path = timms_tests()
    os.environ['PYTHONPATH'] = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
    options = ['-c', os.devnull, '--rootdir', path.parent, '-p', 'timm_contract', '-W', 'ignore']
    return subprocess.call([sys.executable, '-m', 'pytest', '-q', *options, path, *sys.argv[1:]])


if __name__ == '__main__':
    sys.exit(main())
