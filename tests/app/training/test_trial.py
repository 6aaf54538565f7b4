"""The trial before the first iteration: it finds mistakes in time, and changes no training."""

import errno
import os
import re
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from mmdet.evaluation.metrics.coco_metric import COCOeval
from mmengine.evaluator import BaseMetric
from mmengine.registry import LOOPS, METRICS
from mmengine.runner import ValLoop
from mmengine.structures import InstanceData
from support import assert_same, clear_global_instances, in_processes, load_tool
from tiny_mm import SMALL, contents

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.training import trial

train = load_tool('train')

SHORT = """
_base_ = ['{base}']
train_dataloader = dict(num_workers={workers}, persistent_workers=bool({workers}))
val_dataloader = dict(dataset=dict(indices=3))
"""
UNSEEDED = "default_hooks = dict(seed=dict(_delete_=True, type='DistSamplerSeedHook'))\n"
BY_EPOCHS = f'train_cfg = dict(max_epochs=2, val_interval=1)\n{UNSEEDED}'
BY_ITERATIONS = f'train_cfg = dict(max_iters=6, val_interval=3)\n{UNSEEDED}'
DONE = r'trial before the first iteration: one batch evaluated, a checkpoint written, in [\d.]+ s'


def run(base: Path, text: str, *options: str, workers: int = 0, folder: str = 'work') -> int:
    Path('mine.py').write_text(SHORT.format(base=base, workers=workers) + text + SMALL)
    status = train.main(['mine.py', '--work-dir', folder, *options])
    clear_global_instances()
    return status


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize(
    'name, text, last',
    [('detector', BY_EPOCHS, 'epoch_2.pth'), ('segmentor', BY_ITERATIONS, 'iter_6.pth')],
)
def test_a_training_is_the_same_without_it(name, text, last, workers, configs, capsys):
    """Bit by bit, also where nothing seeds the random numbers of each iteration."""
    text += "custom_hooks = [dict(type='EMAHook', momentum=0.1)]\n"
    assert run(configs[name], text, workers=workers) == 0
    assert len(re.findall(DONE, capsys.readouterr().out)) == 1
    without = '--cfg-options', 'trial=False'
    assert run(configs[name], text, *without, workers=workers, folder='without') == 0
    assert not re.findall(DONE, capsys.readouterr().out)
    assert_same(contents(Path('work', last)), contents(Path('without', last)))
    for folder in ('work', 'without'):
        assert not Path(folder, trial.CHECKPOINT).exists()


def test_two_processes(configs):
    """Each of them evaluates, and they compare nothing that differs."""
    load_config(configs['detector'])  # imports mm once, and not in each process

    def both(folder: str, *options: str) -> None:
        Path('mine.py').write_text(SHORT.format(base=configs['detector'], workers=0) + BY_EPOCHS)

        def work(rank: int) -> int:
            command = ['mine.py', '--work-dir', folder, '--launcher', 'pytorch']
            return train.main([*command, *options])

        assert [status for status, _ in in_processes(2, work)] == [0, 0]

    both('work')
    both('without', '--cfg-options', 'trial=False')
    assert_same(contents(Path('work/epoch_2.pth')), contents(Path('without/epoch_2.pth')))
    (log,) = Path('work').glob('*/*.log')
    assert len(re.findall(DONE, log.read_text())) == 1


def test_a_training_that_resumes_repeats_it(configs, capsys):
    text = (
        'train_cfg = dict(max_epochs=2, val_interval=1)\n'
        "custom_hooks = [dict(type='Interruptions', moments=[('iteration', 3, 15)])]\n"
    )
    assert run(configs['detector'], text) == 75
    assert run(configs['detector'], text, '--resume') == 0
    assert len(re.findall(DONE, capsys.readouterr().out)) == 2
    assert run(configs['detector'], text, folder='whole') == 0
    assert_same(contents(Path('work/epoch_2.pth')), contents(Path('whole/epoch_2.pth')))


def assert_stopped_before_the_first_iteration(line: str, complaint: str) -> None:
    assert line.startswith('cpvt train: ') and complaint in line, line
    assert not [*Path('work').rglob('scalars.json')]
    assert not [*Path('work').rglob('*.pth')]
    assert not Path('work', trial.CHECKPOINT).exists()


AUTO = 'SafeCheckpointHook must be a metric that the evaluation computes, got '
FINDS_NOTHING = 'model.test_cfg.score_thr=0.99'


@pytest.mark.parametrize(
    'name, options, complaint',
    [
        (
            'detector',
            f'default_hooks.checkpoint.save_best=mIoU {FINDS_NOTHING}',
            f"save_best of {AUTO}'mIoU'; it computes coco/bbox_mAP, coco/bbox_mAP_50, ",
        ),
        (
            'segmentor',
            'val_evaluator.iou_metrics=[mDice] default_hooks.checkpoint.save_best=mIoU',
            f"save_best of {AUTO}'mIoU'; it computes aAcc, mDice, mAcc",
        ),
        (
            'detector',
            'val_evaluator.type=VOCMetric val_evaluator.metric=recall',
            "save_best='auto' of SafeCheckpointHook takes pascal_voc/recall@100@0.5; set its rule",
        ),
        (
            'detector',
            'custom_hooks.0.monitor=mAP',
            'monitor of EarlyStoppingHook must be a metric that the evaluation computes, got',
        ),
        (
            'detector',
            'param_scheduler.0.monitor=loss',
            "monitor of ReduceOnPlateauLR must be a metric that the evaluation computes, got 'loss",
        ),
        # What no list of names predicts
        ('detector', 'val_evaluator.metric=segm', "'segm is not in results'"),
        ('detector', 'val_evaluator.classes=3', "unexpected keyword argument 'classes'"),
        ('detector', 'default_hooks.checkpoint.out_dir=/proc/x', "'/proc/x"),
        ('segmentor', 'val_evaluator.iou_metrics=[mIuo]', 'mIuo'),
        ('segmentor', 'val_dataloader.dataset.pipeline.1.scale=(96,-96)', 'error: '),
    ],
)
def test_mistakes_end_before_the_first_iteration(name, options, complaint, configs, capsys):
    more = {
        'custom_hooks.0': "custom_hooks = [dict(type='EarlyStoppingHook', monitor='x')]\n",
        'param_scheduler.0': ("param_scheduler = [dict(type='ReduceOnPlateauLR', monitor='x')]\n"),
        'val_evaluator.type': 'val_evaluator = dict(_delete_=True)\n',
    }
    text = next((more[start] for start in more if options.startswith(start)), '')
    if 'VOCMetric' in options:
        options += ' val_dataloader.dataset.metainfo.dataset_type=VOC2007'
    assert run(configs[name], text, '--cfg-options', *shlex.split(options)) == 2
    assert_stopped_before_the_first_iteration(capsys.readouterr().err.splitlines()[-1], complaint)


def test_what_an_evaluation_computes_may_be_monitored(configs):
    """By a detector that finds nothing yet, which has no metric in the training itself."""
    text = (
        "default_hooks = dict(checkpoint=dict(save_best='coco/bbox_mAP_50'))\n"
        "custom_hooks = [dict(type='EarlyStoppingHook', monitor='coco/bbox_mAP', strict=False)]\n"
    )
    options = '--cfg-options', FINDS_NOTHING, 'train_cfg.max_epochs=1'
    assert run(configs['detector'], text, *options) == 0


def test_it_compares_only_the_images_that_it_evaluates(configs, monkeypatch):
    """Of 5000 images it would take as long as an evaluation."""
    compared = []

    def evaluate(self: COCOeval) -> None:
        compared.append(len(self.params.imgIds))
        evaluate_all(self)

    evaluate_all = COCOeval.evaluate
    monkeypatch.setattr(COCOeval, 'evaluate', evaluate)
    text = 'train_cfg = dict(max_epochs=1, val_interval=1)\n'
    assert run(configs['detector'], text) == 0
    assert compared[0] == 1 < compared[1]


def test_without_a_validation(configs, capsys):
    text = 'val_cfg = val_dataloader = val_evaluator = None\n'
    Path('mine.py').write_text(f"_base_ = ['{configs['detector']}']\n{text}{SMALL}")
    command = ['mine.py', '--work-dir', 'work', '--cfg-options', 'train_cfg.max_epochs=1']
    assert train.main(command) == 0
    clear_global_instances()
    said = capsys.readouterr().out
    assert 'trial before the first iteration: a checkpoint written, in ' in said


@LOOPS.register_module()
class TeacherLoop(ValLoop):
    """Changes the names of metrics, as SoftTeacher's does."""

    def run(self) -> Any:
        self.runner.model.eval()
        for index, batch in enumerate(self.dataloader):
            self.run_iter(index, batch)
        found = self.evaluator.evaluate(len(self.dataloader.dataset))
        metrics = {f'teacher/{name}': value for name, value in found.items()}
        self.runner.call_hook('after_val_epoch', metrics=metrics)
        return metrics


def test_a_loop_that_changes_the_names(configs, capsys):
    options = '--cfg-options', 'val_cfg.type=TeacherLoop', 'train_cfg.max_iters=3'
    best = 'default_hooks.checkpoint.save_best=teacher/mIoU'
    assert run(configs['segmentor'], BY_ITERATIONS, *options, best) == 0
    assert Path('work/best_teacher_mIoU_iter_3.pth').exists()
    assert run(configs['segmentor'], BY_ITERATIONS, *options, folder='other') == 2
    assert "got 'mIoU'; it computes teacher/aAcc, " in capsys.readouterr().err


@METRICS.register_module()
class NeedsAll(BaseMetric):
    """Fails with fewer images than the data have."""

    def process(self, data_batch, data_samples):
        self.results.extend(1 for _ in data_samples)

    def compute_metrics(self, results):
        if len(results) < 3:
            raise ValueError(f'only {len(results)} of 3 images have results')
        return {'mIoU': 1.0}


def test_a_metric_that_needs_all_images(configs, capsys):
    """It is trained without the trial, as the log says."""
    text = BY_ITERATIONS + "val_evaluator = dict(_delete_=True, type='NeedsAll')\n"
    assert run(configs['segmentor'], text) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith('cpvt train: ValueError: only 1 of 3 images')
    assert 'more than one batch: --cfg-options trial=False' in said.out + said.err
    assert run(configs['segmentor'], text, '--cfg-options', 'trial=False', folder='other') == 0


# Options that create a setting


@pytest.mark.parametrize(
    'name, option, note, complaint',
    [
        ('detector', 'train_cfg.max_epoch', 'train_cfg.max_epoch (did you mean max_epochs?)', 'an'),
        ('segmentor', 'train_cfg.max_iter', 'train_cfg.max_iter (did you mean max_iters?)', 'an'),
        ('detector', 'val_cfg.fp_16', 'val_cfg.fp_16', 'an'),
        ('detector', 'optim_wrapper.clip_grads.max_norm', 'optim_wrapper.clip_grads', 'an'),
        ('detector', 'optim_wrapper.optimizer.rate', 'optim_wrapper.optimizer.rate', 'an'),
        ('detector', 'default_hooks.logger.steps', 'default_hooks.logger.steps', 'an'),
        ('detector', 'train_dataloader.sampler.size', 'train_dataloader.sampler.size', 'an'),
        (
            'detector',
            'train_dataloader.batchsize',
            'train_dataloader.batchsize (did you mean batch_size?)',
            'an',
        ),
        (
            'detector',
            'train_dataloader.dataset.pipeline.2.scal',
            'train_dataloader.dataset.pipeline.2.scal (did you mean scale?)',
            'an',
        ),
        ('detector', 'visualizer.line_widths', 'visualizer.line_widths', 'an'),
        ('detector', 'log_processor.windowsize', 'did you mean window_size?', 'an'),
        ('detector', 'randomness.sed', 'randomness.sed (did you mean seed?)', 'an'),
        ('detector', 'compile.modes', '', 'modes'),
        ('detector', 'param_scheduler.0.last', 'param_scheduler.0.last', 'an'),
        ('detector', 'model.bbox_head.stacks', 'model.bbox_head.stacks', 'an'),
        # What mmengine does not read
        ('detector', 'auto_scale_lr.enabled', 'auto_scale_lr.enabled (did you mean enable?)', None),
        ('detector', 'env_cfg.cudnn_benchmarks', 'did you mean cudnn_benchmark?', None),
        ('detector', 'model.test_cfg.score_th', 'did you mean score_thr?', None),
    ],
)
def test_an_option_that_creates_a_setting(name, option, note, complaint, configs, capsys):
    options = '--cfg-options', f'{option}=1', *['train_cfg.max_epochs=1'] * (name == 'detector')
    text = 'log_processor = dict(window_size=2)\ncustom_hooks = []\n'
    status = run(configs[name], text, *options)
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith('cpvt train: ')]
    assert bool(note) == lines[0].startswith('cpvt train: --cfg-options creates what the config')
    assert note in lines[0]
    if complaint is None:
        assert status == 0
        return
    assert status == 2
    wrong = option.removeprefix('optim_wrapper.clip_grads.') if complaint == 'an' else complaint
    named = wrong.split('.')[-1] if 'clip_grads' not in option else 'clip_grads'
    assert named in lines[-1]
    assert not [*Path('work').rglob('scalars.json')]


@pytest.mark.filterwarnings('error:--cfg-options')
@pytest.mark.parametrize(
    'option',
    ['train_cfg.val_interval=2', 'load_from=x.pth', 'trial=False', 'default_hooks.logger=None'],
)
def test_options_without_a_note(option, configs):
    load_config(configs['detector'], [option])


def test_the_object_of_zeros_is_given_to_empty_samples_alone():
    empty = InstanceData(
        bboxes=torch.zeros(0, 4),
        labels=torch.zeros(0, dtype=torch.long),
        masks=torch.zeros(0, 5, 7),
    )
    full = InstanceData(bboxes=torch.ones(2, 4))
    text = InstanceData(names=[])
    samples = [SimpleNamespace(pred_instances=found) for found in (empty, full, text)]
    trial.give_objects([*samples, SimpleNamespace(pred_sem_seg=1)])
    one, two, none = (sample.pred_instances for sample in samples)
    assert one.bboxes.shape == (1, 4) and one.labels.dtype == torch.long
    assert one.masks.shape == (1, 5, 7)
    assert two is full and none is text


@pytest.mark.parametrize('how', ['killed', 'full disk'])
def test_a_trial_that_is_broken_off(how, configs, capsys):
    """A training begins there again, and nothing of the trial stays."""
    write_bytes = Path.write_bytes

    def fail(self: Path, content: bytes) -> int:
        if 'trial' not in self.name:
            return write_bytes(self, content)
        if how == 'full disk':
            raise OSError(errno.ENOSPC, 'No space left on device')
        write_bytes(self, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    text = 'train_cfg = dict(max_epochs=1)\n'
    with mock.patch.object(Path, 'write_bytes', fail):
        if how == 'killed':
            load_config(configs['detector'])  # imports mm once
            ((status, _),) = in_processes(1, lambda _: run(configs['detector'], text))
            assert status == -signal.SIGKILL
        else:
            assert run(configs['detector'], text) == 2
            assert 'cpvt train: no space left on the disk' in capsys.readouterr().err
    assert not [*Path('work').rglob('*.pth')]
    assert run(configs['detector'], text) == 0
    assert not [path for path in Path('work').rglob('*') if 'trial' in path.name]
