"""Evaluate a detector or a segmentor.

For several GPUs, processes or machines, see dist_test.sh.
"""

# torch and mm, which take seconds to import, are imported inside functions: --help is quick.

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Optional

from ..tooling.command import UserError, run_command

if TYPE_CHECKING:
    from mmengine.config import Config

TTA_SCALES = (0.75, 1.0, 1.25)  # relative to the test pipeline
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
    *,
    work_dir: Optional[str] = None,
    out: Optional[str] = None,
    show_dir: Optional[str] = None,
    tta: bool = False,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
    skip_bad: bool = False,
    processes: Optional[int] = None,
    cfg_options: Sequence[str] = (),
    launcher: Literal['none', 'pytorch', 'slurm', 'mpi'] = 'none',
) -> None:
    """Evaluate a checkpoint on the test set of a config, and print its metrics.

    Args:
        config: config file, for example configs/retinanet_cpvt_s.py.
        checkpoint: weights of the model, a path or an address.
        work_dir: folder for the log and the metrics; by default work_dirs/NAME/test.
        out: write the predictions, pickled.
        show_dir: write each prediction as a picture and as cpvt infer writes it.
        tta: test-time augmentation: merge predictions at several sizes, flipped and not, as
            tta_model and tta_pipeline of the config say, or else at 3 sizes.
        dtype: of the backbone, the neck and the heads of segmentors; boxes are float32.
        skip_bad: test without images and annotations that have errors; see cpvt check-data. The
            metrics are then those of the rest.
        processes: on a CPU, processes that each take a batch at a time, as in cpvt infer.
        cfg_options: override settings of the config, for example
            test_dataloader.num_workers=8.
        launcher: what started the processes.
    """
    from ..mm.amp import replace_forward
    from ..ops import use_winograd
    from ..runner.config import check
    from ..runner.config.explain import explained
    from ..runner.config.load import load_config, work_dir_of
    from ..runner.config.unread import check_unread
    from ..runner.datasets.checks import check_before_run
    from ..runner.inference.grouping import divide_batches
    from ..runner.inference.postprocessing import skip_unread_scores
    from ..runner.inference.prediction import results_dump
    from ..runner.inference.shared_test import share_test
    from ..runner.inference.sharing import Sharing
    from ..runner.models import fetch_checkpoint, load_whole_model
    from ..runner.tool_runner import ToolRunner
    from ..tooling.files import check_file, make_folder

    if out and not out.endswith(('.pkl', '.pickle')):
        raise UserError(f'--out must end in .pkl or .pickle, got {out}')
    sharing = Sharing.among(launcher)
    cfg = load_config(config, cfg_options)
    with explained(cfg, ('test',)):
        check.check_settings(cfg, 'test_dataloader', 'test_evaluator')
        check_unread(cfg, 'test')
        check.check_samplers(cfg, 'test')
        check.check_data(cfg, 'test')
        weights = fetch_checkpoint(checkpoint)
        if out:
            check_file(out)
        # Not the folder of the training: mmengine writes the config it runs, under the same name.
        cfg.work_dir = str(make_folder(work_dir or work_dir_of(cfg, config) / 'test'))
        if tta:
            use_augmentation(cfg)
        if show_dir:
            hook = {'type': 'PictureHook', 'folder': str(make_folder(show_dir))}
            cfg.custom_hooks = [*(cfg.get('custom_hooks') or []), hook]
        cfg.load_from, cfg.resume, cfg.launcher = checkpoint, False, 'none'
        check_before_run(cfg, 'test', skip_bad=skip_bad)
    if not sharing and cfg.test_cfg.get('type', 'TestLoop') == 'TestLoop':
        cfg.test_cfg = {**cfg.test_cfg, 'type': 'ForkedTestLoop', 'processes': processes}
    if sharing:
        share_test(cfg, weights, out, show_dir, dtype)
    with explained(cfg, ('test',)):
        runner = ToolRunner.from_cfg(cfg)
        load_whole_model(runner.model, weights, checkpoint)
        use_winograd(runner.model)
        check.check_classes(cfg, runner.model, 'test')
        if dtype == 'bfloat16':
            replace_forward(runner.model)
        divide_batches(runner.model)
        if cfg.default_scope == 'mmseg':
            skip_unread_scores(runner)
        if out:
            runner.test_evaluator.metrics.append(results_dump(cfg.default_scope, out))
        metrics = runner.test()
    if not sharing or runner.test_loop.evaluated:
        width = max(map(len, metrics), default=0)
        for name, value in metrics.items():
            print(f'{name:{width}}  {value:.4g}')


def use_augmentation(cfg: 'Config') -> None:
    """Wrap the model and the test pipeline for test-time augmentation."""
    from ..runner.config.parts import kind_of, leaves

    wrapper = cfg.get('tta_model') or TTA_MODELS[cfg.default_scope]
    heads = {**cfg.model, **(cfg.model.get('roi_head') or {})}
    masks = heads.get('mask_head') or heads.get('panoptic_head')
    if kind_of(wrapper) == 'DetTTAModel' and masks:
        raise UserError('--tta merges boxes, and mmdet cannot merge masks: test without --tta')
    cfg.model = {**wrapper, 'module': cfg.model}
    for dataset in leaves(cfg.test_dataloader.dataset):
        dataset.pipeline = cfg.get('tta_pipeline') or augmented(dataset.pipeline)


def augmented(pipeline: Sequence[dict]) -> list[dict]:
    """The test pipeline at 3 sizes, each flipped and not."""
    from ..runner.config.parts import kind_of

    resize = next((i for i, step in enumerate(pipeline) if kind_of(step) == 'Resize'), None)
    scale = None if resize is None else pipeline[resize].get('scale')
    width_height = scale if isinstance(scale, (list, tuple)) else (scale, scale)
    if not all(isinstance(side, (int, float)) for side in width_height):
        raise UserError(
            '--tta needs tta_pipeline, or a Resize in the test pipeline with a scale of numbers, '
            f'got {scale!r}'
        )
    sizes = [
        {**pipeline[resize], 'scale': tuple(round(factor * s) for s in width_height)}
        for factor in TTA_SCALES
    ]
    flips = [{'type': 'RandomFlip', 'prob': prob} for prob in (0.0, 1.0)]
    # The default `meta_keys` include what undoes the flip; those of a test pipeline may not.
    rest = [
        [{k: v for k, v in step.items() if k != 'meta_keys'}] for step in pipeline[resize + 1 :]
    ]
    return [*pipeline[:resize], {'type': 'TestTimeAug', 'transforms': [sizes, flips, *rest]}]


def main(argv: Optional[Sequence[str]] = None) -> int:
    return run_command(test, argv, 'the test is not finished')
