"""Ask the position laboratory: experiments on where a model's sense of position comes from.

    python -m experiments.position encodings placement resolution     # what `make lab` asks
    python -m experiments.position encodings --preset full --seeds 5
    python -m experiments.position paper --data fashion/usr/share/datasets/fashion-mnist
    python -m experiments.position probe padding shift attention --model timm:convnext_tiny

Each question prints its tables and writes WORK_DIR/QUESTION.json and figures. All answers in
WORK_DIR together are report.html. Trainings are kept in WORK_DIR/runs: what is there
is not computed twice, and an interrupted command continues where it was, with the same results.
docs/position.md has our findings, experiments/position/findings/protocol.md explains the questions.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional, get_args

from cpvt_pyramid.tooling.command import UserError, one_line, run_command
from cpvt_pyramid.tooling.files import make_folder
from cpvt_pyramid.tooling.threads import usable_cores

if TYPE_CHECKING:
    from cpvt_pyramid.lab.probes import Subject
    from experiments.report import LabAnswer

    from .laboratory import Lab

TrainedQuestion = Literal[
    'encodings',
    'placement',
    'resolution',
    'canvas',
    'coordinates',
    'border',
    'anchoring',
    'paper',
]
MeasuredQuestion = Literal['probe', 'padding', 'shift', 'attention', 'registers']
TRAINED: tuple[str, ...] = get_args(TrainedQuestion)
MEASURED: tuple[str, ...] = get_args(MeasuredQuestion)
OF_PHOTOS = {'anchoring', 'paper'}  # the questions whose pictures are Fashion-MNIST


def position_lab(
    questions: Sequence[Literal[TrainedQuestion, MeasuredQuestion]],
    *,
    preset: Literal['smoke', 'default', 'full', 'pyramid'] = 'default',
    work_dir: str = 'work_dirs/position_lab',
    seed: int = 0,
    seeds: Optional[int] = None,
    model: Sequence[str] = (),
    checkpoint: Optional[str] = None,
    size: int = 224,
    workers: Optional[int] = None,
    device: Literal['cpu', 'cuda'] = 'cpu',
    data: str = '/usr/share/datasets/fashion-mnist',
    finished: bool = False,
    page: Optional[str] = None,
) -> None:
    """Answer the questions and write the report.

    Args:
        questions: what to ask
        preset: amount of work: default takes half an hour on two cores for encodings, placement
            and resolution, and 4 to 5 hours for paper; full, hours; pyramid is default with
            pyramids instead of columnar models; smoke takes a minute at most, and shows nothing
        work_dir: folder of all results
        seed: first seed of the tables
        seeds: number of seeds (default: the preset's)
        model: models to measure instead of the lab's own: timm:NAME, torchvision:NAME, a name of
            ours such as pcpvt_small, or an OpenMMLab config; for probe, padding, shift, attention
            and registers
        checkpoint: weights of the model, a path or an address (timm://, hf://, https://); random if
            not given
        size: side of the images for --model, in pixels
        workers: processes that train (default: the number of cores)
        device: of the training
        data: folder of Fashion-MNIST's four files, for anchoring and paper; by default, where
            Debian's package dataset-fashion-mnist installs them
        finished: for paper: report the runs that are finished, and train no more
        page: Markdown page that takes the tables and figures of these questions between
            <!-- findings --> and <!-- /findings -->, as experiments/position/findings/tables.md
    """
    for name, value, least in (
        ('seed', seed, 0),
        ('seeds', seeds, 1),
        ('workers', workers, 1),
        ('size', size, 64),
    ):
        if value is not None and value < least:
            raise UserError(f'--{name} must be at least {least}, got {value}')
    if size % 32:
        raise UserError(f'--size must be a multiple of 32, got {size}')
    if finished and set(questions) != {'paper'}:
        raise UserError('--finished is for the question paper alone')
    of_photos = [question for question in questions if question in OF_PHOTOS]
    if of_photos and preset == 'pyramid':
        raise UserError(
            f'--preset pyramid is not for {", ".join(of_photos)}; take smoke, default or full'
        )
    trained = [question for question in questions if question in TRAINED]
    if model and trained:
        raise UserError(
            f'{", ".join(trained)} trains models of its own; --model is for {", ".join(MEASURED)}'
        )
    if checkpoint and len(model) != 1:
        raise UserError(f'--checkpoint needs one --model, got {len(model)}')
    if page and not Path(page).is_file():
        raise UserError(f'there is no page {page}')
    folder = Path(work_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f'--work-dir must be a folder, but {folder} is a file')

    import torch

    from experiments.report import save, write_findings, write_lab_report

    from .fashion import read_fashion
    from .given_models import load_subject
    from .laboratory import PHOTO_PRESETS, PRESETS, Lab
    from .tasks import TASKS, ceilings

    if device == 'cuda' and not torch.cuda.is_available():
        raise UserError('--device cuda needs a GPU that torch can use; there is none')
    if of_photos:
        read_fashion(data)
    make_folder(folder)
    workers = workers or (usable_cores() if device == 'cpu' else 1)
    subjects = [load_subject(name, checkpoint, size) for name in model]
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise UserError(f'models must have different names, got {", ".join(names)}')
    if not model and len(of_photos) < len(questions):
        shares = [f'{TASKS[name].question} {100 * value:.1f}' for name, value in ceilings().items()]
        print(f'What a bag of patches can reach, in %: {", ".join(shares)}', flush=True)
    for question in questions:
        chosen = (PHOTO_PRESETS if question in OF_PHOTOS else PRESETS)[preset]
        count = seeds or chosen.seeds
        lab = Lab(chosen, folder, seed, count, workers, device, data, finished)
        found = answer(question, lab, subjects, size)
        used = list(range(seed, seed + count))
        if finished:
            used = sorted({run['settings']['seed'] for row in found.data for run in row['runs']})
        save(found, {**chosen._asdict(), 'seeds': used}, folder)
        print(f'\n{found.title}')
        for table in found.tables:
            print(f'\n{table.text()}')
        print(f'\n{folder / question}.json; figures: {", ".join(found.figures)}', flush=True)
        report = write_lab_report(folder, (*TRAINED, *MEASURED))
    if page:
        write_findings(folder, questions, Path(page))
    print(f'\nReport: {report}')


def answer(question: str, lab: 'Lab', subjects: Sequence['Subject'], size: int) -> 'LabAnswer':
    """The answer to a question; a `UserError` if a given model cannot be measured."""
    from . import questions

    if question in questions.TRAINED:
        return questions.TRAINED[question](lab)
    try:
        return questions.MEASURED[question](lab, subjects, size)
    except (ValueError, RuntimeError, AssertionError) as error:
        if not subjects:
            raise
        names = ', '.join(subject.name for subject in subjects)
        raise UserError(f'cannot measure {names}: {one_line(error)}') from error


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(position_lab, argv, interrupted='run the same command to continue')


if __name__ == '__main__':
    sys.exit(main())
