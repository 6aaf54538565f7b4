"""Whether a call of a layer does what its class says, and nothing else.

It does more where hooks are called with it, where an adapter is in its place, or where its weight
is computed from others. What reads the weight itself, instead of calling the layer, asks here.

Private to PyTorch are `Module._forward_hooks`, `_global_forward_hooks` and their like, which
`has_hooks` reads.
"""

import functools
from typing import Any

from torch import nn
from torch.nn.modules import module as modules

from .versions import is_compiling


def plain_class(module: nn.Module) -> type:
    """The class whose calls do what those of a module do: the one that its class `stands_for`, if
    it says so itself, or its own."""
    return vars(type(module)).get('stands_for', type(module))


def is_plain_linear(layer: nn.Module) -> bool:
    """True if a call of a layer does nothing but apply its own weight and bias.

    It does more if it has hooks, if it is of another class, as adapters are, or if its weight or
    bias is computed from other parameters, as by pruning, weight and spectral norm. False in a
    graph, which has a call of the layer: compilers before PyTorch 2.8 cannot trace the questions.
    """
    if is_compiling():
        return False
    return plain_class(layer) is nn.Linear and acts_alone(layer)


def acts_alone(layer: nn.Module) -> bool:
    """True if a layer has a weight and a bias, or None, of its own, and the methods of its class,
    and if no hooks are called with it."""
    bias = layer.bias
    if replaces_forward(layer) or type(layer.weight) is not nn.Parameter:
        return False
    if bias is not None and type(bias) is not nn.Parameter:
        return False
    return has_usual_bias(layer) and not has_hooks(layer)


def has_usual_bias(layer: Any) -> bool:
    """True if the bias of a layer is None or has one value for each row of its weight. `F.linear`
    takes others that can be broadcast."""
    return layer.bias is None or layer.bias.shape == layer.weight.shape[:1]


def replaces_forward(module: nn.Module) -> bool:
    """True if a layer or an MLP has an attribute in the place of a method that a call runs."""
    return not vars(module).keys().isdisjoint(('forward', '_conv_forward', 'contract'))


def replaces_methods(module: nn.Module) -> bool:
    """True if a module has an attribute in the place of a method of its class. Who puts one there
    expects that it is called."""
    kind: Any = type(module)
    return not vars(module).keys().isdisjoint(methods_of(kind))


@functools.cache
def methods_of(kind: Any) -> frozenset[str]:
    """The names of the methods of a class."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name)))


def has_hooks(module: nn.Module) -> bool:
    """True if hooks, of the module or of all modules, are called with it."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_backward_hooks,
        modules._global_backward_pre_hooks,
    )
    return any(hooks)
