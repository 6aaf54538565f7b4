"""bitwise.py: what it says of a model that depends on its batch, and of one that does not."""

import torch

from benchmarks import bitwise as tool
from benchmarks import measuring


def test_a_model_that_depends_on_its_batch_is_told_from_others(monkeypatch, capsys):
    monkeypatch.setattr(measuring, 'RUN_TIME', 0.01)
    runtimes = {'onnxruntime': lambda x: [x, x - x.mean()], 'openvino': lambda x: [2 * x]}
    monkeypatch.setattr(tool, 'exported', lambda *_: b'')
    monkeypatch.setattr(tool, 'InRuntime', lambda _, path, __: runtimes[path])
    tool.bitwise(archs=['pcpvt_nano'], size='32x40', batch=3, threads=[torch.get_num_threads()])
    rows = [line.split(' | ') for line in capsys.readouterr().out.splitlines()[2:6]]
    found = {row[1]: (row[3], float(row[4])) for row in rows}
    assert tuple(found) == tool.PATHS
    assert found['onnxruntime'][0] == 'none' and found['onnxruntime'][1] > 1e-4
    assert found['openvino'] == ('2 to 3', 0)
    assert all(difference < 1e-5 for _, difference in list(found.values())[:2])


def test_mistakes(capsys):
    assert tool.main(['--archs', 'resnet']) == 2
    assert "unknown arch 'resnet'; one of pcpvt_nano" in capsys.readouterr().err
