"""Which operators mmcv finds, where."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from cpvt_pyramid import mmcv_operators
from cpvt_pyramid.app import doctor
from cpvt_pyramid.mmcv_operators import ext

CALL = r'ext_module\.(\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)'  # with parentheses inside
PROVIDE = 'from cpvt_pyramid.mmcv_operators import provide; provide()\n'
ASK = 'import importlib.util as u; s = u.find_spec("mmcv._ext"); print(s and s.origin)'


@pytest.fixture
def mmcv(tmp_path, monkeypatch):
    """The folder of an mmcv without operators, for this process and others."""
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv/__init__.py').touch()
    monkeypatch.setenv('PYTHONPATH', f'{tmp_path}:{ROOT}')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition('.')[0] == 'mmcv']:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / 'mmcv'


def python(program: str) -> str:
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.splitlines()[-1]


OURS = str(ROOT / 'cpvt_pyramid/mmcv_operators/ext.py')


def test_ours_only_where_mmcv_has_none(mmcv):
    assert python(ASK) == 'None'
    for program in (PROVIDE, PROVIDE + 'import mmcv\n', 'import cpvt_pyramid.app\n'):
        assert python(program + ASK) == OURS
    (mmcv / '_ext.py').write_text('def nms(): pass')
    assert python(PROVIDE + ASK) == str(mmcv / '_ext.py')


def test_importing_the_application_imports_no_torch():
    program = 'import sys, cpvt_pyramid.app; print({"torch", "mmcv"} & {*sys.modules})'
    assert python(program) == 'set()'


def test_a_file_gives_them_to_all_programs(mmcv, capsys):
    assert doctor.main(['--link-operators']) == 0
    assert 'all programs of this environment' in capsys.readouterr().out
    program = 'import mmcv._ext as e; print(e.nms.__module__, e.knn_forward.__name__)'
    assert python(program) == 'cpvt_pyramid.mmcv_operators.boxes missing'
    assert doctor.main(['--link-operators']) == 0  # again
    assert doctor.main(['--unlink-operators']) == 0
    assert not [*mmcv.glob('_ext*')]
    assert doctor.main(['--unlink-operators']) == 2
    assert 'there is no' in capsys.readouterr().err


def test_no_other_file_is_touched(mmcv, capsys):
    (mmcv / '_ext.py').write_text('# mine')
    for option in ('--link-operators', '--unlink-operators'):
        assert doctor.main([option]) == 2
    assert (mmcv / '_ext.py').read_text() == '# mine'
    (mmcv / '_ext.py').unlink()
    (mmcv / '_ext.so').touch()
    assert doctor.main(['--link-operators']) == 2
    assert 'mmcv has compiled operators, which Python prefers' in capsys.readouterr().err
    assert doctor.main(['--link-operators', '--unlink-operators']) == 2


def test_without_mmcv(monkeypatch, capsys):
    monkeypatch.setattr(mmcv_operators.importlib.util, 'find_spec', lambda name: None)
    assert mmcv_operators.found() is None
    for option in ('--link-operators', '--unlink-operators'):
        assert doctor.main([option]) == 2
    assert 'mmcv is not installed' in capsys.readouterr().err


def test_any_other_operator_says_what_to_do():
    assert hasattr(ext, 'border_align_forward') and not hasattr(ext, '__wrapped__')
    with pytest.raises(NotImplementedError) as raised:
        ext.border_align_forward(1, 2, pooled_height=3)
    text = str(raised.value)
    assert text.startswith("mmcv's operator border_align_forward (used by BorderDet) must be")
    assert re.search(r'MMCV_WITH_OPS=1 pip install .* (onedl-mmcv|mmcv)==[\d.]+$', text)


def test_the_page_lists_the_operators():
    page = (ROOT / 'docs/install.md').read_text()
    (listed,) = re.findall(r'<!-- operators: .*?-->(.*?)<!-- end of operators', page, re.S)
    endings = r'_(forward|backward)(_input|_parameters)?$'
    names = {re.sub(endings, '', function.__name__) for function in ext.PROVIDED}
    assert re.findall(r'`(\w+)`', listed) == sorted(names)
    table = {function.__name__ for function in ext.PROVIDED}
    assert table < {*ext.__all__}


def test_the_page_has_the_command_that_compiles():
    command = mmcv_operators.compile_command()
    page = (ROOT / 'docs/install.md').read_text()
    assert re.sub(r'\S+$', 'onedl-mmcv==2.3.6', command) in page
    assert '--no-deps --no-cache --reinstall onedl-mmcv==2.3.6' in (ROOT / 'Makefile').read_text()


def test_arguments_are_those_of_mmcv():
    """The compiled operators are called with some arguments by name: mmcv's calls name them."""
    import inspect

    import mmcv.ops

    sources = [path.read_text() for path in Path(mmcv.ops.__file__).parent.glob('*.py')]
    called = set()
    for source in sources:
        for name, arguments in re.findall(
            r'ext_module\.(\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)', source
        ):
            function = getattr(ext, name)
            if function not in ext.PROVIDED:
                continue
            called.add(name)
            keywords = set(re.findall(r'^\s*(\w+)=', arguments, re.M))
            assert keywords <= {*inspect.signature(function).parameters}, name
    assert {function.__name__ for function in ext.PROVIDED} - called <= {'nms_match'}
