"""Evaluate a detector or a segmentor.

    cpvt test MODEL DATA                    # any model, on a data.yaml or a folder with annotations
    cpvt test model-int8.xml data.yaml --report report.html
    cpvt test retinanet_pvt_v2_b2_coco photos --split val
    cpvt test CONFIG CHECKPOINT DATA
    cpvt test CONFIG CHECKPOINT             # on the test data of the config, by OpenMMLab's metrics

MODEL is any model that `cpvt infer` takes: an exported model (.onnx, .xml), the name of a trained
model, a checkpoint with its config inside, or a config and its checkpoint. `cpvt test` predicts as
`cpvt infer` does, and needs the same packages. DATA is a data.yaml or a folder, as in `cpvt
check-data`. Classes are compared by their names. Metrics are in percent: the AP of COCO for boxes
and masks of objects, mIoU, mAcc and aAcc for segmentation masks.

Without DATA, OpenMMLab evaluates the test data of the config, with the config's own metrics. For
several GPUs, processes or machines, see dist_test.sh.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Literal, Optional

from ..predict.options import RunOptions
from ..tooling.command import UserError, flag_of, imports_of, run_command
from ..tooling.files import check_file, check_new

GROUP = 'evaluation and prediction'


def test(
    model: str,
    data: Sequence[str],
    *,
    split: Optional[Literal['train', 'val', 'test']] = None,
    report: Optional[str] = None,
    work_dir: Optional[str] = None,
    out: Optional[str] = None,
    tta: bool = False,
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
    options: RunOptions,
) -> None:
    """Evaluate a model, and print its metrics.

    Args:
        model: config, exported model, checkpoint with its config inside, or name of a trained
            model.
        data: a data.yaml or a folder with annotations; after a config first its checkpoint, a path
            or an address. A config and its checkpoint alone: the test data of the config.
        split: split of the data; by default the first of test, val and train that has annotations.
        report: write an HTML page about the predictions: metrics by class and size, kinds of
            errors, a confusion matrix, the worst images; see docs/training.md.
        work_dir: for the test data of a config: folder for the log and the metrics; by default
            work_dirs/NAME/test.
        out: for the test data of a config: write the predictions, pickled.
        tta: for the test data of a config: test-time augmentation. Merge predictions at several
            sizes, flipped and not, by tta_model and tta_pipeline of the config.
        launcher: for the test data of a config: what started the processes.
    """
    check_output('--out', out, ('.pkl', '.pickle'))
    check_output('--report', report, ('.html',))
    from ..predict.opening import resolve_model

    files, words = resolve_model(model, data)
    if len(words) > 1:
        raise UserError(
            f'one data.yaml or folder can be evaluated at a time, got {" ".join(words)}'
        )
    if words:
        given = {'--work-dir': work_dir, '--out': out, '--tta': tta}
        given['--launcher'] = launcher != 'none'
        check_unused(given, f'is for the test data of a config, without {words[0]}')
        with imports_of('cpvt test', extra='runtime'):
            from ..evaluate.evaluating import evaluate_model

        page = Path(report) if report else None
        evaluate_model(files, Path(words[0]), options, split, page)
        return
    if files.config is None or files.checkpoint is None:
        raise UserError(f'{model} needs data: a data.yaml or a folder comes next')
    given = {'--split': split}
    for each in fields(options):
        if each.name != 'cfg_options':
            given[flag_of(each.name)] = getattr(options, each.name) != each.default
    check_unused(given, 'needs a data.yaml or a folder after the checkpoint')
    from ..training.test import run_test

    run_test(
        files.config,
        files.checkpoint,
        work_dir=work_dir,
        out=out,
        report=report,
        tta=tta,
        cfg_options=options.cfg_options,
        launcher=launcher,
    )


def check_output(option: str, path: Optional[str], endings: tuple[str, ...]) -> None:
    """Check that a new file can be written to the path of an option, if it is given."""
    if path is None:
        return
    if not path.endswith(endings):
        raise UserError(f'{option} must end in {" or ".join(endings)}, got {path}')
    check_file(path)
    check_new(path, option=option)


def check_unused(given: Mapping[str, object], why: str) -> None:
    """Check that options that would have no effect are not given."""
    for option, value in given.items():
        if value:
            raise UserError(f'{option} {why}')


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(test, argv, 'the test is not finished')
