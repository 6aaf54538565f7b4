"""Try what `make dist` built: the first argument is the folder of the wheel and the source archive.
With the arguments `tag NAME`, only check whether a release can have this tag.

The archive must hold every file of the repository and no path of this machine. The wheel is
installed into a bare environment of every supported Python on this machine, where it must run the
archive's examples without torch. With --torch, instead, the core must work with the newest torch
and nothing else, in an environment of the newest Python.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST_PYTHON = (3, 9)  # requires-python of pyproject.toml
OF_SERVICES = ('.ci/', '.devcontainer/', '.github/', '.gitignore')
PROBE = """
import sys
from pathlib import Path
import cpvt_pyramid
from cpvt_pyramid.app.predict import Predictor
assert not {'torch', 'mmengine', 'timm'} & sys.modules.keys()
try:
    cpvt_pyramid.CPVTPyramid
except ImportError as error:
    assert 'pip install torch' in str(error)
(found,) = Predictor(sys.argv[1])([sys.argv[2]])
assert len(found.boxes) > 1
from cpvt_pyramid.app.page.server import Page, Server
from cpvt_pyramid.app.predict.exported import ExportedModel
server = Server(Page(ExportedModel(Path(sys.argv[1]))), '127.0.0.1', 0)  # reads the page's files
server.listener.close()
"""


CORE = """
import sys
import torch
from cpvt_pyramid import ARCHS, CPVT, CPVTPyramid, load_weights
assert not {'timm', 'torchvision', 'safetensors', 'mmengine'} & sys.modules.keys()
alone, batch = torch.randn(1, 3, 50, 75), torch.zeros(2, 3, 64, 96)
batch[:1, :, :50, :75] = alone
valid = torch.tensor([[50, 75], [64, 96]])
for arch in ('pcpvt_nano', 'svt_small', 'pvt_tiny'):
    model = CPVTPyramid(arch)
    sum(x.sum() for x in model(batch, valid)).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    with torch.no_grad():
        for x, whole in zip(model(alone), model(batch, valid)):
            torch.testing.assert_close(whole[:1, :, :x.shape[2], :x.shape[3]], x)
torch.save({'state_dict': model.state_dict()}, 'weights.pth')
assert not load_weights(CPVTPyramid(arch), 'weights.pth').unused
assert CPVT('cpvt_tiny', num_classes=5)(batch).shape == (2, 5)
torch.export.export(CPVTPyramid('pcpvt_nano').eval(), (alone,))
print('core works with torch', torch.__version__)
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
    if lacking := [name for name in wanted if f'{root}{name}' not in names]:
        sys.exit(f'not in the archive: {", ".join(lacking)}')


def check_paths(texts: Iterable[tuple[str, bytes]]) -> None:
    """Exit if a file names the checkout or the home directory."""
    ours = [str(path).encode() for path in (ROOT, Path.home())]
    if named := [name for name, data in texts if any(path + b'/' in data for path in ours)]:
        sys.exit(f'names a path of this machine: {", ".join(named)}')


def try_wheel(python: str, wheel: Path, examples: Path, folder: Path) -> None:
    """Install a wheel into a new environment in `folder` and use it there."""
    run('uv', 'venv', '--python', python, folder / 'venv')
    ours = folder / 'venv/bin/python'
    run('uv', 'pip', 'install', '--python', ours, f'{wheel}[app]')
    model = examples / 'trees.onnx'
    run(ours, '-c', PROBE, model, examples / 'trees/florida.jpg', cwd=folder)
    cpvt = folder / 'venv/bin/cpvt'
    listed = re.findall(r'^  (\S+)', run(cpvt, cwd=folder), re.M)
    assert {'train', 'new-config', 'infer'} <= set(listed), listed
    for tool in listed:
        run(cpvt, tool, '--help', cwd=folder)
    run(cpvt, 'infer', model, examples / 'trees', '--out-dir', 'out', cwd=folder)
    assert (folder / 'out/florida.overlay.jpg').is_file()
    table = run(cpvt, 'doctor', cwd=folder, codes=(0, 1))
    assert re.search(r'^ +ok +others .*onnxruntime', table, re.M), table


def try_core(wheel: Path, folder: Path) -> None:
    """Install a wheel with torch into a new environment in `folder` and use the core."""
    run('uv', 'venv', '--python', pythons()[max(pythons())], folder / 'venv')
    ours = folder / 'venv/bin/python'
    run('uv', 'pip', 'install', '--python', ours, f'{wheel}[torch]')
    print(run(ours, '-c', CORE, cwd=folder), end='')


def check_archives(wheel: Path, archive: Path, folder: Path) -> Path:
    """Check what is in both, and unpack the archive; returns the folder of the sources."""
    root = archive.name.removesuffix('.tar.gz')
    tracked = run('git', 'ls-files', cwd=ROOT).split('\n')[:-1]
    tracked = [name for name in tracked if not name.startswith(OF_SERVICES)]
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        check_contents(names, '', [n for n in tracked if n.startswith('cpvt_pyramid/')])
        configs = [name for name in tracked if name.startswith('configs/')]
        check_contents(names, 'cpvt_pyramid/.mim/', configs)
        checkout = re.compile('^(benchmarks|experiments|tests)/')
        if found := sorted(filter(checkout.search, names)):
            sys.exit(f'must not be in the wheel: {", ".join(found)}')
        check_paths((name, file.read(name)) for name in names)
    with tarfile.open(archive) as file:
        check_contents(set(file.getnames()), f'{root}/', tracked)
        file.extractall(folder, filter='data')
    source = folder / root
    check_paths((str(path), path.read_bytes()) for path in source.rglob('*') if path.is_file())
    return source


OWNER = 'OWNER'  # in the address of the repository, until `make owner`
# What says so in README.md and pyproject.toml.
NOTES = (
    '`OWNER` is the account that hosts this repository. ',
    '# OWNER is the account that hosts this repository: `make owner NAME=ACCOUNT` sets it.\n',
)


def check_tag(tag: str, changelog: str, pyproject: str) -> None:
    """Exit unless the tag is that of this version, the changelog says when it was released, and the
    address of the repository has an owner."""
    source = (ROOT / 'cpvt_pyramid/__init__.py').read_text()
    version = re.search(r"^__version__ = '(.*)'", source, re.M)[1]
    if tag != f'v{version}':
        sys.exit(f'the tag must be v{version}, as in cpvt_pyramid/__init__.py, got {tag!r}')
    heading = re.search(rf'^## {re.escape(version)} \((.*)\)$', changelog, re.M)
    if not heading:
        sys.exit(f'CHANGELOG.md has no entry "## {version} (YYYY-MM-DD)"')
    try:
        date.fromisoformat(heading[1])
    except ValueError:
        sys.exit(
            f'the entry of {version} in CHANGELOG.md needs a date, YYYY-MM-DD, got ({heading[1]})'
        )
    if owner_in(pyproject) == OWNER:
        sys.exit(f'the address of the repository still has {OWNER}: make owner NAME=ACCOUNT')


def owner_in(pyproject: str) -> str:
    """The account in the address of the repository."""
    return re.search(
        r'^Repository = "https://github\.com/([^/"]+)/cpvt_pyramid"$', pyproject, re.M
    )[1]


def set_owner(name: str, root: Path) -> list[str]:
    """Replace the account in the address of the repository in all files that git tracks; returns
    the names of the files."""
    if not re.fullmatch('[A-Za-z0-9](-?[A-Za-z0-9]){0,38}', name) or name == OWNER:
        sys.exit(f'NAME must be an account of GitHub, got {name!r}')
    before = owner_in((root / 'pyproject.toml').read_text(encoding='utf-8'))
    changed = []
    for file in run('git', 'ls-files', cwd=root).splitlines():
        path = root / file
        address = f'github.com/{before}/cpvt_pyramid'
        if path.is_symlink() or address.encode() not in path.read_bytes():
            continue
        text = path.read_text(encoding='utf-8')
        text = text.replace(address, f'github.com/{name}/cpvt_pyramid')
        for note in NOTES:
            text = text.replace(note, '')
        path.write_text(text, encoding='utf-8')
        changed.append(file)
    return changed


def main(folder: str, *options: str) -> None:
    (wheel,), (archive,) = Path(folder).resolve().glob('*.whl'), Path(folder).glob('*.tar.gz')
    with tempfile.TemporaryDirectory() as temporary:
        if '--torch' in options:
            try_core(wheel, Path(temporary))
            return
        source = check_archives(wheel, archive, Path(temporary))
        for version, python in sorted(pythons().items()):
            place = Path(temporary, '.'.join(map(str, version)))
            place.mkdir()
            try_wheel(python, wheel, source / 'examples', place)
            print(f'works in a bare environment of Python {place.name}')


if __name__ == '__main__':
    if sys.argv[1] == 'tag':
        texts = [
            (ROOT / name).read_text(encoding='utf-8') for name in ('CHANGELOG.md', 'pyproject.toml')
        ]
        check_tag(sys.argv[2], *texts)
    elif sys.argv[1] == 'owner':
        print('changed:', *set_owner(sys.argv[2], ROOT))
    else:
        main(*sys.argv[1:])
