#!/usr/bin/env python
"""Run train.py or validate.py of timm's repository with the models of this package."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

EPILOG = """
All arguments after SCRIPT are passed to it, for example:
  python tools/timm_run.py ../pytorch-image-models/train.py --model pcpvt_small --data-dir imagenet
  torchrun --nproc_per_node 8 tools/timm_run.py ../pytorch-image-models/train.py ...
For recipes, see docs/pretraining.md.
"""


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'script', type=Path, metavar='SCRIPT', help="in a clone of timm's repository"
    )
    parser.add_argument('arguments', nargs=argparse.REMAINDER, metavar='...', help='of that script')
    args = parser.parse_args(argv)
    if not args.script.is_file():
        parser.error(
            f'no script at {args.script}; timm ships its scripts only in its repository: '
            f'git clone https://github.com/huggingface/pytorch-image-models'
        )
    # Like `python SCRIPT`: import the timm next to the script, if there is one.
    sys.path[0] = str(args.script.resolve().parent)
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
    from cpvt_pyramid.tooling.command import prepare_for_torch

    prepare_for_torch()
    try:
        import timm  # noqa: F401
    except ImportError as error:
        parser.error(f'timm does not import ({error}); pip install timm')
    import cpvt_pyramid.timm_models  # noqa: F401 (registers the models)

    sys.argv = [str(args.script), *args.arguments]
    runpy.run_path(str(args.script), run_name='__main__')


if __name__ == '__main__':
    main()
