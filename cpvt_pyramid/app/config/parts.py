"""What a config says: the types of its parts, its data sets, their classes."""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Optional

from mmengine.config import Config
from mmengine.registry import DATASETS

from ..predictions.drawing import class_palette
from ..tooling.command import UserError, contexts, one_line

FRAMEWORKS = 'mmdet', 'mmseg'
OPENMMLAB = 'mmengine', 'mmcv', *FRAMEWORKS
OPENMMLAB_NEEDED = 'OpenMMLab is not complete, and cpvt doctor has the command that installs it'
SPLITS = 'train', 'val', 'test'


def kind_of(config: dict) -> str:
    """The name of the class in `type`, which may be a class, or a string with a scope or module."""
    kind = config.get('type') or ''
    return kind.rpartition('.')[2] if isinstance(kind, str) else getattr(kind, '__name__', '')


def as_list(value: Any) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value] if value else []


def dicts_in(value: Any, path: str = '') -> Iterator[tuple[str, dict]]:
    """The dicts inside a config, with their paths as in --cfg-options."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        yield path, value
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return
    for key, inner in items:
        yield from dicts_in(inner, f'{path}.{key}'.lstrip('.'))


def data_of(cfg: Config, split: str) -> list[dict]:
    """The innermost data sets of a split."""
    return [dataset for _, dataset in data_paths(cfg, split)]


def data_paths(cfg: Config, split: str) -> list[tuple[str, dict]]:
    """The innermost data sets of a split, with their paths as in --cfg-options."""
    name = f'{split}_dataloader'
    loader = cfg.get(name)
    return list(leaf_paths(loader['dataset'], f'{name}.dataset')) if loader else []


def leaves(dataset: dict) -> Iterator[dict]:
    """The innermost data sets of RepeatDataset, ConcatDataset and other wrappers."""
    for _, leaf in leaf_paths(dataset, ''):
        yield leaf


def leaf_paths(dataset: dict, path: str) -> Iterator[tuple[str, dict]]:
    """As `leaves`, with paths; that of the data set is `path`."""
    children = [*items_of(dataset, 'dataset', path), *items_of(dataset, 'datasets', path)]
    if not children:
        yield path, dataset
    for child_path, child in children:
        yield from leaf_paths(child, child_path)


def items_of(settings: Any, key: str, path: str) -> list[tuple[str, dict]]:
    """The dicts that a setting holds, which is a dict or a list of dicts, with their paths; `path`
    is that of what it is in."""
    value = settings.get(key)
    path = f'{path}.{key}' if path else key
    if isinstance(value, (list, tuple)):
        return [(f'{path}.{index}', item) for index, item in enumerate(value)]
    return [(path, value)] if value else []


def dataset_class(dataset: dict, scope: str) -> type:
    """The class of a data set's config, which its `type` is or names."""
    kind: Any = dataset.get('type')
    if isinstance(kind, str):
        import_datasets(scope)
        with DATASETS.switch_scope_and_registry(scope) as own:
            with suppress(ImportError, RuntimeError, TypeError, ValueError):
                kind = own.get(kind)  # imports what looks like a module
    if not callable(kind):
        raise UserError(f'{scope} has no data set {dataset.get("type")!r}')
    return kind


def import_datasets(scope: str) -> None:
    """Import the data sets of a framework, whose registry would import them when it needs them.

    Without its output: the maintained fork of mmdet prints "Could not import OneDL" twice, about
    data sets of another package that are not used here.

    Raises:
        UserError: OpenMMLab is not complete.
    """
    try:
        with redirect_stdout(io.StringIO()):
            import_module(f'{scope}.datasets')
    except ImportError as error:
        if lacks_openmmlab(error):
            raise UserError(f'{one_line(error)}; {OPENMMLAB_NEEDED}') from error
        raise


def lacks_openmmlab(error: ImportError) -> bool:
    """Whether an import failed because a package of OpenMMLab, such as mmcv, is missing."""
    names = [cause.name or '' for cause in contexts(error) if isinstance(cause, ImportError)]
    return any(name.partition('.')[0] in OPENMMLAB for name in names)


def framework_of(kind: Any) -> Optional[str]:
    """The framework that a class is from or inherits from, or that its full name begins with."""
    if isinstance(kind, str):
        package = kind.partition('.')[0]
        return package if package in FRAMEWORKS else None
    packages = [c.__module__.partition('.')[0] for c in getattr(kind, '__mro__', ())]
    return next((package for package in packages if package in FRAMEWORKS), None)


def classes_of(dataset: dict, scope: str) -> Sequence[str]:
    """The classes of a data set's config, which may name a file that lists them; empty if there are
    none, or if it is not one of mmengine's data sets.

    Raises:
        UserError: they are a string, as in classes=('red'), which lacks a comma.
    """
    kind: Any = dataset_class(dataset, scope)
    metainfo = dataset.get('metainfo') or {}
    classes = metainfo.get('classes')
    if not (isinstance(classes, str) and Path(classes).is_file()):
        check_that_classes_are_a_list(classes, 'metainfo.classes')
    if not hasattr(kind, '_load_metainfo'):
        return ()
    return kind._load_metainfo(metainfo).get('classes') or ()


def check_that_classes_are_a_list(classes: Any, what: str) -> None:
    if isinstance(classes, str):
        raise UserError(
            f'{what} must be a tuple or list of names, got the string {classes!r}; a tuple of one '
            f'name needs a comma: ({classes!r},)'
        )


def dataset_meta(cfg: Config, checkpoint: dict, split: str = 'test') -> dict:
    """`classes`, from the checkpoint or else the config's data set, and their `palette`.

    The palette is that of the config or the data set's class, or else distinct colours. It is not
    the checkpoint's, where mmseg stores random colours if none are declared.
    """
    dataset = next(leaves(cfg[f'{split}_dataloader'].dataset))
    kind = dataset_class(dataset, cfg.default_scope)
    declared = {**getattr(kind, 'METAINFO', {}), **(dataset.get('metainfo') or {})}
    declared['classes'] = classes_of(dataset, cfg.default_scope)
    meta = checkpoint.get('meta', {})
    trained = meta.get('dataset_meta') or meta  # before MMEngine, `CLASSES` stood in `meta` itself
    classes = {k.lower(): v for k, v in {**declared, **trained}.items()}.get('classes', ())
    check_that_classes_are_a_list(classes, "the checkpoint's classes")
    return {'classes': classes, 'palette': class_palette(classes, declared.get('palette'))}


def is_local(path: str) -> bool:
    return '://' not in path
