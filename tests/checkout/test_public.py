"""The names that stay stable are those of a list in docs/api.md: a name that is added, renamed or
removed must be so in the list, too."""

import re
from importlib import import_module

import pytest
import timm
from mmengine import registry
from support import ROOT

import cpvt_pyramid
from cpvt_pyramid.__main__ import find_tools
from cpvt_pyramid.checkpoints.table import FORMATS

PLUGINS = (
    'cpvt_pyramid.mm.detection',
    'cpvt_pyramid.mm.segmentation',
    'cpvt_pyramid.app.training.hooks',
    'cpvt_pyramid.app.data.bands',
)


def registered() -> set[str]:
    """What our modules register in OpenMMLab's root registries."""
    for name in PLUGINS:
        import_module(name)
    registries = [r for r in vars(registry).values() if isinstance(r, registry.Registry)]
    return {
        name
        for of_kind in registries
        for name, found in of_kind.module_dict.items()
        if found.__module__.startswith('cpvt_pyramid.')
    }


def in_timm() -> set[str]:
    import_module('cpvt_pyramid.timm_models')
    return {*timm.list_models(module='timm_models')}


PUBLIC = {
    'from cpvt_pyramid import': lambda: {*cpvt_pyramid.__all__},
    'commands of cpvt': lambda: {*find_tools()},
    'registered in MMEngine': registered,
    'models in timm': in_timm,
    'formats of checkpoints': lambda: {*FORMATS},
}


def rows() -> dict[str, list[str]]:
    """The rows of the list: a kind, and its names."""
    page = (ROOT / 'docs/api.md').read_text()
    table = page.split('<!-- public: tests/checkout/test_public.py -->')[1]
    table = table.split('<!-- end of public -->')[0]
    found = re.findall(r'^\| ([^|`]+?) \| (.*) \|$', table, re.M)
    return {kind: re.findall(r'`([^`]+)`', names) for kind, names in found if '`' in names}


def test_every_kind_is_listed():
    assert [*rows()] == [*PUBLIC]


@pytest.mark.parametrize('kind', PUBLIC)
def test_names(kind):
    listed = rows()[kind]
    assert listed == sorted(PUBLIC[kind](), key=str.lower)
