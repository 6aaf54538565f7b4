"""scaling.py: each operation of a pass, with its least time."""

import pytest
import torch

from benchmarks import scaling
from benchmarks.scaling import Operation
from cpvt_pyramid import CPVTPyramid, accelerate
from cpvt_pyramid.acceleration.kernels import has_kernels


@pytest.fixture
def model():
    return accelerate(CPVTPyramid('pcpvt_nano').eval())


def test_all_operations_are_found(model, nothing_is_small):
    image = torch.randn(1, 3, 64, 64)
    found = scaling.measure(model, image, threads=[1, 2], passes=2)
    assert list(found) == [1, 2]
    for operations in found.values():
        counts = {kind: len(times) for kind, times in scaling.by_kind(operations).items()}
        assert counts[scaling.PASS] == 1
        if has_kernels(torch.float32):
            blocks = sum(len(stage) for stage in model.blocks)
            assert counts['ours: global_attention'] == blocks
            assert counts['ours: convolve_add'] == len(model.blocks)
            assert counts['ours: embed_patches'] == len(model.blocks)
            assert counts['ours: layer_norm'] > 0
            assert 0 < counts['ours: keys_of_patches'] < blocks
        else:
            assert counts['aten::mkldnn_convolution'] >= len(model.blocks)


def test_the_least_time_of_each_operation():
    passes = [[Operation('a', 3), Operation('b', 1)], [Operation('a', 2), Operation('b', 5)]]
    assert scaling.least(passes) == [Operation('a', 2), Operation('b', 1)]
    passes[1].pop()
    with pytest.raises(RuntimeError, match='different operations'):
        scaling.least(passes)


def test_lines():
    """Operation a scales perfectly, b not at all."""
    one = [Operation('a', 8000), Operation('b', 1000), Operation('b', 1000)]
    two = [Operation('a', 4000), Operation('b', 1000), Operation('b', 1000)]
    assert scaling.lines({1: one, 2: two}) == [
        ['a', '1', '8.00', '4.00', '2.00', '0.00', '0.0%'],
        ['b', '2', '2.00', '2.00', '1.00', '1.00', '16.7%'],
        ['all', '3', '10.00', '6.00', '1.67', '1.00', '16.7%'],
    ]


def test_an_operation_of_several_threads_alone():
    found = {1: [Operation('a', 4000)], 2: [Operation('a', 2000), Operation('b', 1000)]}
    assert scaling.lines(found)[1] == ['b', '0', '0.00', '1.00', '0.00', '1.00', '33.3%']


def test_command(capsys):
    options = '--archs pcpvt_nano --sizes 32 --dtypes float32 --threads 1 2 --passes 1 --plain'
    assert scaling.main(options.split()) == 0
    out = capsys.readouterr().out
    assert 'pcpvt_nano, 1 x 32x32, float32' in out and 'Python' in out and 'ours' not in out


@pytest.mark.parametrize(
    ('arguments', 'complaint'),
    [
        ('--archs pcpvt_tiny', "unknown arch 'pcpvt_tiny'"),
        ('--threads 2 4', 'the first of --threads must be 1, got 2'),
        ('--passes 0', '--passes must be at least 1, got 0'),
    ],
)
def test_mistakes(arguments, complaint, capsys):
    assert scaling.main(arguments.split()) == 2
    assert complaint in capsys.readouterr().err
