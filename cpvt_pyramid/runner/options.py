"""Options that several tools have in the same words. Nothing slow is imported: --help is quick."""

from argparse import SUPPRESS, ArgumentParser


def add_cfg_options(parser: ArgumentParser, example: str) -> None:
    """--cfg-options, with a setting as its example."""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help=f'override settings of the config, for example {example}',
    )


def add_launcher(parser: ArgumentParser) -> None:
    """--launcher, and the number of the process that older ones of torch give as an option."""
    parser.add_argument(
        '--launcher',
        choices=('none', 'pytorch', 'slurm', 'mpi'),
        default='none',
        help='what started the processes (%(default)s)',
    )
    parser.add_argument('--local_rank', '--local-rank', default='0', help=SUPPRESS)
