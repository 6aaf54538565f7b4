#!/usr/bin/env python
"""Run a script of timm's repository, train.py or validate.py, with this package's models."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

EPILOG = """
All that follows SCRIPT is for the script, as in
  python tools/timm_run.py ../pytorch-image-models/train.py --model pcpvt_small --data-dir imagenet
  torchrun --nproc_per_node 8 tools/timm_run.py ../pytorch-image-models/train.py ...
Recipes are in docs/pretraining.md.
"""


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'script', type=Path, metavar='SCRIPT', help="of a clone of timm's repository"
    )
    parser.add_argument('arguments', nargs=argparse.REMAINDER, metavar='...', help='of the script')
    args = parser.parse_args(argv)
    if not args.script.is_file():
        parser.error(
            f'no script at {args.script}; timm has its scripts in its repository alone: '
            f'git clone https://github.com/huggingface/pytorch-image-models'
        )
    # As `python SCRIPT` would: a timm that lies beside the script is the one to import.
    sys.path[0] = str(args.script.resolve().parent)
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
    try:
        import timm  # noqa: F401
    except ImportError as error:
        parser.error(f'timm does not import ({error}); pip install timm')
    import cpvt_pyramid.timm_models  # noqa: F401 registers the models

    sys.argv = [str(args.script), *args.arguments]
    runpy.run_path(str(args.script), run_name='__main__')


if __name__ == '__main__':
    main()
