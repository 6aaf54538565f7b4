"""What the tools' Runner does differently from mmengine's."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from cpvt_pyramid.config.common import plan_compilation
from cpvt_pyramid.config.plan import apply
from cpvt_pyramid.runner.tool_runner import ToolRunner, one_cycles_by_group


class Growing(nn.Module):
    """A model that is called with maps of two sizes."""

    def train_step(self, x: Tensor) -> Tensor:
        return x.sin().sum()


@pytest.mark.parametrize(
    'given, graphs',
    [
        (True, 2),
        ({}, 2),
        ({'dynamic': False}, 2),
        ({'dynamic': True}, 1),
        (False, 0),
    ],
)
def test_compiled_for_each_size(given, graphs, monkeypatch):
    torch._dynamo.reset()  # torch 2.1 takes graphs of an earlier backend
    compiled, compile = [], torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, 'compile', partial(compile, backend=backend))
    runner = ToolRunner.__new__(ToolRunner)
    runner.model, runner.logger = Growing(), logging.getLogger('compile')
    runner.cfg = Config({'compile': given})
    apply(runner.cfg, plan_compilation(runner.cfg))
    runner._maybe_compile('train_step')
    for side in (4, 6):
        runner.model.train_step(torch.ones(2, side, side + 2))
    assert len(compiled) == graphs


@pytest.mark.parametrize('eta_max', [1e-3, [1e-3, 1e-3]])
def test_other_one_cycle_schedules_are_left_as_they_are(eta_max):
    """Equal groups, and a list of peaks. For others, see training/test_train.py."""
    rates = [5e-4, 5e-4] if isinstance(eta_max, float) else [5e-4, 1e-4]
    parameters = [{'params': [nn.Parameter(torch.zeros(1))], 'lr': lr} for lr in rates]
    wrapper = OptimWrapper(torch.optim.SGD(parameters, lr=5e-4))
    schedules = [{'type': 'LinearLR'}, {'type': 'OneCycleLR', 'eta_max': eta_max}]
    assert one_cycles_by_group(schedules, wrapper, logging.getLogger()) == schedules
