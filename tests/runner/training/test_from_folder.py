"""train.py with a folder of data instead of a config."""

from pathlib import Path

import pytest
from support import ROOT, in_processes, load_tool

from cpvt_pyramid.runner.training import from_folder

train = load_tool('train')
DEMO = str(ROOT / 'configs/demo/pages_retinanet_cpvt_nano.py')


def test_two_processes_write_one_config_and_train(sample_dataset):
    """From a folder whose name has a space, quotes, and letters that are not ASCII."""
    Path("mes données d'été").symlink_to(sample_dataset / 'coco')
    command = ["mes données d'été", '--base', DEMO, '--launcher', 'pytorch', '--cfg-options']
    short = 'train_cfg.max_epochs=1', 'train_dataloader.dataset.indices=4', 'val_cfg=None'
    no_validation = 'val_dataloader=None', 'val_evaluator=None'
    workers = 'train_dataloader.num_workers=0', 'train_dataloader.persistent_workers=False'
    options = [*short, *no_validation, *workers]
    ended = in_processes(2, lambda _: train.main([*command, *options]))
    assert [status for status, _ in ended] == [0, 0], ended
    assert Path('work_dirs/mes données d_été/epoch_1.pth').is_file()
    assert [path.name for path in Path('work_dirs').glob('*.py')] == ['mes données d_été.py']


@pytest.mark.parametrize(
    'data, base',
    [
        ('coco', 'retinanet_cpvt_s.py'),
        ('ade', 'semantic_fpn_cpvt_s.py'),
    ],
)
def test_the_base_is_for_the_kind_of_data(data, base, sample_dataset, capsys):
    out = from_folder.config_of_data(sample_dataset / data, None, 'new/work')
    assert out == 'new/work.py'
    text = Path(out).read_text()
    assert f'configs/{base}' in text
    *_, wrote, chosen = capsys.readouterr().out.splitlines()
    assert (
        wrote.startswith('wrote new/work.py')
        and chosen == f'the base is {base}; --base takes another'
    )
    # A resumed training goes on with it; another one needs another place.
    Path(out).write_text('mine')
    assert from_folder.config_of_data(sample_dataset / data, None, 'new/work', resume=True) == out
    with pytest.raises(from_folder.UserError, match='new/work.py exists; continue its training'):
        from_folder.config_of_data(sample_dataset / data, None, 'new/work')
    assert Path(out).read_text() == 'mine'


@pytest.mark.parametrize(
    'arguments, complaint',
    [
        (['empty'], 'empty is empty'),
        (['empty', '--base', 'nowhere.py'], 'no config at nowhere.py'),
        ([DEMO, '--base', DEMO], '--base and --assign are for a folder with data, got the file '),
        (
            ['empty', '--launcher', 'pytorch'],
            '--launcher pytorch is for processes started by pytorch',
        ),
    ],
)
def test_mistakes(arguments, complaint, monkeypatch, capsys):
    monkeypatch.delenv('RANK', raising=False)
    Path('empty').mkdir()
    assert train.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'cpvt train: {complaint}')


def test_the_name_of_a_folder_becomes_that_of_a_config(sample_dataset):
    folder = Path("it's {v1.2} é")
    folder.mkdir()
    for part in (sample_dataset / 'coco').iterdir():
        (folder / part.name).symlink_to(part)
    out = from_folder.config_of_data(folder, DEMO, None)
    assert out == 'work_dirs/it_s _v1.2_ é.py' and Path(out).is_file()
