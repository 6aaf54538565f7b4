"""python -m cpvt_pyramid, and its tools."""

import sys
from functools import partial

import pytest
from support import ROOT, run

import cpvt_pyramid
from cpvt_pyramid.__main__ import GROUPS, find_tools, first_sentence, group_of, main

cpvt = partial(run, sys.executable, '-m', 'cpvt_pyramid')


def test_the_list_is_one_line_for_each_tool(tmp_path):
    (tmp_path / 'torch.py').write_text('raise SystemExit("torch is imported")')
    ended = cpvt(PYTHONPATH=f'{tmp_path}:{ROOT}')
    assert (ended.returncode, ended.stderr) == (0, '')
    lines = [line.split(maxsplit=1) for line in ended.stdout.splitlines() if line[:2] == '  ']
    assert sorted(name for name, _ in lines) == list(find_tools())
    assert ended.stdout.index('\n\ndata:\n') < ended.stdout.index('\n\ndeployment:\n')
    assert {'train', 'infer', 'new-config', 'app', 'doctor'} <= find_tools().keys()
    assert ['train', 'Train a detector or a segmentor'] in lines
    assert max(map(len, ended.stdout.splitlines())) <= 100


def test_the_file_of_a_tool_names_its_group(tmp_path):
    """Its list needs no other file to be edited."""
    assert {group_of(path) for path in find_tools().values()} == {*GROUPS}
    (tmp_path / 'new.py').write_text('"""New."""\nname = 3\n')
    with pytest.raises(ValueError, match='new.py must set GROUP to one of data, training'):
        group_of(tmp_path / 'new.py')


def test_the_list_may_be_cut_off():
    ended = run('bash', '-c', f'{sys.executable} -u -m cpvt_pyramid help | head -1')
    assert (ended.stdout, ended.stderr) == ('usage: cpvt COMMAND ...\n', '')


@pytest.mark.parametrize('tool, path', find_tools().items())
def test_every_tool_starts(tool, path):
    ended = cpvt(tool, '--help')
    assert ended.returncode == 0, ended.stderr
    shown = ended.stdout.lower()
    assert shown.startswith('usage: ') and first_sentence(path)[:40].lower() in shown


def test_a_wrong_name_help_and_the_version(capsys):
    for name, advice in (('trian', 'use train'), ('predict', 'cpvt help lists the commands')):
        for given in ([name, 'x'], ['help', name]):
            assert main(given) == 2
            assert capsys.readouterr().err == f'cpvt: no command {name!r}; {advice}\n'
    for name in ('version', '--version'):
        assert main([name]) == 0
        assert capsys.readouterr().out == f'cpvt_pyramid {cpvt_pyramid.__version__}\n'
    lists = set()
    for given in ([], ['help'], ['--help'], ['-h']):
        assert main(given) == 0
        lists.add(capsys.readouterr().out)
    assert len(lists) == 1 and 'usage: cpvt COMMAND' in lists.pop()
    with pytest.raises(SystemExit, match='0'):
        main(['help', 'infer'])
    assert capsys.readouterr().out.startswith('usage: cpvt infer ')


def test_lines_begin_with_what_the_user_typed(monkeypatch, capfd, tmp_path):
    """Those of skipped files, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'torn.jpg').touch()
    model = str(ROOT / 'examples/trees.onnx')
    for inputs, status, line in (
        ('torn.jpg', 1, 'cpvt infer: skipped torn.jpg: the file is empty'),
        ('no.jpg', 2, 'cpvt infer: no image or folder at no.jpg'),
    ):
        assert main(['infer', model, inputs]) == status
        assert capfd.readouterr().err.splitlines() == [line]


def test_arguments_and_status_are_the_tools_own():
    ended = cpvt('models')
    assert ended.returncode == 0 and 'retinanet_pvt_t_coco' in ended.stdout
    ended = cpvt('new_config', 'nowhere')  # the file's name
    assert ended.returncode == 2
    assert ended.stderr.startswith('cpvt new-config: ') and ended.stderr.count('\n') == 1
