"""A hook for trainings that start from a trained model of other classes."""

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn

from ..checkpoints.loading import BACKBONES, check_backbones
from ..checkpoints.reading import listed


@HOOKS.register_module()
class LoadWhatFitsHook(Hook):
    """Leaves out the tensors of a `load_from` whose shapes are not those of the model.

    They are those of heads with another number of classes, which keep their initial values, and are
    logged in one line; without the hook, MMEngine warns about each. A backbone must fit: a
    ValueError says why it does not.
    """

    priority = 'VERY_HIGH'  # before the EMAHook, which loads the same tensors

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        model = runner.model
        if is_model_wrapper(model):
            model = model.module
        tensors = checkpoint.get('state_dict', checkpoint)
        check_backbones(model, tensors)
        unfit = replace_unfit(model, tensors)
        if unfit:
            runner.logger.info(
                f'left out {len(unfit)} tensors that have other shapes than those of the model, as '
                f'heads with another number of classes do: {listed(unfit)}'
            )


def replace_unfit(model: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """Replace tensors of other shapes than the model's by the model's own, except in the backbone.

    Returns:
        Their names.
    """
    backbones = tuple(
        f'{name}.' for name, module in model.named_modules() if isinstance(module, BACKBONES)
    )
    ours = {
        name: value for name, value in model.state_dict().items() if not name.startswith(backbones)
    }
    unfit = []
    for key in list(tensors):
        name = key.removeprefix('module.')
        if name in ours and tensors[key].shape != ours[name].shape:
            tensors[key] = ours[name]
            unfit.append(name)
    return unfit
