"""Our operators and mmcv's compiled ones, beside each other (`make test-compiled`)."""

from importlib import import_module

import mmcv_calls as calls
import pytest
import torch
from family_results import assert_same, results
from torch.testing import assert_close

from cpvt_pyramid import mmcv_operators
from cpvt_pyramid.mmcv_operators import ext
from tests.models.families import FAMILIES, batch, build
from tests.models.mmcv_extension import operators

pytestmark = pytest.mark.compiled


@pytest.fixture(scope='module')
def compiled():
    extension = import_module('mmcv._ext')
    assert extension is not ext and mmcv_operators.found().suffix == '.so'
    return extension


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('name', calls.ON_CPU)
def test_values_and_gradients_are_those_of_the_compiled_operators(name, seed, compiled):
    results = []
    for extension in (compiled, ext):
        torch.manual_seed(seed)
        with operators(extension):
            results.append(calls.ON_CPU[name]())
    assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)


TIES = ('YOLOX',)  # boxes of equal scores, in the padding, come in another order


@pytest.mark.parametrize('name', FAMILIES)
def test_detectors_and_segmentors_compute_the_same(name, compiled):
    """Losses, gradients and predictions of OpenMMLab's own, with our backbone."""
    torch.manual_seed(0)
    model = build(FAMILIES[name])
    data = batch(FAMILIES[name], model, padded=True)
    found = []
    for extension in (compiled, ext):
        with operators(extension):
            found.append(results(model, data))
    if name in TIES:
        for result in found:
            result['predictions'] = [x.sort(0).values for x in result['predictions']]
    assert_same(found[1], found[0])
