import pytest

from benchmarks import batch_fill as tool


def test_batches_of_two_sizes():
    """In turns: a queue of four fills batches of two, and a batch in order is divided."""
    canvases = [(32, 64), (64, 64)] * 4
    assert tool.fill(canvases, batch_size=2, waiting=4) == 1
    assert tool.fill(canvases, batch_size=2, waiting=2) == pytest.approx(0.5)
    assert tool.divided(canvases, batch_size=2) == pytest.approx(0.5)
    assert tool.padded(canvases, batch_size=2) == pytest.approx(2 / 1.5)


def test_table(capsys):
    assert tool.main(['--batch-sizes', '4']) == 0
    head, coco, ade20k = capsys.readouterr().out.splitlines()
    assert head.split() == ['sizes', 'batch', 'sorted', 'queue', 'divided', 'padded']
    assert coco.startswith('COCO val2017, detector') and ade20k.startswith('ADE20K, segmentor')
