"""Compare position encodings on small models.

    python -m experiments.position encodings
    python -m experiments.position encodings --preset full
    python -m experiments.position paper --data fashion/usr/share/datasets/fashion-mnist

`encodings` compares them on pictures that need position, at the size of the training and at others;
`paper` repeats the CPVT paper's own experiment with photographs of Fashion-MNIST. The command
prints tables and writes WORK_DIR/QUESTION.json and figures. Trainings are kept in WORK_DIR/runs:
what is there is not computed twice, and an interrupted command continues where it was, with the
same results. docs/position.md has our findings.
"""

import sys
from collections.abc import Sequence
from typing import Literal, Optional

from cpvt_pyramid.app.tooling.command import check_at_least, prepare_for_torch, run_command
from cpvt_pyramid.app.tooling.files import make_folder
from cpvt_pyramid.app.tooling.threads import usable_cores

prepare_for_torch()  # before torch is imported


def position_lab(
    question: Literal['encodings', 'paper'],
    *,
    preset: Literal['smoke', 'default', 'full'] = 'default',
    work_dir: str = 'work_dirs/position',
    seed: int = 0,
    seeds: Optional[int] = None,
    workers: Optional[int] = None,
    data: str = '/usr/share/datasets/fashion-mnist',
    page: Optional[str] = None,
) -> None:
    """Answer a question.

    Args:
        question: what to ask
        preset: amount of work: default takes half an hour on two cores for encodings, and 4 to 5
            hours for paper; full, hours; smoke takes a minute, and shows nothing
        work_dir: folder of all results
        seed: first seed of the tables
        seeds: number of seeds (default: the preset's)
        workers: processes that train, of one thread each (default: the number of cores)
        data: folder of Fashion-MNIST's four files, for paper; by default, where Debian's package
            dataset-fashion-mnist installs them
        page: Markdown page that takes the tables and figures between <!-- findings --> and
            <!-- /findings -->; the JSON file is copied next to it
    """
    check_at_least('seed', seed, 0)
    check_at_least('seeds', seeds, 1)
    check_at_least('workers', workers, 1)

    from experiments.report import check_page, publish

    from .encodings import compare_encodings
    from .fashion import read_fashion
    from .laboratory import PAPER_PRESETS, PRESETS, Lab
    from .paper import compare_with_paper

    check_page(page)
    if question == 'paper':
        read_fashion(data)
        chosen = PAPER_PRESETS[preset]
    else:
        chosen = PRESETS[preset]
    folder = make_folder(work_dir)
    lab = Lab(chosen, folder, seed, seeds or chosen.seeds, workers or usable_cores(), data)
    answer = compare_with_paper(lab) if question == 'paper' else compare_encodings(lab)
    publish(answer, {**chosen._asdict(), 'seeds': list(lab.used_seeds)}, folder, page)


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(position_lab, argv, interrupted='run the same command to continue')


if __name__ == '__main__':
    sys.exit(main())
