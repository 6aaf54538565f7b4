#!/usr/bin/env python
"""Evaluate a detector or a segmentor, whichever the config describes, and show its metrics."""

# Imports wait until the arguments are read: --help is quick, and mm's take seconds.
import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from mmengine.config import Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

TTA_SCALES = (0.75, 1.0, 1.25)  # of the image in the test pipeline
TTA_MODELS = {
    'mmdet': {
        'type': 'DetTTAModel',
        'tta_cfg': {'nms': {'type': 'nms', 'iou_threshold': 0.5}, 'max_per_img': 100},
    },
    'mmseg': {'type': 'SegTTAModel'},
}


def test(
    config: str,
    checkpoint: str,
    work_dir: Optional[str] = None,
    out: Optional[str] = None,
    show_dir: Optional[str] = None,
    tta: bool = False,
    cfg_options: Sequence[str] = (),
    launcher: str = 'none',
) -> None:
    """Evaluate a checkpoint on the test set that a config describes.

    Args:
        config: the config file.
        checkpoint: path or address of the model's weights.
        work_dir: folder for the log and the metrics; by default work_dirs/NAME/test.
        out: pickle file for the predictions.
        show_dir: folder for a picture of each prediction.
        tta: merge the predictions for each image at several sizes and flipped, as the config's
            `tta_model` and `tta_pipeline` say, or else at 3 sizes.
        cfg_options: `key=value` settings that override the config's.
        launcher: what started the processes: none (there is one), pytorch, slurm or mpi.
    """
    from cpvt_pyramid.runner import checks, launch, prediction

    cfg = launch.load_config(config, cfg_options)
    launch.check_data(cfg, 'test')
    weights = launch.read_checkpoint(checkpoint)
    if out and not out.endswith(('.pkl', '.pickle')):
        raise launch.UserError(f'--out writes a pickle; name it .pkl and not {out}')
    # Beside a training's files: mmengine writes the config that it runs, under the same name.
    cfg.work_dir = str(launch.make_folder(work_dir or launch.work_dir_of(cfg, config) / 'test'))
    if tta:
        use_augmentation(cfg)
    if show_dir:
        hook = {'type': 'PictureHook', 'folder': str(launch.make_folder(show_dir))}
        cfg.custom_hooks = [*(cfg.get('custom_hooks') or []), hook]
    cfg.load_from, cfg.resume = checkpoint, False
    launch.join_processes(cfg, launcher)
    runner = launch.QuietRunner.from_cfg(cfg)
    launch.load_weights(runner.model, weights, checkpoint)
    checks.check_classes(cfg, runner.model, 'test')
    if out:
        launch.make_folder(Path(out).parent)
        runner.test_evaluator.metrics.append(prediction.results_dump(cfg.default_scope, out))
    metrics = runner.test()
    if launch.rank() == 0:
        width = max(map(len, metrics), default=0)
        for name, value in metrics.items():
            print(f'{name:{width}}  {value:.4g}')
    launch.leave_processes()


def use_augmentation(cfg: 'Config') -> None:
    """Wrap the model and the test pipeline for test-time augmentation."""
    from cpvt_pyramid.runner.launch import leaves

    wrapper = cfg.get('tta_model') or TTA_MODELS[cfg.default_scope]
    cfg.model = {**wrapper, 'module': cfg.model}
    for dataset in leaves(cfg.test_dataloader.dataset):
        dataset.pipeline = cfg.get('tta_pipeline') or augmented(dataset.pipeline)


def augmented(pipeline: Sequence[dict]) -> list[dict]:
    """A test pipeline that gives an image at 3 sizes around its own, as it is and flipped."""
    resize = next(i for i, step in enumerate(pipeline) if step['type'].endswith('Resize'))
    sizes = [
        {**pipeline[resize], 'scale': tuple(round(factor * s) for s in pipeline[resize]['scale'])}
        for factor in TTA_SCALES
    ]
    flips = [{'type': 'RandomFlip', 'prob': prob} for prob in (0.0, 1.0)]
    # The packing's own choice of what to keep is without what undoes the flip.
    rest = [
        [{k: v for k, v in step.items() if k != 'meta_keys'}] for step in pipeline[resize + 1 :]
    ]
    return [*pipeline[:resize], {'type': 'TestTimeAug', 'transforms': [sizes, flips, *rest]}]


def main(argv: Optional[Sequence[str]] = None) -> int:
    from cpvt_pyramid.runner.options import add_cfg_options, add_launcher

    parser = argparse.ArgumentParser(
        prog='test', description=__doc__, epilog='Several GPUs or processes: dist_test.sh.'
    )
    add = parser.add_argument
    add('config', metavar='CONFIG', help='config file, for example configs/retinanet_cpvt_s.py')
    add('checkpoint', metavar='CHECKPOINT', help='weights of the model, a path or an address')
    add('--work-dir', metavar='DIR', help='folder for the log and metrics (work_dirs/NAME/test)')
    add('--out', metavar='FILE.pkl', help='write the predictions, pickled')
    add('--show-dir', metavar='DIR', help='write a picture of each prediction')
    add('--tta', action='store_true', help='test-time augmentation: several sizes, and flipped')
    add_cfg_options(parser, 'test_dataloader.batch_size=8')
    add_launcher(parser)
    arguments = vars(parser.parse_args(argv))
    os.environ.setdefault('LOCAL_RANK', arguments.pop('local_rank'))

    from cpvt_pyramid.runner.launch import run_tool

    return run_tool('test', test, arguments, 'there is no result')


if __name__ == '__main__':
    sys.exit(main())
