"""Checkpoints: one is always there, and the best one always at the end."""

from pathlib import Path

import pytest
import torch
from support import assert_same, clear_global_instances, load_tool
from tiny_mm import SMALL

from cpvt_pyramid.app.training.keeping import AtomicBackend, SafeCheckpointHook

train = load_tool('train')
EPOCHS = (
    'train_cfg.max_epochs={} train_dataloader.dataset.indices=4 val_dataloader.dataset.indices=2'
)
ITERATIONS = 'train_cfg.max_iters={} val_dataloader.dataset.indices=2'


@pytest.fixture
def small(configs: dict[str, Path]) -> dict[str, str]:
    """Tiny configs in the current folder."""
    for name, path in configs.items():
        Path(f'{name}.py').write_text(f'_base_ = [{str(path)!r}]\n{SMALL}')
    return {name: f'{name}.py' for name in configs}


def run(config: str, options: str, *more: str) -> list[str]:
    """The checkpoints that a training in `work` leaves."""
    clear_global_instances()
    assert train.main([config, '--work-dir', 'work', *more, '--cfg-options', *options.split()]) == 0
    return sorted(path.name for path in Path('work').glob('*.pth'))


@pytest.mark.parametrize(
    'name, options',
    [
        ('detector', EPOCHS.format(1)),
        ('detector', EPOCHS.format(1) + ' train_cfg.val_interval=5'),
        ('detector', EPOCHS.format(1) + ' train_cfg.val_begin=9'),
        ('detector', EPOCHS.format(1) + ' model.test_cfg.score_thr=0.99'),
        (
            'detector',
            EPOCHS.format(1) + ' model.test_cfg.score_thr=0.99 '
            'default_hooks.checkpoint.save_best=[coco/bbox_mAP,coco/bbox_mAP_50]',
        ),
        ('segmentor', ITERATIONS.format(2) + ' train_cfg.val_interval=50'),
        ('segmentor', ITERATIONS.format(2) + ' train_cfg.val_begin=50'),
    ],
)
def test_the_shortest_training_has_a_best_checkpoint(name, options, small):
    """Also a detector that finds nothing, for which mmdet computes no metric."""
    files = run(small[name], options)
    last = 'epoch_1.pth' if name == 'detector' else 'iter_2.pth'
    best = [file for file in files if file.startswith('best_')]
    assert len(best) >= 1 and {*files} == {last, *best}
    assert all(file.endswith(last) for file in best)
    found, expected = (
        torch.load(Path('work', file), weights_only=False) for file in (best[0], last)
    )
    assert 'optimizer' not in found
    assert_same(found['state_dict'], expected['state_dict'])


def test_an_evaluation_without_a_metric_says_why(small, capfd):
    """mmengine's own line says that saving the best checkpoint "will be skipped"."""
    run(small['detector'], EPOCHS.format(1) + ' model.test_cfg.score_thr=0.99')
    logged = ''.join(capfd.readouterr())
    assert 'a detector that finds nothing yet: it does not change the best checkpoint' in logged
    assert 'will be skipped' not in logged


def test_without_validation_none_is_best(small):
    none = ' val_cfg=None val_dataloader=None val_evaluator=None'
    assert run(small['detector'], EPOCHS.format(1) + none) == ['epoch_1.pth']


@pytest.mark.parametrize(
    'name, options',
    [('detector', EPOCHS.format(3)), ('segmentor', ITERATIONS.format(6) + ' {}.interval=2')],
)
def test_a_checkpoint_is_replaced_after_the_next_one_is_written(name, options, small, monkeypatch):
    """So that a kill in between loses nothing, also if one alone is kept."""
    there = []
    put = AtomicBackend.put

    def noted(self: AtomicBackend, obj: bytes, path: str) -> None:
        there.append({file.name.partition('_')[0] for file in Path('work').glob('*.pth')})
        put(self, obj, path)

    monkeypatch.setattr(AtomicBackend, 'put', noted)
    hook = 'default_hooks.checkpoint'
    options = f'{options.format(hook)} {hook}.max_keep_ckpts=1 train_cfg.val_interval=1'
    # Each evaluation is better than the one before.
    scores = iter(range(100))
    save_best = SafeCheckpointHook._save_best_checkpoint
    monkeypatch.setattr(
        SafeCheckpointHook,
        '_save_best_checkpoint',
        lambda self, runner, metrics: save_best(
            self, runner, {metric: next(scores) for metric in metrics}
        ),
    )
    files = run(small[name], options)
    kept = 'epoch' if name == 'detector' else 'iter'
    assert [file.partition('_')[0] for file in files] == ['best', kept]
    assert '_3.pth' in files[0] or '_6.pth' in files[0]
    for what in (kept, 'best'):
        first = next(index for index, names in enumerate(there) if what in names)
        assert all(what in names for names in there[first:])
        assert len(there) > first + 2
