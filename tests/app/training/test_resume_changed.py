"""Trainings that resume with another config, or at another place of it, than their checkpoint."""

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EarlyStoppingHook
from mmengine.registry import METRICS
from support import assert_same, clear_global_instances, in_processes, load_tool
from tiny_mm import SMALL, contents

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.config.schedules import check_schedules, schedule_problems
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.app.training.resuming import (
    changed_settings,
    changes_scores,
    forget_scores,
    restore_early_stopping,
)

train = load_tool('train')

ONE_CYCLE = """
param_scheduler = [dict(
    type='OneCycleLR', eta_max=1e-3, pct_start=0.3, total_steps={epochs},
    by_epoch=True, convert_to_iter_based=True)]
"""
# 8 images, no evaluation.
DETECTOR = """
_base_ = ['{base}']
train_dataloader = dict(batch_size={batch})
train_cfg = dict(max_epochs={epochs})
val_cfg = val_dataloader = val_evaluator = None
default_hooks = dict(checkpoint=dict(max_keep_ckpts=9))
"""


def run(text: str, *options: str, folder: str = 'work') -> int:
    Path('mine.py').write_text(text + SMALL)
    status = train.main(['mine.py', '--work-dir', folder, *options])
    clear_global_instances()
    return status


def learning_rates(folder: str, last: int) -> list[float]:
    """In the last iterations."""
    (*_, log) = sorted(
        Path(folder).glob('*/vis_data/scalars.json'), key=lambda p: p.stat().st_mtime
    )
    return [float(lr) for lr in re.findall(r'"lr": ([^,]*),', log.read_text())][-last:]


@pytest.fixture
def detector(configs):
    def text(batch: int = 2, epochs: int = 4, more: str = '') -> str:
        values = {'base': configs['detector'], 'batch': batch, 'epochs': epochs}
        return (DETECTOR + more).format(**values)

    return text


@pytest.mark.parametrize('batch', [1, 4])
def test_another_batch_size_keeps_the_end_of_the_schedule(batch, detector, capsys):
    """Epochs of 4 iterations become epochs of 8 or 2: what is left of the schedule is what a
    training with that batch size has, down to its end."""
    assert run(detector(2, 3, ONE_CYCLE)) == 0
    shutil.copytree('work', 'other')  # whose last_checkpoint names a file elsewhere
    Path('other/epoch_3.pth').unlink()
    capsys.readouterr()
    assert run(detector(batch, 3, ONE_CYCLE), '--resume', folder='other') == 0
    said = capsys.readouterr().out
    assert f'train_dataloader.batch_size {batch} instead of 2' in said
    assert f'an epoch has {8 // batch} iterations now, and had 4' in said
    assert 'OneCycleLR.total_steps' in said
    assert run(detector(batch, 3, ONE_CYCLE), folder='whole') == 0
    assert learning_rates('other', 8 // batch) == learning_rates('whole', 8 // batch)
    found = torch.load('other/epoch_3.pth', weights_only=False)
    assert found['meta']['iter'] == 3 * 8 // batch
    whole = torch.load('whole/epoch_3.pth', weights_only=False)
    assert_same(found['param_schedulers'], whole['param_schedulers'])


def test_another_batch_size_within_an_epoch(detector, capsys):
    """Half of it is trained."""
    hook = "custom_hooks = [dict(type='Interruptions', moments=[('iteration', 6, 15)])]\n"
    assert run(detector(2, 3, hook)) == 75
    capsys.readouterr()
    assert run(detector(4, 3, hook), '--resume') == 0
    assert (
        'continues within epoch 2 after iteration 3, where the checkpoint says 6'
        in capsys.readouterr().out
    )
    assert torch.load('work/epoch_3.pth', weights_only=False)['meta']['iter'] == 6


def test_more_epochs(detector, capsys):
    """A cosine without an end of its own becomes longer; one with an end is told."""
    cosine = "param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=True)]\n"
    assert run(detector(4, 2, cosine)) == 0
    assert run(detector(4, 4, cosine), '--resume') == 0
    assert 'end 4 instead of 2' in capsys.readouterr().out
    whole = detector(4, 4, cosine)
    assert run(whole, folder='whole') == 0
    assert learning_rates('work', 4) == learning_rates('whole', 4)
    assert 'ends after' not in capsys.readouterr().out
    short = "param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=True, T_max=2, end=2)]\n"
    assert run(detector(4, 2, short), folder='short') == 0
    assert run(detector(4, 3, short), '--resume', folder='short') == 0
    assert 'CosineAnnealingLR ends after 2 of 3 epochs' in capsys.readouterr().out


ENDS_EARLY = 'PolyLR ends after 8 of 12 iterations, and the learning rate stays'


@pytest.mark.parametrize(
    'loop, schedules, problem',
    [
        (
            'max_epochs=4',
            [dict(type='CosineAnnealingLR', T_max=2)],
            'after 2 of 4 epochs, and the ',
        ),
        ('max_epochs=4', [dict(type='CosineAnnealingLR', T_max=4)], ''),
        ('max_epochs=4', [dict(type='CosineAnnealingLR')], ''),
        ('max_epochs=4', [dict(type='MultiStepLR', milestones=[1], end=3)], 'after 3 of 4 epochs'),
        ('max_epochs=4', [dict(type='MultiStepLR', milestones=[1])], ''),
        # a warm-up, after which the learning rate is constant
        ('max_epochs=4', [dict(type='LinearLR', by_epoch=False, end=5)], ''),
        ('max_epochs=4', dict(type='ReduceOnPlateauLR', monitor='loss'), ''),
        ('max_epochs=4', None, ''),
        ('max_iters=12', [dict(type='PolyLR', by_epoch=False, end=8)], ENDS_EARLY),
        ('max_iters=12', [dict(type='PolyLR', by_epoch=False, begin=2, end=12)], ''),
        (
            'max_iters=12',
            [dict(type='PolyLR', by_epoch=False, end=6), dict(type='StepLR', by_epoch=False)],
            '',
        ),
        ('max_iters=12', [dict(type='CosineAnnealingLR')], 'counts epochs, and the training iter'),
        # of 2 iterations in each epoch
        ('max_epochs=6', [dict(type='PolyLR', by_epoch=False, end=8)], ENDS_EARLY),
        ('max_epochs=4', [dict(type='PolyLR', by_epoch=False, end=8)], ''),
    ],
)
def test_schedules_that_end_early(loop, schedules, problem):
    key, _, value = loop.partition('=')
    cfg = Config({'train_cfg': {key: int(value)}, 'param_scheduler': schedules})
    problems = schedule_problems(cfg, epoch_length=2)
    assert len(problems) == bool(problem)
    assert problem in ''.join(problems)
    check_schedules(cfg)


@pytest.mark.parametrize('kind', ['CosineAnnealingLR', 'PolyLR'])
@pytest.mark.parametrize('lr, eta_min, is_odd', [(1e-4, 2e-4, True), (4e-3, 2e-4, False)])
def test_schedules_that_raise_the_learning_rate(kind, lr, eta_min, is_odd):
    """RTMDet's configs end at 2e-4, which is more than the learning rate of other recipes."""
    cfg = Config(
        dict(
            train_cfg=dict(max_epochs=4),
            optim_wrapper=dict(optimizer=dict(type='AdamW', lr=lr)),
            param_scheduler=[dict(type='LinearLR', end=1), dict(type=kind, eta_min=eta_min)],
        )
    )
    expected = f'{kind} raises the learning rate from 0.0001 to its eta_min of 0.0002: set eta_min'
    problems = schedule_problems(cfg)
    assert [problem.startswith(expected) for problem in problems] == [True] * is_odd
    cfg.param_scheduler[1].eta_min = None
    cfg.param_scheduler[1].eta_min_ratio = 0.05
    cfg.optim_wrapper.optimizer.pop('lr')
    assert schedule_problems(cfg) == []


def test_one_cycle_must_last_as_long_as_the_training():
    schedule = dict(type='OneCycleLR', total_steps=4, convert_to_iter_based=True)
    cfg = Config({'train_cfg': {'max_epochs': 5}, 'param_scheduler': [schedule]})
    with pytest.raises(UserError, match='must have total_steps=5, the epochs of the training, got'):
        check_schedules(cfg)
    cfg.train_cfg.max_epochs = 4
    check_schedules(cfg)


EMA = "dict(type='EMAHook', ema_type='ExpMomentumEMA', momentum=0.1)"


def test_without_the_ema_hook(detector, capsys):
    """The trained weights go on, which belong to the state of the optimizer."""
    stop = "dict(type='Interruptions', moments=[('iteration', 5, 0)])"
    assert run(detector(2, 2, f'custom_hooks = [{EMA}, {stop}]\n')) == 130
    assert run(detector(2, 2, f'custom_hooks = [{stop}]\n')) == 2  # it needs --resume
    shutil.copytree('work', 'with')
    assert run(detector(2, 2, f'custom_hooks = [{stop}]\n'), '--resume') == 0
    assert 'continues with the trained weights of the checkpoint' in capsys.readouterr().out
    assert run(detector(2, 2, f'custom_hooks = [{EMA}, {stop}]\n'), '--resume', folder='with') == 0
    ours = torch.load('work/epoch_2.pth', weights_only=False)
    averaged = torch.load('with/epoch_2.pth', weights_only=False)['ema_state_dict']
    assert 'ema_state_dict' not in ours
    for name, value in ours['state_dict'].items():
        assert torch.equal(value, averaged[f'module.{name}']), name


def test_with_a_new_ema_hook(detector, capsys):
    assert run(detector(2, 1)) == 0
    assert run(detector(2, 2, f'custom_hooks = [{EMA}]\n'), '--resume') == 0
    assert 'custom_hooks.0.type' in capsys.readouterr().out
    assert 'ema_state_dict' in torch.load('work/epoch_2.pth', weights_only=False)


SEGMENTOR = """
_base_ = ['{base}']
val_dataloader = dict(dataset=dict(indices=1))
"""
EARLY = """
train_cfg = dict(max_iters=30, val_interval=2)
optim_wrapper = dict(optimizer=dict(lr=0.0, weight_decay=0.0))
param_scheduler = [dict(type='PolyLR', power=0.9, by_epoch=False, end=30)]
custom_hooks = [
    dict(type='EarlyStoppingHook', monitor='mIoU', patience=3, min_delta=50),
    dict(type='Interruptions', moments=[('evaluation', 4, 15), ('iteration', 7, 0)])]
"""


def test_early_stopping_goes_on_counting(configs):
    """Stopped in the second evaluation, and killed: it stops where it would have, also when it is
    resumed after that."""
    text = SEGMENTOR.format(base=configs['segmentor']) + EARLY
    statuses = [run(text, '--resume') for _ in range(3)]
    assert statuses == [75, 130, 0]
    last = [int(path.stem.split('_')[-1]) for path in Path('work').glob('*_*.pth')]
    assert max(last) <= 8
    before = sorted(Path('work').glob('*.pth'))
    assert run(text, '--resume') == 0
    assert sorted(Path('work').glob('*.pth')) == before


SUMS = """
train_cfg = dict(max_iters=9, val_interval=3)
optim_wrapper = dict(accumulative_counts=4)
custom_hooks = [dict(type='Interruptions', moments={moments})]
"""


def test_sums_of_gradients_go_on(configs):
    """Stopped within a sum, and killed after a checkpoint within the next one."""
    text = SEGMENTOR.format(base=configs['segmentor']) + SUMS
    assert run(text.format(moments=[]), folder='whole') == 0
    text = text.format(moments=[('iteration', 2, 15), ('iteration', 6, 0)])
    assert [run(text, '--resume') for _ in range(3)] == [75, 130, 0]
    assert_same(contents(Path('work/iter_9.pth')), contents(Path('whole/iter_9.pth')))


def test_two_processes_stop_at_an_update(configs):
    """Each has a sum of its own, and one is written."""
    text = SEGMENTOR.format(base=configs['segmentor']) + SUMS + SMALL
    Path('sums.py').write_text(text.format(moments=[('iteration', 2, 15)]))
    load_config('sums.py')  # imports mm once, and not in each process

    def work(rank: int) -> int:
        return train.main(['sums.py', '--work-dir', 'work', '--launcher', 'pytorch'])

    assert [status for status, _ in in_processes(2, work)] == [75, 75]
    assert torch.load('work/preempted.pth', weights_only=False)['meta']['iter'] == 4


def test_the_saved_config_is_the_own_one(detector, capsys):
    """It starts another training, elsewhere."""
    assert run(detector(4, 1)) == 0
    assert run(detector(4, 2), '--resume') == 0
    saved = Config.fromfile('work/mine.py', import_custom_modules=False)
    assert not saved.resume and saved.load_from is None
    assert saved.train_cfg.max_epochs == 2
    assert train.main(['work/mine.py', '--work-dir', 'again']) == 0


def test_configs_in_the_work_dir_are_not_replaced(detector, capsys):
    """Neither the config itself, nor that of a run before with other options."""
    text = detector(4, 1)
    assert run(text, folder='.') == 0
    assert Path('mine.py').read_text() == text + SMALL
    assert 'mine.py stays as it is' in capsys.readouterr().out
    Path('other').mkdir()
    Path('other/mine.py').write_text('edited by hand')
    assert run(text, folder='other') == 0
    assert Path('other/former_mine.py').read_text() == 'edited by hand'
    assert run(text, '--resume', folder='other') == 0
    assert not Path('other/former_former_mine.py').exists()


def test_another_seed_is_told(detector, capsys):
    assert run(detector(4, 1)) == 0
    assert run(detector(4, 2), '--resume', '--cfg-options', 'randomness.seed=5') == 0
    assert 'the seed is that of the checkpoint, 3, and not 5' in capsys.readouterr().out


def test_a_checkpoint_of_an_older_hook_within_an_epoch(detector, capsys):
    """Its epoch is to be repeated, but its schedules are further."""
    assert run(detector(2, 2, ONE_CYCLE)) == 0
    checkpoint = torch.load('work/epoch_2.pth', weights_only=False)
    del checkpoint['cpvt_pyramid']
    checkpoint['meta'] |= {'epoch': 1, 'iter': 4}
    torch.save(checkpoint, 'older.pth')
    assert run(detector(2, 2, ONE_CYCLE), '--resume=older.pth', folder='other') == 0
    assert 'OneCycleLR at 4 instead of 8' in capsys.readouterr().out
    assert learning_rates('other', 4) == learning_rates('work', 4)


def test_another_number_of_processes(configs, capfd):
    """Two of them take 4 iterations for an epoch, and one takes 8."""
    text = DETECTOR.format(base=configs['detector'], batch=1, epochs=2)
    text += ONE_CYCLE.format(epochs=2)
    text += "custom_hooks = [dict(type='Interruptions', moments=[('iteration', 4, 15)])]\n"
    Path('mine.py').write_text(text + SMALL)
    load_config('mine.py')  # imports mm once, and not in each process

    def work(rank: int) -> int:
        return train.main(['mine.py', '--work-dir', 'work', '--launcher', 'pytorch'])

    assert [status for status, _ in in_processes(2, work)] == [75, 75]
    assert train.main(['mine.py', '--work-dir', 'work', '--resume']) == 0
    said = capfd.readouterr().out
    assert '1 process instead of 2' in said
    assert 'an epoch has 8 iterations now, and had 4' in said
    assert torch.load('work/epoch_2.pth', weights_only=False)['meta']['iter'] == 16
    assert learning_rates('work', 1)[0] == pytest.approx(4e-9)


def test_check_data_tells_of_a_schedule_that_ends_early(detector, capsys):
    cosine = "param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=True, T_max=2)]\n"
    Path('mine.py').write_text(detector(2, 4, cosine))
    assert load_tool('check_data').main(['mine.py', '--splits', 'train']) == 0
    assert 'CosineAnnealingLR ends after 2 of 4 epochs, and the learning' in capsys.readouterr().out


IMPROVES = """
val_evaluator = [dict(type='Improving')]
default_hooks = dict(checkpoint=dict(save_best='score', rule='greater'))
train_cfg = dict(max_iters={iterations}, val_interval=2)
"""


@METRICS.register_module()
class Improving(BaseMetric):
    """Is better in each evaluation, with few images more so; `share` is less than `score`."""

    evaluations = 0

    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        Improving.evaluations += 1
        score = Improving.evaluations / len(results) ** 9
        return {'score': score, 'share': score / 1e9}


@pytest.mark.parametrize('how', ['a copy', 'a checkpoint'])
def test_the_best_checkpoint_of_another_work_dir_stays(how, configs):
    """mmengine deletes the previous one at its path, when there is a better one."""
    text = SEGMENTOR.format(base=configs['segmentor']) + IMPROVES
    assert run(text.format(iterations=2)) == 0
    resume = '--resume=work/iter_2.pth'
    if how == 'a copy':
        shutil.copytree('work', 'other')
        resume = '--resume'
    assert run(text.format(iterations=4), resume, folder='other') == 0
    assert Path('work/best_score_iter_2.pth').exists()
    best = [path.name for path in Path('other').glob('best_*.pth')]
    assert best == ['best_score_iter_4.pth']


@pytest.mark.parametrize(
    ('change', 'best'),
    [
        ('default_hooks.checkpoint.save_best=share', 'best_share_iter_4.pth'),
        ('default_hooks.checkpoint.rule=less', 'best_score_iter_2.pth'),
        ('val_dataloader.dataset.indices=4', 'best_score_iter_4.pth'),
        ('val_dataloader.num_workers=1', 'best_score_iter_4.pth'),
    ],
)
def test_the_best_checkpoint_by_another_score_is_chosen_again(change, best, configs, capsys):
    """Scores by which it was chosen before are no limit, and its file stays."""
    text = SEGMENTOR.format(base=configs['segmentor']) + IMPROVES
    assert run(text.format(iterations=2)) == 0
    capsys.readouterr()
    assert run(text.format(iterations=4), '--resume', '--cfg-options', change) == 0
    said = capsys.readouterr().out
    assert Path('work', best).exists()
    is_same_score = change.startswith('val_dataloader.num_workers')
    assert Path('work/former_best_score_iter_2.pth').exists() != is_same_score
    assert ('because best_score_iter_2.pth was by another score' in said) != is_same_score


@pytest.mark.parametrize(
    ('path', 'value', 'is_score'),
    [
        ('compile', {'dynamic': False}, False),
        ('custom_imports.imports', [], False),
        ('find_unused_parameters', True, False),
        ('model_wrapper_cfg', {'type': 'MMFullyShardedDataParallel'}, False),
        ('randomness.deterministic', True, False),
        ('sync_bn', 'mmcv', False),
        ('train_dataloader.batch_size', 7, False),
        ('val_cfg.fp16', True, True),
        ('val_dataloader.dataset.data_prefix.img_path', 'elsewhere', True),
        ('val_evaluator.iou_metrics', ['mDice'], True),
        ('model.test_cfg.mode', 'slide', True),
        ('of_my_hook', 3, False),
    ],
)
def test_all_settings_are_compared(path, value, is_score, configs):
    before = Config.fromfile(configs['segmentor'], import_custom_modules=False)
    changed = Config.fromfile(configs['segmentor'], import_custom_modules=False)
    changed.merge_from_dict({path: value})
    checkpoint = {'meta': {'cfg': before.pretty_text}}
    assert changed_settings(before, checkpoint, 'x.pth') == {}
    found = changed_settings(changed, checkpoint, 'x.pth')
    assert found and all(key.startswith(path) for key in found)
    assert any(map(changes_scores, found)) == is_score


@pytest.mark.parametrize(
    ('hook', 'is_same_score', 'is_restored'),
    [
        (dict(monitor='mIoU'), True, True),
        (dict(monitor='mIoU'), False, False),
        (dict(monitor='mIoU', rule='less'), True, False),
        (dict(monitor='aAcc'), True, False),
    ],
)
def test_early_stopping_by_another_score_begins_to_count(hook, is_same_score, is_restored):
    hook = EarlyStoppingHook(**hook)
    states = {'mIoU': {'rule': 'greater', 'wait_count': 3, 'best_score': 70.0}}
    said: list[str] = []
    runner = SimpleNamespace(hooks=[hook])
    restore_early_stopping(runner, states, is_same_score, said.append)
    assert (hook.wait_count == 3) == (hook.best_score == 70) == is_restored
    assert bool(said) != is_restored


def test_scores_of_other_data_are_forgotten():
    """Also by a schedule that waits for a better one."""
    hub = {'evaluated_iter': 4, 'iter': 4}
    plateau = {'best': 70.0, 'rule_worse': -math.inf, 'num_bad_epochs': 2}
    checkpoint = {
        'message_hub': {'runtime_info': hub},
        'param_schedulers': [plateau, {'last_step': 4}],
    }
    forget_scores(checkpoint)
    assert hub == {'iter': 4} and plateau['best'] == -math.inf and not plateau['num_bad_epochs']


def test_what_a_resumed_training_may_change_without_a_word(configs):
    """And a variable, whose change is said where it is used."""
    before = Config.fromfile(configs['segmentor'], import_custom_modules=False)
    changed = Config.fromfile(configs['segmentor'], import_custom_modules=False)
    changed.merge_from_dict(
        {
            'work_dir': 'elsewhere',
            'test_dataloader.batch_size': 9,
            'randomness.seed': 9,
            'of_two': {'scale': (3, 4)},
            'train_dataloader.dataset.pipeline.2.scale': (3, 4),
        }
    )
    found = changed_settings(changed, {'meta': {'cfg': before.pretty_text}}, 'x.pth')
    assert [*found] == ['train_dataloader.dataset.pipeline.2.scale', 'of_two.scale']


def test_checkpoints_in_a_folder_of_their_own(detector, capsys):
    own = "default_hooks['checkpoint']['out_dir'] = 'checkpoints'\n"
    assert run(detector(4, 1, own)) == 0
    assert Path('checkpoints/work/epoch_1.pth').exists()
    assert run(detector(4, 2, own)) == 2  # it needs --resume
    assert 'checkpoints/work already has checkpoints' in capsys.readouterr().err
    assert run(detector(4, 2, own), '--resume') == 0
    assert re.findall(r'Epoch\(train\) \[(\d)\]', capsys.readouterr().out) == ['2', '2']
    assert Path('checkpoints/work/epoch_2.pth').exists()


@pytest.mark.parametrize(
    'old, new, said',
    [
        ('cpvt_pyramid.app', 'a_module_of_before', 'optim_wrapper.optimizer'),
        ('lr=0.001', 'lr=inf', 'are not compared with those before: '),
    ],
)
def test_a_checkpoint_whose_config_names_other_modules_or_is_not_readable(
    old, new, said, detector, capsys
):
    assert run(detector(4, 1)) == 0
    checkpoint = torch.load('work/epoch_1.pth', weights_only=False)
    text = checkpoint['meta']['cfg']
    assert old in text
    checkpoint['meta']['cfg'] = text.replace(old, new)
    torch.save(checkpoint, 'work/epoch_1.pth')
    changed = '--cfg-options', 'optim_wrapper.optimizer.lr=0.002'
    is_compared = said == 'optim_wrapper.optimizer'
    assert run(detector(4, 2), '--resume', *changed) == (2 if is_compared else 0)
    assert said in ''.join(capsys.readouterr())


def test_epochs_with_fewer_batches_than_their_sampler_says(detector, capsys):
    """As those of AspectRatioBatchSampler with `drop_last`, of 1 batch instead of 2."""
    short = (
        "train_dataloader['batch_sampler'] = dict(\n"
        "    _delete_=True, type='AspectRatioBatchSampler', drop_last=True)\n"
    )
    assert run(detector(4, 3, short), folder='whole') == 0
    assert run(detector(4, 3, short), '--resume=whole/epoch_1.pth', folder='other') == 0
    said = capsys.readouterr().out
    assert 'continuing' not in said and 'the schedules differ' not in said
    whole, other = (contents(Path(folder, 'epoch_3.pth')) for folder in ('whole', 'other'))
    assert_same(other, whole)
