"""Names and imports across the package."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / 'cpvt_pyramid'
FILES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob('*.py'))}
# From the bottom to the top: a file imports from its own layer and those below it.
LAYERS = (
    # the library
    '',
    'archs',
    'meta',
    'names',
    'checkpoints',
    'padding',
    'grid',
    'position',
    'model',
    'columnar',
    'checkpoints/loading',  # and `convert`: files into models
    'checkpoints/convert',
    'acceleration',
    'hub',
    'timm_models',
    'tasks/bodies',
    'tasks/detectors',
    'tasks/segmentors',
    'tasks',
    'mmcv_operators',
    'mm',
    # the application
    'app',
    'app/tooling',
    'app/images',
    'app/predictions',
    'app/doctor',
    'app/demo',
    'app/config',
    'app/predict',
    'app/training/processes',
    'app/data',
    'app/evaluate',
    'app/export',
    'app/training',
    'app/page',
    'app/commands',
    '__main__',
)


def layer(path: Path) -> str:
    """The layer of the longest name that leads to a file."""
    inside = path.relative_to(PACKAGE).with_suffix('')
    for folder in (inside, *inside.parents):
        if folder.as_posix() in LAYERS:
            return folder.as_posix()
    return ''


def imported(path: Path) -> set[Path]:
    """The files and folders of the package that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(FILES[path]):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            folder = path.parents[node.level - 1]
        elif (node.module or '').split('.')[0] == PACKAGE.name:
            folder = PACKAGE.parent
        else:
            continue
        module = folder.joinpath(*(node.module or '').split('.'))
        targets = [module.with_suffix('.py'), *(module / f'{a.name}.py' for a in node.names)]
        targets += [module / a.name / '__init__.py' for a in node.names] + [module / '__init__.py']
        found |= {target for target in targets if target.is_file()} - {path}
    return found


def test_public_names_are_unique():
    """But for adapters, classes that derive from one of the same name, as those of mm do, and for
    commands, which are called as what they run."""
    places = defaultdict(list)
    for path, tree in FILES.items():
        if path.parent.name == 'commands':
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != '_':
                bases = [getattr(base, 'attr', None) for base in getattr(node, 'bases', ())]
                if node.name not in (*bases, 'main'):
                    places[node.name].append(str(path.relative_to(PACKAGE)))
    assert not {name: files for name, files in places.items() if len(files) > 1}


# The package's own names are imported on first use, from any layer.
@pytest.mark.parametrize(
    'path',
    sorted(FILES.keys() - {PACKAGE / '__init__.py'}),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_imports_do_not_point_upwards(path):
    allowed = LAYERS[: LAYERS.index(layer(path)) + 1]
    above = [
        str(target.relative_to(PACKAGE))
        for target in imported(path)
        if layer(target) not in allowed
    ]
    assert not above


# The package and the rooms around it, from the bottom to the top.
ROOMS = ('cpvt_pyramid', 'benchmarks', 'experiments', 'tests', 'tools')


@pytest.mark.parametrize('room', ROOMS[:3])
def test_rooms_import_only_those_below(room):
    """Benchmarks and experiments use `tests.models`, and nothing else of the tests."""
    below = ROOMS[: ROOMS.index(room) + 1]
    tests = {path.stem for path in (ROOT / 'tests').iterdir()} - {'benchmarks', 'experiments'}
    for path in sorted((ROOT / room).rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                first = name.partition('.')[0]
                of_tests = name.startswith('tests.models') and room != 'cpvt_pyramid'
                assert of_tests or first in below or first not in (*ROOMS, *tests), (
                    f'{path} imports {name}'
                )


FREE_OF_TORCH = 'tooling', 'images', 'predictions', 'predict', 'evaluate', 'page'
WITHOUT_TORCH = {
    'export/__init__.py',
    'export/accuracy.py',
    'export/batches.py',
    'export/comparison.py',
    'export/quantization.py',
    'export/self_test.py',
    'export/stored_files.py',
    'export/tones.py',
}


def test_exported_models_need_neither_torch_nor_mm():
    imports = (ast.Import, ast.ImportFrom)
    for path in FILES:
        if PACKAGE / 'app' not in path.parents:
            continue
        inside = path.relative_to(PACKAGE / 'app')
        is_free = inside.parts[0] in FREE_OF_TORCH or inside.as_posix() in WITHOUT_TORCH
        if not is_free or {'openmmlab', 'pytorch'} & {*inside.parts}:
            continue
        for node in ast.walk(FILES[path]):
            if isinstance(node, imports) and not getattr(node, 'level', 0):
                names = [getattr(node, 'module', None) or a.name for a in node.names]
                assert not {n.split('.')[0] for n in names} & {'torch', 'mmengine', 'mmcv'}, path


@pytest.mark.parametrize('name', ['padding/__init__', 'padding/batching', 'app/export/invariance'])
def test_batches_are_formed_without_torch(name):
    """Exported models use these files."""
    for node in FILES[PACKAGE / f'{name}.py'].body:
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {'math', 'numpy'}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and not node.module.startswith('torch')


def test_imports_have_no_cycle():
    below = {path: imported(path) - {PACKAGE / '__init__.py'} for path in FILES}
    while leaves := [path for path in below if not below[path] & below.keys()]:
        for path in leaves:
            del below[path]
    assert not {str(path.relative_to(PACKAGE)) for path in below}


def test_warnings_are_caught_where_no_threads_run():
    """`catch_warnings` restores what all threads share, and threads read images."""
    for path in FILES:
        if path.parent.name == 'images':
            assert 'catch_warnings' not in path.read_text(), path
