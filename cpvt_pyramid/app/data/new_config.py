"""A config for a data set: reads and checks what a description declares, and adapts a base."""

import difflib
import os
import re
import shlex
from pathlib import Path
from typing import Any, Optional

import numpy as np
from mmengine.config import Config

from ..config.load import load_config
from ..config.pipelines import pipeline_of
from ..config.shipped import CONFIG_SUFFIXES, is_config_name, shipped_configs
from ..tooling.command import UserError
from ..tooling.files import (
    atomic_write,
    check_file,
    check_folder,
    check_new,
    files_below,
    scratch_folder,
)
from ..tooling.report import amount
from .about import lines_about_data
from .adapt import (
    HERE,
    Code,
    ignore_objects,
    model_changes,
    relative,
    repetitions,
    task_of,
    text_of_settings,
    wrapped,
)
from .data import DataSet, Split
from .datasets import LABELS, Generated, datasets_of, with_validation
from .defects import Defects
from .description import SPLITS
from .images import ALL, HEADERS
from .layout import Holds
from .layouts import formats_with
from .listing import GENERATED, WRITTEN
from .mask_values import palette_of
from .read import checked_source
from .recipes import Scales, adapted_recipe

HOLDS: dict[str, Holds] = {
    'segmentation': 'masks',
    'detection': 'objects',
    'instance': 'objects',
}


def new_config(
    source: Path,
    base: Path,
    out: Path,
    skip_bad: bool = False,
    overwrite: bool = False,
    epochs: Optional[int] = None,
) -> list[str]:
    """Write a config for a data set, and the files that it needs to a folder next to it; returns
    lines for people.

    All files are written next to their places and then renamed: on a full disk there are none.

    Args:
        source: a description, or a folder whose layout is recognized.
        base: config with the model and the recipe.
        out: the config to write; the folder has its name and ends with `_data`.
        skip_bad: leave out what has errors.
        overwrite: replace files that exist.
        epochs: length of the training; None chooses it by the number of images.
    """
    folder = out.with_name(out.stem + GENERATED)
    check_paths(source, base)
    check_output(out, folder, base, overwrite)
    cfg = load_config(base)
    task = task_of(cfg, base)
    found = Defects(masks=task == 'instance', skips=skip_bad)
    # The header of a truncated image is complete. What is left out must be found here.
    how = ALL if skip_bad else HEADERS
    formats = formats_with(HOLDS[task])
    data = checked_source(source, formats, how, found).data
    found.stop('--skip-bad')
    data = with_validation(data)
    with scratch_folder(folder.resolve().parent) as scratch:
        target = Generated(scratch / folder.name, f'{HERE}/{folder.name}')
        datasets = datasets_of(data, target)
        text, lines = config_text(cfg, data, datasets, task, base, out, epochs)
        with atomic_write(out) as config:
            config.write_text(text, encoding='utf-8')
            if target.path.exists():
                move_files(target.path, folder)
    written = f'{out} and {folder}/' if folder.exists() else str(out)
    if (folder / LABELS).exists():
        lines.append(f'note: {folder / LABELS}/ has the segmentation masks as class indices')
    first, *others = lines_about_data(data)
    head = f'{data.description.source}: {data.description.format}, {first}'
    return [head, *others, *lines, f'wrote {written}']


def move_files(source: Path, target: Path) -> None:
    """Move the files in a folder to one in the same file system, in which others may be."""
    if not target.exists():
        os.replace(source, target)
        return
    for path in files_below(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)


def find_base(base: str) -> Path:
    """The config that a path names, or the name of a config of this package, with or without `.py`
    and the folder `configs`.

    Raises:
        UserError: there is none.
    """
    path = Path(base)
    if path.exists():
        return path
    known = shipped_configs()
    if path.stem in known and path.parent.name in ('', 'configs', 'demo'):
        return known[path.stem]
    similar = difflib.get_close_matches(path.stem, known, n=5, cutoff=0.5)
    names = f', such as {", ".join(similar)}' if similar else ''
    raise UserError(
        f'no config at {base}; --base is a config file, or the name of a config of this package'
        f'{names} (cpvt new-config --help lists them)'
    )


def check_paths(source: Path, base: Path) -> None:
    if base.is_dir() and source.suffix.lower() == '.py':
        raise UserError(f'the data and --base are swapped: {base} is a folder, {source} a config')
    if base.is_dir() or base.is_file() and not is_config_name(base):
        kinds = ', '.join(CONFIG_SUFFIXES)
        raise UserError(f'--base must be a config with the suffix {kinds}, got {base}')


def check_output(out: Path, folder: Path, base: Path, overwrite: bool) -> None:
    if out.suffix != '.py' or base.exists() and out.exists() and base.samefile(out):
        raise UserError(f'--out must be a .py file other than the base, got {out}')
    path = os.path.abspath(out)
    if re.search(r"""['"\\{}\n]""", path):
        raise UserError(f'the path of --out must have no quotes, braces and backslashes: {path}')
    check_file(out)
    check_folder(folder)
    check_new(out, folder, overwrite=overwrite)


# The config


def config_text(
    cfg: Config,
    data: DataSet,
    datasets: dict[str, dict[str, Any]],
    task: str,
    base: Path,
    out: Path,
    epochs: Optional[int] = None,
) -> tuple[str, list[str]]:
    """The text of the config `out`, and lines for people; `cfg` is the config at `base`."""
    here = Path(os.path.abspath(out)).parent
    train = data.splits['train']
    sizes = np.array([image.size for image in train.images], float)
    has_ignored = any(item.is_ignored for item in train.objects)
    scaled = Scales.of(cfg, sizes, task)
    images = len(train.images) * repetitions(cfg.train_dataloader.dataset)
    recipe = adapted_recipe(cfg, images, epochs)
    metainfo: dict[str, Any] = {'classes': tuple(data.classes)}
    if data.masks:
        palette = str(list(palette_of(data)))
        metainfo['palette'] = Code(palette)  # mmengine gives each number a line
    values: dict[str, Any] = {
        '_base_': relative(Path(os.path.abspath(base)), here),
        'data_root': f'{HERE}/{relative(Path(os.path.abspath(data.description.root)), here)}',
        'metainfo': metainfo,
    }
    changes = model_changes(cfg.model, len(data.classes), scaled, has_ignored)
    if changes:
        values['model'] = changes
    for key, pipeline in (
        ('train_pipeline', pipeline_of(cfg, 'train')),
        ('test_pipeline', pipeline_of(cfg, 'val')),
        ('tta_pipeline', cfg.get('tta_pipeline')),
    ):
        if pipeline:
            is_test = key == 'test_pipeline'
            reduces_zero = datasets['train'].get('reduce_zero_label', False)
            values[key] = scaled.pipeline(pipeline, reduces_zero, is_test)
    values |= loader_settings(cfg, datasets, task, base) | recipe.settings
    comments = dict(recipe.comments)
    if scaled.keeps_resolution:
        comments['train_pipeline'] = 'Images keep their resolution, as with cpvt infer --tile.'
    elif scaled.scale != 1:
        comments['train_pipeline'] = f'The base resizes to {scaled.before}.'
    classes = amount(len(data.classes), 'class', 'classes')
    shown = shlex.quote(out.name)
    head = (
        f'# {classes} ({data.description.format}). {WRITTEN}\n'
        f'#   cpvt check-data {shown}\n'
        f'#   cpvt train {shown}\n'
    )
    lines = [scaled.line(sizes, objects_in(train)), recipe.line, recipe.reason]
    if has_ignored and not ignore_objects(cfg.model.to_dict()):
        lines.append(
            'note: the model of the base cannot ignore objects in training: those that are ignored '
            'count as background'
        )
    return head + text_of_settings(values, comments), lines


def objects_in(split: Split) -> np.ndarray:
    """(M, 3) of the objects that are not ignored: root of the area of the box, height and width
    of the image."""
    found = []
    for image in split.images:
        for item in image.objects:
            if not item.is_ignored:
                found.append((max(item.box[2] * item.box[3], 0) ** 0.5, *image.size))
    return np.array(found).reshape(-1, 3)


def loader_settings(
    cfg: Config, datasets: dict[str, dict[str, Any]], task: str, base: Path
) -> dict[str, Any]:
    """The settings of the data loaders and metrics."""
    values: dict[str, Any] = {}
    common = dict(data_root=Code('data_root'), metainfo=Code('metainfo'))
    for split in SPLITS:
        found = datasets.get(split) or datasets['val']
        pipeline = Code('train_pipeline' if split == 'train' else 'test_pipeline')
        dataset = dict(**found, **common, pipeline=pipeline)
        if split == 'train':
            dataset = wrapped(cfg, dataset, base)
        # Without _delete_ mmengine would merge it into the base's.
        values[f'{split}_dataloader'] = dict(dataset=dict(_delete_=True, **dataset))
        if split != 'train':
            values[f'{split}_evaluator'] = dict(_delete_=True, **metric_of(found, task))
    return values


def metric_of(dataset: dict[str, Any], task: str) -> dict[str, Any]:
    """The metric of a data set."""
    if task == 'segmentation':
        return dict(type='IoUMetric', iou_metrics=['mIoU'])
    file = dataset['ann_file']
    return dict(
        type='CocoMetric',
        ann_file=file if file.startswith(HERE) else Code(f'data_root + {"/" + file!r}'),
        metric=['bbox', 'segm'] if task == 'instance' else 'bbox',
    )
