"""Try what `make dist` built: its argument is the folder of the wheel and the source archive.

The archive must hold every file of the repository and no path of this machine. The wheel is
installed into a bare environment of every supported Python on this machine, where it must run the
archive's examples without torch.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST_PYTHON = (3, 10)  # setup.py's python_requires
OF_SERVICES = ('.ci/', '.devcontainer/', '.github/', '.gitignore')
PROBE = """
import sys
import cpvt_pyramid
from cpvt_pyramid.runtime import Predictor
assert not {'torch', 'mmengine', 'timm'} & sys.modules.keys()
try:
    cpvt_pyramid.CPVTPyramid
except ImportError as error:
    assert "pip install 'cpvt_pyramid[torch]'" in str(error)
(found,) = Predictor(sys.argv[1])([sys.argv[2]])
assert len(found.boxes) > 1
"""


def run(*command: object, codes: Iterable[int] = (0,), **options: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    if done.returncode not in codes or 'Traceback' in done.stderr:
        sys.exit(f'{" ".join(map(str, command))}\n{done.stdout}{done.stderr}')
    return done.stdout


def pythons() -> dict[tuple[int, int], str]:
    """The supported interpreters on the PATH and in pyenv, by version."""
    folders = [*map(Path, os.get_exec_path()), *Path.home().glob('.pyenv/versions/*/bin')]
    found = {}
    for path in (path for folder in folders for path in sorted(folder.glob('python3.*'))):
        match = re.fullmatch(r'python3\.(\d+)', path.name)
        version = (3, int(match[1])) if match else (0, 0)
        works = version >= OLDEST_PYTHON and version not in found
        if works and subprocess.run([path, '-c', ''], capture_output=True).returncode == 0:
            found[version] = str(path)
    return found


def check_contents(names: set[str], root: str, wanted: Iterable[str]) -> None:
    """Exit unless an archive has these files in its folder `root`."""
    lacking = [name for name in wanted if f'{root}{name}' not in names]
    if lacking:
        sys.exit(f'not in the archive: {", ".join(lacking)}')


def check_paths(texts: Iterable[tuple[str, bytes]]) -> None:
    """Exit if a file names the checkout or the home directory."""
    ours = [str(path).encode() for path in (ROOT, Path.home())]
    named = [name for name, data in texts if any(path + b'/' in data for path in ours)]
    if named:
        sys.exit(f'names a path of this machine: {", ".join(named)}')


def try_wheel(python: str, wheel: Path, examples: Path, folder: Path) -> None:
    """Install a wheel into a new environment in `folder` and use it there."""
    run('uv', 'venv', '--python', python, folder / 'venv')
    ours = folder / 'venv/bin/python'
    run('uv', 'pip', 'install', '--python', ours, f'{wheel}[runtime]')
    model = examples / 'digits-detection.onnx'
    run(ours, '-c', PROBE, model, examples / '1.jpg', cwd=folder)
    run(ours, '-m', 'cpvt_pyramid.runtime', model, examples, '--out-dir', 'out', cwd=folder)
    assert (folder / 'out/4.overlay.png').is_file()
    table = run(ours, '-m', 'cpvt_pyramid.doctor', cwd=folder, codes=(0, 1))
    assert re.search(r'^ +ok +onnxruntime', table, re.M), table


def main(folder: str) -> None:
    (wheel,), (archive,) = Path(folder).glob('*.whl'), Path(folder).glob('*.tar.gz')
    root = archive.name.removesuffix('.tar.gz')
    tracked = run('git', 'ls-files', '-c', cwd=ROOT).split('\n')[:-1]
    tracked = [name for name in tracked if not name.startswith(OF_SERVICES)]
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        check_contents(names, '', [n for n in tracked if n.startswith('cpvt_pyramid/')])
        check_contents(
            names, 'cpvt_pyramid/.mim/', [n for n in tracked if n.startswith('configs/')]
        )
        check_paths((name, file.read(name)) for name in names)
    with tempfile.TemporaryDirectory() as temporary, tarfile.open(archive) as file:
        check_contents(set(file.getnames()), f'{root}/', tracked)
        file.extractall(temporary, filter='data')
        source = Path(temporary, root)
        check_paths((str(p), p.read_bytes()) for p in source.rglob('*') if p.is_file())
        for version, python in sorted(pythons().items()):
            place = Path(temporary, '.'.join(map(str, version)))
            place.mkdir()
            try_wheel(python, wheel.resolve(), source / 'examples', place)
            print(f'works in a bare environment of Python {place.name}')


if __name__ == '__main__':
    main(*sys.argv[1:])
