"""Convert a checkpoint to another format.

    cpvt convert-weights twins_pcpvt_small.pth --to mmseg
    cpvt convert-weights timm://twins_pcpvt_small.in1k --to mmseg

The formats, and whose files have them:

{formats}

official is the format in which the model's authors publish it, and timm the format of timm.

Writes STEM_FORMAT-HASH.pth, where the hash is the first 8 digits of the file's SHA-256, after
checking that it holds the same tensors when it is loaded. Of a detector or segmentor only the
backbone is converted; a classifier keeps its head.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Optional

from ...checkpoints.table import FORMATS
from ..tooling.command import UserError, one_line, run_command
from ..tooling.files import check_folder, folder_to_fill

GROUP = 'training'
assert __doc__ is not None
__doc__ = __doc__.replace(
    '{formats}', '\n'.join(f'    {key:<20} {form.owners}' for key, form in FORMATS.items())
)
CHOICES = ('official', 'timm', *FORMATS)
if TYPE_CHECKING:
    Format = str
else:
    Format = Literal[CHOICES]


def convert_weights(
    source: str,
    *,
    to: Format,
    out_dir: str = '.',
    backbone_only: bool = False,
    safetensors: bool = False,
) -> None:
    """Write a checkpoint in another format.

    Args:
        source: a .pth or .safetensors file in any of the formats, a path or an address (timm://NAME,
            hf://OWNER/REPO/FILE, https://...), or the name of a trained model (cpvt models)
        to: the format, see above
        out_dir: folder to write to
        backbone_only: leave out a classifier's head
        safetensors: write a .safetensors file
    """
    from ...checkpoints.convert import convert_checkpoint  # torch takes seconds, --help needs none
    from ...tasks.trained import weights_of

    check_folder(out_dir)
    try:
        weights = weights_of(source)
        with folder_to_fill(out_dir) as folder:
            path, is_new = convert_checkpoint(weights, to, folder, backbone_only, safetensors)
    except (ConnectionError, FileNotFoundError, ValueError, ImportError) as error:
        raise UserError(one_line(error)) from error
    print(f'wrote {path}' if is_new else f'{path} already exists with this content')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(convert_weights, argv)
