"""Options that name a file or a folder to write: what is in its place is said before the work."""

from pathlib import Path

import pytest
from support import ROOT, load_tool

TREES = str(ROOT / 'examples/trees.onnx')
NANO = 'cpvt://pcpvt_nano'
# A command up to the value of its option, and how that must end.
FILES = [
    ('check_data', 'data --out', '.yaml'),
    ('export', f'pcpvt_nano {NANO} --out', '.onnx'),
    ('new_config', 'data --base retinanet_cpvt_s --out', '.py'),
    ('quantize', f'{TREES} photos --out', '.xml'),
    ('test', 'nowhere.py nowhere.pth --out', '.pkl'),
    ('test', 'nowhere.py nowhere.pth --report', '.html'),
]
FOLDERS = [
    ('check_data', 'data --out-dir'),
    ('convert_weights', f'{NANO} --to mmseg --out-dir'),
    ('crop', 'data --out-dir'),
    ('infer', f'nowhere.onnx {ROOT}/examples/trees --out-dir'),
    ('demo_data', 'pages --train 1 --val 1 --root'),
]


# What these commands read is bad.
FAILING = [
    'check_data data --out new/a.yaml --out-dir new/b',
    'convert_weights file --to mmseg --out-dir new/a/b',
    'crop data --out-dir new/a',
    'export file --out new/a/b.onnx',
    'infer file photo.jpg --out-dir new/a',
    'new_config data --base retinanet_cpvt_s --out new/a.py',
    f'quantize {TREES} data --out new/a.xml',
    'test nowhere.py nowhere.pth --out new/a.pkl --report new/a.html --work-dir new/b',
    'train nowhere.py --work-dir new/a',
]


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """Calls a command and returns its line, without its name."""
    monkeypatch.chdir(tmp_path)
    Path('data').mkdir()
    Path('file').write_text('')

    def line(tool: str, command: str) -> str:
        assert load_tool(tool).main(command.split()) == 2
        out, err = capsys.readouterr()
        assert not out
        return err.partition(': ')[2].replace(str(tmp_path.resolve()) + '/', '')

    return line


@pytest.mark.parametrize('tool, command, ending', FILES)
def test_a_file_to_write(tool, command, ending, refusal):
    Path(f'folder{ending}').mkdir()
    said = f'folder{ending} must be a file to write, but it is a folder\n'
    assert refusal(tool, f'{command} folder{ending}') == said
    said = 'file must be a folder to write to, but it is a file\n'
    assert refusal(tool, f'{command} file/x{ending}') == said
    said = 'cannot write to the folder /proc: No such file or directory\n'
    assert refusal(tool, f'{command} /proc/x{ending}') == said
    line = refusal(tool, f'{command} {"x" * 300}{ending}')
    assert line == f'{"x" * 300}{ending}: File name too long\n'


@pytest.mark.parametrize('tool, command, ending', FILES)
def test_nothing_is_replaced(tool, command, ending, refusal):
    """Of a command that can be told to replace files, this is said."""
    written = Path(f'mine{ending}')
    written.write_text('edited by hand')
    option = command.split()[-1]
    can_be_told = tool == 'new_config'
    way = (
        f'choose another {option}, or --overwrite'
        if can_be_told
        else f'remove it, or choose another {option}'
    )
    assert refusal(tool, f'{command} {written}') == f'{written} exists; {way}\n'
    assert written.read_text() == 'edited by hand'


@pytest.mark.parametrize('tool, command', FOLDERS)
def test_a_folder_to_write_to(tool, command, refusal):
    if tool != 'demo_data':  # which says that it is no data set
        said = 'file must be a folder to write to, but it is a file\n'
        assert refusal(tool, f'{command} file') == said
    parent = 'file/x' if tool == 'demo_data' else 'file/x/y'
    line = refusal(tool, f'{command} file/x/y')
    assert line == f'{parent} must be a folder to write to, but file is a file\n'


@pytest.mark.parametrize('tool, command', FOLDERS)
def test_a_link_to_itself(tool, command, refusal):
    Path('link').symlink_to('link')
    line = refusal(tool, f'{command} link/x')
    assert line.endswith(' is a link to link, which does not exist\n')


@pytest.mark.parametrize('command', FAILING, ids=lambda command: command.split()[0])
def test_a_failure_creates_no_folder(command, refusal):
    tool, _, rest = command.partition(' ')
    assert refusal(tool, rest)
    assert not Path('new').exists()


def test_the_folder_next_to_a_config(refusal):
    Path('my_data').write_text('')
    line = refusal('new_config', 'data --base retinanet_cpvt_s --overwrite --out my.py')
    assert line == 'my_data must be a folder to write to, but it is a file\n'
