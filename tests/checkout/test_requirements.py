"""What the package, and the experiments, import is in the extras that users install."""

import ast
import re
import subprocess
import sys
from importlib import metadata

import pytest
from support import ROOT, pyproject

from cpvt_pyramid.app.doctor import installed

# The extras for each part of the package, by the beginning of its path. The first one counts.
EXTRAS = {
    'cpvt_pyramid/app/page/server.py': ['app'],
    'cpvt_pyramid/app/commands/app.py': ['app'],
    'cpvt_pyramid/app/commands/demo_data.py': ['demo'],
    'cpvt_pyramid/app/commands/export.py': ['export', 'mm'],
    'cpvt_pyramid/app/commands/quantize.py': ['quantize'],
    'cpvt_pyramid/app/commands/infer.py': ['runtime'],
    'cpvt_pyramid/app/commands/verify.py': ['runtime'],
    'cpvt_pyramid/app/commands/': ['mm'],
    'cpvt_pyramid/app/config/': ['mm'],
    'cpvt_pyramid/app/data/': ['mm'],
    'cpvt_pyramid/app/demo/': ['demo'],
    'cpvt_pyramid/app/doctor.py': [],
    'cpvt_pyramid/app/export/quantization.py': ['quantize'],
    'cpvt_pyramid/app/export/accuracy.py': ['quantize'],
    'cpvt_pyramid/app/export/': ['export'],
    'cpvt_pyramid/app/images/': [],
    'cpvt_pyramid/mm/': ['mm'],
    'cpvt_pyramid/mmcv_operators/': ['torch'],
    'cpvt_pyramid/registry.py': ['mm'],
    'cpvt_pyramid/app/predict/openmmlab/': ['mm'],
    'cpvt_pyramid/app/predict/pytorch/': ['torch'],
    'cpvt_pyramid/app/predict/': ['runtime', 'openvino'],
    'cpvt_pyramid/app/predictions/': [],
    'cpvt_pyramid/app/training/': ['mm'],
    'cpvt_pyramid/timm_models.py': ['timm'],
    'cpvt_pyramid/app/tooling/': [],
    'cpvt_pyramid/tasks/detectors.py': ['torch'],
    'cpvt_pyramid/': ['torch'],
    'experiments/unpadded/': ['lab', 'mm'],
    'experiments/': ['lab'],
    'tools/': [],
}
# Not in these extras: the user is told what to install, or a plain version works without it.
OPTIONAL = {
    'cpvt_pyramid/app/doctor.py': {'mmcv', 'torch'},  # looks for them
    'cpvt_pyramid/app/export/': {'mmdet', 'torchvision'},  # those of the exported model
    'cpvt_pyramid/app/images/formats.py': {'pillow_heif'},
    'cpvt_pyramid/app/images/large.py': {'rasterio'},
    'cpvt_pyramid/app/images/rasters.py': {'rasterio'},
    'cpvt_pyramid/app/predict/cluster.py': {'ray'},
    'cpvt_pyramid/app/data/bands.py': {'rasterio'},
    'cpvt_pyramid/app/predict/large_images.py': {'rasterio'},
    'cpvt_pyramid/app/predictions/drawing.py': {'matplotlib'},
    'cpvt_pyramid/app/predictions/formats.py': {'rasterio'},
    'cpvt_pyramid/app/predictions/kinds.py': {'pandas', 'supervision'},
    'cpvt_pyramid/app/tooling/files.py': {'filelock'},  # for training/
    'cpvt_pyramid/app/tooling/charts.py': {'markupsafe', 'matplotlib'},
    'cpvt_pyramid/app/tooling/pages.py': {'jinja2', 'markupsafe'},  # for training/
}
OURS = {'_checkout', 'benchmarks', 'cpvt_pyramid', 'experiments'}
# The import names of distributions that are called otherwise.
IMPORT_NAMES = {
    'onedl-mmcv': 'mmcv',
    'onedl-mmdetection': 'mmdet',
    'onedl-mmengine': 'mmengine',
    'onedl-mmsegmentation': 'mmseg',
    'opencv-python': 'cv2',
    'opencv-python-headless': 'cv2',
    'pillow': 'PIL',
    'pyyaml': 'yaml',
    'scikit-image': 'skimage',
    'scikit-learn': 'sklearn',
}
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ('cpvt_pyramid', 'experiments', 'tools')
    for path in (ROOT / folder).rglob('*.py')
)


@pytest.fixture(scope='module')
def declared() -> dict[str, set[str]]:
    """The import names that each extra brings; '' is every installation."""
    project = pyproject()['project']
    requirements = {'': project['dependencies'], **project['optional-dependencies']}
    return {extra: set(map(import_name, names)) for extra, names in requirements.items()}


def import_name(requirement: str) -> str:
    name = re.match(r'[\w-]+', requirement)[0]
    return IMPORT_NAMES.get(name, name)


def foreign_imports(path: str) -> set[str]:
    """The packages that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition('.')[0])
    return names - sys.stdlib_module_names - OURS


def test_imports_are_declared(declared):
    undeclared = {}
    for path in FILES:
        (extras, *_) = [extras for start, extras in EXTRAS.items() if path.startswith(start)]
        allowed = declared[''].union(*(declared[extra] for extra in extras))
        for start, names in OPTIONAL.items():
            if path.startswith(start):
                allowed |= names
        if missing := foreign_imports(path) - allowed:
            undeclared[path] = missing
    assert not undeclared, 'add them to the extras, or to OPTIONAL with what users are told'


def test_an_environment_of_openmmlab_has_the_rest(declared):
    """Where it is installed, for detection or segmentation, `pip install .` brings all that the
    commands need besides."""
    theirs = {'cv2', 'torch', 'torchvision', 'mmcv', 'mmdet', 'mmseg'}
    for distribution in ('torch', 'onedl-mmengine' if installed('onedl-mmengine') else 'mmengine'):
        needed = [name for name in metadata.requires(distribution) if 'extra ==' not in name]
        theirs |= set(map(import_name, needed))
    assert declared['mm'] <= declared[''] | theirs | {'mmengine'}


def test_the_tables_name_what_exists(declared):
    for table in (EXTRAS, OPTIONAL):
        for start in table:
            assert any(path.startswith(start) for path in FILES), start
    for start, names in OPTIONAL.items():
        imported = set().union(*(foreign_imports(p) for p in FILES if p.startswith(start)))
        assert names <= imported, start
    assert {extra for extras in EXTRAS.values() for extra in extras} <= declared.keys()


def test_pins_are_those_of_the_group():
    """As `make lock` writes them."""
    pins = (ROOT / 'requirements/requirements.txt').read_text()
    pinned = dict(re.findall(r'^([\w-]+)==(\S+)', pins, re.M))
    for requirement in requirements_of('all'):
        name, version = re.match(r'([\w-]+)(?:\[\w+\])?(?:==(\S+))?', requirement).groups()
        name = name.lower().replace('_', '-')
        assert name in pinned, f'{name} is not pinned; run make lock'
        assert version in (None, pinned[name]), f'{name} is pinned otherwise; run make lock'
    assert '://' not in pins


def requirements_of(group: str) -> list[str]:
    """The requirements of a dependency group, and of the groups that it includes."""
    found = []
    for item in pyproject()['dependency-groups'][group]:
        found += requirements_of(item['include-group']) if isinstance(item, dict) else [item]
    return found


def test_every_extra_that_is_named_exists():
    """In all pages, docstrings, messages and notebooks."""
    declared = pyproject()['project']['optional-dependencies'].keys()
    files = subprocess.run(
        ['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    named = set()
    for name in files.stdout.splitlines():
        path = ROOT / name
        if path.suffix in ('.py', '.md', '.ipynb', '.toml', '.yml', '.html', '.js', '.Dockerfile'):
            for extras in re.findall(r'pip install [^\n`]*\[([a-z,]+)\]', path.read_text()):
                named |= {(extra, name) for extra in extras.split(',')}
    assert len(named) > 20
    assert [(extra, name) for extra, name in sorted(named) if extra not in declared] == []


def test_extras_agree_on_the_oldest_torch():
    extras = pyproject()['project']['optional-dependencies']
    del extras['export']  # which needs a newer one
    found = {name for names in extras.values() for name in names if name.startswith('torch>')}
    assert {name.partition(',')[0] for name in found} == {extras['torch'][0]}


def test_weights_that_configs_name_can_be_downloaded(declared):
    configs = (path.read_text() for path in (ROOT / 'configs').rglob('*.py'))
    assert any('timm://' in text for text in configs)
    assert 'huggingface_hub' in declared['']


# What `make` tests: the target in docs/install.md, and the dependency groups of its environment.
TARGETS = {
    'make test': ('all',),
    'make test-torch': ('oldest-torch',),
    'make test-original-mm, first': ('original-mm', 'original-mm-packages'),
    'make test-original-mm, second': ('original-mm-new-torch',),
    'make test-transformers': ('transformers',),
}


def pins_of(group: str) -> dict[str, str]:
    """The versions that a dependency group, and those that it includes, pin."""
    pins = {}
    for entry in pyproject()['dependency-groups'][group]:
        if isinstance(entry, dict):
            pins |= pins_of(entry['include-group'])
        elif '==' in entry:
            name, _, version = entry.partition('==')
            pins[name] = version
    return pins


def test_the_page_names_the_versions_that_make_tests():
    page = (ROOT / 'docs/install.md').read_text()
    rows = re.findall(r'^\| (`make .*) \|$', page, re.M)
    cells = [[cell.replace('`', '').strip() for cell in row.split(' | ')] for row in rows]
    table = {command: rest for command, *rest in cells}
    for command, groups in TARGETS.items():
        pins = {}
        for group in groups:
            pins |= pins_of(group)
        _, torch, packages, _ = table[command]
        assert torch == pins['torch'], command
        named = dict(re.findall(r'([a-z][\w-]+) (\d[\w.]+)', packages))
        for name, version in named.items():
            assert version == pins[name], (command, name)
    assert table['make test-original-mm, second'][2] == 'the same'
    makefile = (ROOT / 'Makefile').read_text()
    for command in table:
        assert re.search(f'^{command.split()[1].rstrip(",")}:', makefile, re.M), command
