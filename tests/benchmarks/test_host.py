import pytest
import torch
from torch import nn

from benchmarks import host


def test_calls():
    """Of Python and of C, without the function itself."""

    def inner():
        return len([])

    def outer():
        inner()
        inner()

    assert host.count_calls(outer) == 4


def test_operations():
    """An addition and a copy count; a view and reserved memory do not."""
    x = torch.empty(2, 3, device='meta')

    def operations():
        y = (x.t() + 1).clone()
        torch.empty_like(y)
        y.t().detach()

    assert host.count_operations(operations) == 2


def test_one_more_operation_is_seen():
    """In our model and in timm's, of a training step forward and backward."""
    arch = host.narrow('pcpvt_small')._replace(depths=(1, 1, 1, 1))
    pair = host.build(arch).to('meta')
    image = torch.empty(1, 3, 64, 64, device='meta')

    def counts():
        found = []
        for model, forward in zip(pair, pair.forwards(image)):
            found.append(host.count_operations(host.one_step('training step', model, forward)))
            host.free_gradients(model)
        return found

    before = counts()
    for model in pair:
        block = model.blocks[2][0]
        block.norm1 = nn.Sequential(block.norm1, nn.Tanh())
    # tanh and its gradient
    assert [after - count for after, count in zip(counts(), before)] == [2, 2]


def test_tables(capsys, monkeypatch):
    shallow = host.ARCHS['svt_small']._replace(depths=(2, 2, 2, 2))
    monkeypatch.setitem(host.ARCHS, 'svt_small', shallow)
    settings = (torch.get_num_threads(), torch.backends.mkldnn.enabled)
    assert host.main(['--archs', 'svt_small', '--rounds', '2']) == 0
    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == settings
    tables = [table.splitlines() for table in capsys.readouterr().out.split('\n\n')]
    assert [table[0].split()[0] for table in tables] == ['calls', 'operations', 'host']
    assert [len(table) for table in tables] == [3, 4, 5]
    padded = tables[1][3].split()
    assert padded[:3] == ['svt_small', 'forward,', 'padded'] and float(padded[4]) > 1


def test_negative_rounds(capsys):
    assert host.main(['--rounds', '-1']) == 2
    assert '--rounds must be at least 0' in capsys.readouterr().err


@pytest.mark.parametrize('arch', ['pcpvt_small', 'svt_small'])
def test_the_host_calls_fewer_functions_than_in_timm(arch):
    """On a GPU, the host is what small maps wait for. Widths do not matter here."""
    pair = host.build(host.narrow(arch))
    image = torch.randn(1, 3, host.COUNT_SIZE, host.COUNT_SIZE)
    for step in host.STEPS:
        ours, timm = (
            host.count_calls(host.one_step(step, model, forward))
            for model, forward in zip(pair, pair.forwards(image))
        )
        assert ours <= 0.87 * timm, step


@pytest.mark.parametrize('arch', ['pcpvt_small', 'svt_small'])
def test_a_padded_batch_needs_few_more_operations(arch):
    """One for each attention's scores, one for each sub-sampling, and few others."""
    ours = host.build(arch).to('meta').ours
    image = torch.empty(len(host.PADDED), 3, host.COUNT_SIZE, host.COUNT_SIZE, device='meta')
    unpadded = host.count_operations(lambda: ours(image))
    padded = host.count_operations(lambda: ours(image, torch.tensor(host.PADDED)))
    assert unpadded < padded <= 1.13 * unpadded
