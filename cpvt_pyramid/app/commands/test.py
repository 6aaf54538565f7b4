"""Evaluate a detector or a segmentor.

    cpvt test configs/retinanet_cpvt_s.py retinanet.pth --report report.html

For several GPUs, processes or machines, see dist_test.sh.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.
from collections.abc import Sequence
from typing import Literal, Optional

from ..tooling.command import run_command


def test(
    config: str,
    checkpoint: str,
    *,
    work_dir: Optional[str] = None,
    out: Optional[str] = None,
    report: Optional[str] = None,
    tta: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
) -> None:
    """Evaluate a checkpoint on the test set of a config, and print its metrics.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py.
        checkpoint: weights of the model, a path or an address.
        work_dir: folder for the log and the metrics; by default work_dirs/NAME/test.
        out: write the predictions, pickled.
        report: write an HTML page about them: metrics by class and size, kinds of errors, a
            confusion matrix, the worst images; see docs/training.md.
        tta: test-time augmentation: merge predictions at several sizes, flipped and not, by
            tta_model and tta_pipeline of the config.
        cfg_options: override settings of the config, for example
            test_dataloader.num_workers=8.
        launcher: what started the processes.
    """
    from ..training.test import run_test

    run_test(
        config,
        checkpoint,
        work_dir=work_dir,
        out=out,
        report=report,
        tta=tta,
        cfg_options=cfg_options,
        launcher=launcher,
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(test, argv, 'the test is not finished')
