"""Run train.py or validate.py of timm's repository with the models of this package.

    cpvt timm-run ../pytorch-image-models/train.py --model pcpvt_small --data-dir imagenet
    torchrun --nproc-per-node 8 -m cpvt_pyramid timm-run ../pytorch-image-models/train.py ...

All arguments after the script are passed to it. For recipes, see docs/pretraining.md.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..tooling.command import UserError, prepare_for_torch, run_tool

CLONE = 'git clone https://github.com/huggingface/pytorch-image-models'


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ('-h', '--help'):
        print(f'Usage: cpvt timm-run SCRIPT ...\n\n{__doc__}')
        return 0
    prepare_for_torch()
    options = {'script': Path(arguments[0]), 'arguments': arguments[1:]}
    return run_tool('cpvt timm-run', timm_run, options, 'the script did not finish')


def timm_run(script: Path, arguments: Sequence[str]) -> None:
    """Run a script like `python SCRIPT`: it imports the timm next to it, if there is one."""
    if not script.is_file():
        raise UserError(
            f'no script at {script}; timm ships its scripts only in its repository: {CLONE}'
        )
    sys.path.insert(0, str(script.resolve().parent))
    import cpvt_pyramid.timm_models  # noqa: F401 (registers the models)

    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name='__main__')
