"""Training in which the processes divide parameters, gradients and optimizer states among them.

Also called fully sharded data parallel, or ZeRO 3. mmengine's FSDPStrategy needs its FlexibleRunner
and a GPU for each process, and writes checkpoints of another format; this uses PyTorch's
`fully_shard` with mmengine's Runner, on GPUs and CPUs. Checkpoints are those of one process: they
can be resumed, tested and exported with and without this, with any number of processes.

To turn it on::

    --cfg-options model_wrapper_cfg.type=ShardedDataParallel
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from mmengine.device import get_device
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ...model import Block


@MODEL_WRAPPERS.register_module()
class ShardedDataParallel(nn.Module):
    """A model whose parameters are divided among the processes of a run.

    The parameters of each block of the backbone are gathered while it computes; those of the rest
    of the model are gathered together. The model must have its initial weights. Loading converts
    whole tensors.

    Examples:
        >>> model_wrapper_cfg = dict(type='ShardedDataParallel')
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, 0)
        mesh = init_device_mesh(torch.device(get_device()).type, (dist.get_world_size(),))
        for part in module.modules():
            if isinstance(part, Block):
                fully_shard(part, mesh=mesh)
        self.module = fully_shard(module, mesh=mesh)
        for part in module.modules():
            part.register_load_state_dict_pre_hook(divide_loaded)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    def train_step(self, data: dict, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        return self.module.train_step(data, optim_wrapper)

    def val_step(self, data: dict) -> list:
        return self.module.val_step(data)

    test_step = val_step

    @contextmanager
    def gathered(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside this context the state dicts of the model and of its optimizer are whole, on the
        CPU. All processes must enter it."""
        state = whole(self.module.state_dict())
        optimizer_state = whole(optimizer.state_dict())
        self.module.state_dict = lambda: state
        optimizer.state_dict = lambda: optimizer_state
        try:
            yield
        finally:
            del self.module.state_dict, optimizer.state_dict


def divide_loaded(module: nn.Module, state_dict: dict, prefix: str, *_: Any) -> None:
    """Before a module loads its parameters: divide whole tensors as it divides its own."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and value is not None and not isinstance(value, DTensor):
            if value.shape == parameter.shape:
                state_dict[prefix + name] = like(value, parameter)


def like(value: Tensor, parameter: DTensor) -> DTensor:
    """A whole tensor, the same in all processes, divided as a parameter is."""
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(state: Any) -> Any:
    """A state dict with whole tensors on the CPU."""
    state = tree_map_only(DTensor, DTensor.full_tensor, state)
    return tree_map_only(Tensor, Tensor.cpu, state)


def divide_states(optimizer: Optimizer) -> None:
    """After an optimizer has loaded whole states: divide them as the parameters are."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = like(value, parameter)
