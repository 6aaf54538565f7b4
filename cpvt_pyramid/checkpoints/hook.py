"""What `load_state_dict` of a model does beside what PyTorch does.

The names of a published file of another format, at the root of the model, are converted, and what
such files hold and the model leaves out is dropped: a classifier, stages that are not built. All
else is PyTorch's business: a model's own names are never renamed, wrappers and prefixes are not
removed, and names that no published file has are unexpected.
"""

import logging
from typing import Any, Optional

from torch import Tensor, nn

from ..names import is_left_out
from ..versions import add_load_hook
from .files import listed
from .formats import Found, find_formats, renames, to_ours
from .rgb import inflated

LOGGER = logging.getLogger(__name__)


def convert_on_load(model: nn.Module) -> None:
    """Let `load_state_dict` of a model, alone or in a larger one, read published files.

    Args:
        model: with the attributes and the method `with_all_parts` of `CPVTPyramid`.
    """
    add_load_hook(model, convert_state_dict)


def convert_state_dict(
    model: Any,
    state_dict: dict,
    prefix: str,
    _metadata: dict,
    _strict: bool,
    _missing: list,
    _unexpected: list,
    errors: list,
) -> None:
    """Convert what is for a model in a state dict, in place; a load hook of PyTorch."""
    own = nn.Module.state_dict(model)
    theirs = {}
    for name, value in state_dict.items():
        inside = isinstance(name, str) and name.startswith(prefix)
        if inside and isinstance(value, Tensor):
            theirs[name[len(prefix) :]] = value
    try:
        ours, remarks = converted(model, own, theirs)
    except ValueError as error:
        errors.append(str(error))  # as PyTorch reports other shapes
        return
    if not remarks:
        return
    for name in theirs:
        del state_dict[prefix + name]
    for name, value in ours.items():
        state_dict[prefix + name] = value
    LOGGER.info('%s', '; '.join(remarks))


def converted(
    model: Any, own: dict[str, Any], theirs: dict[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors that a model is to load, and what was done to them; see `convert_on_load`."""
    remarks = []
    if not theirs.keys() <= own.keys():
        found = format_at_root(theirs, own)
        if found is not None:
            theirs = to_ours(theirs, found)
            remarks.append(f'converted from the format {found.key}')
        left_out = [n for n in theirs if n not in own and is_left_out(n, model, theirs)]
        if left_out:
            theirs = {name: value for name, value in theirs.items() if name not in left_out}
            remarks.append(f'left out {listed(left_out)}, which the model does not have')
    theirs, how = inflated(theirs, model)
    if how:
        remarks.append(how)
    return theirs, remarks


def format_at_root(theirs: dict[str, Tensor], own: dict[str, Any]) -> Optional[Found]:
    """The format of a state dict as a whole, if it is another one than the model's."""
    for found in find_formats(theirs, own, roots=False):
        if renames(found, own):
            continue
        is_other = found.key not in ('own', 'ours')
        return found if is_other and 2 * len(found.names) >= len(theirs) else None
    return None
