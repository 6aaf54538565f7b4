"""What the tools' Runner does differently from mmengine's."""

import logging
from typing import Any

import pytest
import torch
from mmengine.config import Config
from torch import Tensor, nn

from cpvt_pyramid.runner.tool_runner import ToolRunner


class Growing(nn.Module):
    """A model that is called with maps of two sizes."""

    def train_step(self, x: Tensor) -> Tensor:
        return x.sin().sum()


@pytest.mark.parametrize(
    ('options', 'graphs'),
    [({}, 2), ({'dynamic': False}, 2), ({'dynamic': True}, 1)],
)
def test_compiled_for_each_size(options, graphs, caplog):
    torch._dynamo.reset()  # torch 2.1 takes graphs of an earlier backend
    sizes = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        sizes.append([x.shape for x in inputs if isinstance(x, Tensor)])
        return graph.forward

    runner = ToolRunner.__new__(ToolRunner)
    runner.model, runner.logger = Growing(), logging.getLogger('compile')
    runner.cfg = Config({'compile': {'backend': backend, **options}})
    with caplog.at_level('INFO'):
        runner._maybe_compile('train_step')
    for side in (4, 6):
        runner.model.train_step(torch.ones(2, side, side + 2))
    assert len(sizes) == graphs
    assert ('one graph for each size' in caplog.text) == (not options)


@pytest.mark.parametrize(('given', 'expected'), [(True, {'dynamic': False}), (False, False)])
def test_whether_to_compile(given, expected, monkeypatch):
    monkeypatch.setattr(torch, 'compile', lambda function, **options: (function, options))
    runner = ToolRunner.__new__(ToolRunner)
    runner.model, runner.logger = Growing(), logging.getLogger('compile')
    runner.cfg = Config({'compile': given})
    runner._maybe_compile('train_step')
    assert runner.cfg.compile == expected
    assert isinstance(runner.model.train_step, tuple) == given
