"""A config for a folder with data: recognizes its layout and adapts a recipe to it."""

import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Union

import numpy as np
from mmengine.config import Config

from ...results.drawing import class_palette
from ...tooling.command import UserError, as_called
from ...tooling.files import check_file, write_text
from ..config.load import kind_of, load_config
from .coco import read_coco_files
from .config_source import Code, text_of_settings
from .defects import Defects, Problem
from .folder import GENERATED, SPLITS, Files, NotRecognized
from .label_maps import LabelMaps, Pair, find_label_maps, write_indices
from .objects import Objects, Split, divided, with_masks
from .recipes import Scales, adapted_recipe, pipeline_of, steps
from .voc import read_voc
from .yolo import read_yolo

HERE = '{{ fileDirname }}'


class Data(NamedTuple):
    """The data sets of a config, and what is known about them."""

    layout: str
    classes: list[str]
    palette: list[tuple[int, int, int]]
    datasets: dict[str, dict]  # of train, val and test, without the settings they share
    images: dict[str, int]  # number of images of train, val and test
    sizes: np.ndarray  # (N, 2) heights and widths of the training images
    lines: list[str]  # what was found
    objects: np.ndarray = np.zeros((0, 3))  # (M, 3): root of the area, size of the image
    reduce_zero_label: bool = False


class Generated(NamedTuple):
    """The folder of what is written next to a config."""

    path: Path
    name: str  # in the config

    def write(self, name: str, text: str) -> str:
        """Write a file; returns its path as the config has it."""
        self.path.mkdir(exist_ok=True)
        (self.path / name).write_text(text, encoding='utf-8')
        return f'{self.name}/{name}'


def new_config(data: Path, base: Path, out: Path, skip_bad: bool, overwrite: bool) -> list[str]:
    """Write a config for a folder with data, and the files that it needs next to it.

    Args:
        data: the folder.
        base: config with the model and the recipe.
        out: the config to write. Converted annotations go to a folder next to it, OUT_data.
        skip_bad: leave out what has errors.
        overwrite: replace files that exist.

    Returns:
        Lines for people: what was found and written.
    """
    folder = out.with_name(out.stem + GENERATED)
    check_output(out, folder, base, overwrite)
    cfg = load_config(base)
    task = task_of(cfg, base)
    with TemporaryDirectory(dir=out.parent, prefix='.') as temporary:
        partial = Path(temporary, folder.name)
        with reported(Defects(), skip_bad) as defects:
            if task == 'segmentation':
                found = find_label_maps(data, defects)
            else:
                found = find_objects(data, defects, skip_bad)
                found = with_masks(found, defects) if task == 'instance' else found
        described = describe(found, data, Generated(partial, f'{HERE}/{folder.name}'))
        text, lines = config_text(cfg, described, task, data, base, out)
        if partial.exists():
            shutil.copytree(partial, folder, dirs_exist_ok=True)
        write_text(out, text)
    written = f'{out} and {folder}/' if folder.exists() else str(out)
    return [*described.lines, *lines, f'wrote {written}']


def check_output(out: Path, folder: Path, base: Path, overwrite: bool) -> None:
    if out.suffix != '.py' or base.exists() and out.exists() and base.samefile(out):
        raise UserError(f'--out must be a .py file other than the base, got {out}')
    if re.search(r"""['"\\{}\n]""", os.path.abspath(out)):
        raise UserError(f'the path of --out must have no quotes, braces and backslashes, got {out}')
    for path in (out, folder):
        if path.exists() and not overwrite:
            raise UserError(f'{path} exists; choose another --out, or replace it with --overwrite')
    check_file(out)


def task_of(cfg: Config, base: Path) -> str:
    """detection, instance or segmentation."""
    loaders = [f'{split}_dataloader' for split in ('train', 'val', 'test')]
    evaluators = ['val_evaluator', 'test_evaluator']
    for key in ('train_cfg', 'optim_wrapper', *loaders, *evaluators):
        if not cfg.get(key):
            raise UserError(f'{base} must be the config of a training; it has no {key}')
    if cfg.default_scope == 'mmseg':
        return 'segmentation'
    pipeline = pipeline_of(cfg, 'train')
    loads = [step for step in steps(pipeline) if kind_of(step).startswith('LoadAnn')]
    if any(step.get('with_seg') for step in loads) or 'Panoptic' in kind_of(cfg.model):
        raise UserError(f'{base} is panoptic; the base must detect objects or segment images')
    return 'instance' if any(step.get('with_mask') for step in loads) else 'detection'


# Data


@contextmanager
def reported(defects: Defects, skip_bad: bool) -> Iterator[Defects]:
    """Print what was found, also where reading ends with an error, which it may be the cause of;
    then stop at errors."""
    try:
        yield defects
    finally:
        for problem in defects.problems():
            print(problem)
    defects.stop(skip_bad)


def find_objects(root: Path, defects: Defects, skip_bad: bool = False) -> Objects:
    """Read the boxes and polygons in a folder. What is returned is without what `defects` collects;
    for COCO files, if `skip_bad`.

    Raises:
        NotRecognized: no layout is recognized.
        UserError: a file is broken as a whole.
    """
    files = Files(root)
    found = (
        read_coco_files(files, defects, skip_bad, torn=False)
        or read_yolo(files, defects)
        or read_voc(files, defects)
        or read_coco_files(files, defects, skip_bad, torn=True)
    )
    if found:
        return found
    raise NotRecognized(
        f'{root} has none of the layouts COCO (a JSON file), YOLO (data.yaml or labels/*.txt) and '
        'Pascal VOC (*.xml). Label maps need a segmentor as base, such as '
        'configs/semantic_fpn_cpvt_s.py'
    )


@contextmanager
def config_of_folder(data: Path, out_dir: Path) -> Iterator[tuple[Config, list[Problem]]]:
    """A config with the data in a folder, for their check, and what was found wrong so far."""
    defects = Defects()
    with TemporaryDirectory() as temporary:
        with reported(defects, skip_bad=True):
            try:
                found = find_objects(data, defects, skip_bad=True)
            except NotRecognized as error:
                try:
                    found = find_label_maps(data, defects)
                except NotRecognized as other:
                    raise UserError(f'{error}. {other}') from other
            described = describe(found, data, Generated(Path(temporary), temporary))
        print('\n'.join(described.lines))
        scope = 'mmdet' if isinstance(found, Objects) else 'mmseg'
        settings = {'default_scope': scope, 'work_dir': str(out_dir)}
        common = dict(
            data_root=os.path.abspath(data),
            metainfo=dict(classes=tuple(described.classes), palette=list(described.palette)),
        )
        for split, dataset in described.datasets.items():
            settings[f'{split}_dataloader'] = dict(dataset={**dataset, **common, 'pipeline': []})
        # Warnings about a COCO file come again when the file is checked with its images.
        known = [p for p in defects.problems() if p.is_error or described.layout != 'COCO']
        yield Config(settings), known


def describe(found: Union[Objects, LabelMaps], data: Path, target: Generated) -> Data:
    """The data sets in a folder; writes to `target` what mm cannot read as it is."""

    def images_of(split: Any) -> list:
        return split.content['images'] if isinstance(split, Split) else split

    splits = {key: split for key, split in found.splits.items() if images_of(split)}
    notes = list(found.notes)
    if 'train' not in splits:
        raise UserError(f'{data} has no training data, only {" and ".join(splits)}')
    if 'val' not in splits:
        train = splits.pop('train')
        parts = divided(images_of(train))
        notes.append(
            f'no validation data: {len(parts[1])} training images, chosen at random with seed 0, '
            'are used for it. Divide frames of a video or views of one scene yourself'
        )
        if isinstance(train, Split):
            parts = tuple(map(train.of_images, parts))
        splits = {'train': parts[0], 'val': parts[1], **splits}
    if isinstance(found, Objects):
        described = object_data(found, splits, data, target)
    else:
        described = label_map_data(found, splits, data, target, notes)
    names = ', '.join(found.classes[:12]) + (' ...' if len(found.classes) > 12 else '')
    head = f'{data}: {found.layout}, {len(found.classes)} classes: {names}'
    notes = [f'note: {note}' for note in notes]
    return described._replace(lines=[head, *described.lines, *notes])


def object_data(found: Objects, splits: dict[str, Split], data: Path, target: Generated) -> Data:
    """The data of a detector; writes annotations that are no COCO file of the folder."""
    train = splits['train'].content
    if not train['annotations']:
        raise UserError(f'the training data in {data} have no objects')
    datasets, lines = {}, []
    for key, (content, folder, path) in splits.items():
        if path:
            file = relative(path, data)
        else:
            file = target.write(f'{key}.json', json.dumps(content, ensure_ascii=False))
        prefix = dict(img=f'{relative(folder, data)}/'.removeprefix('./'))
        datasets[key] = dict(type='CocoDataset', ann_file=file, data_prefix=prefix)
        if key == 'train':
            datasets[key]['filter_cfg'] = dict(filter_empty_gt=False, min_size=1)
        else:
            datasets[key]['test_mode'] = True
        images, objects = content['images'], content['annotations']
        classes = {category['id']: category['name'] for category in content['categories']}
        common = Counter(classes[a['category_id']] for a in objects).most_common()
        shown = ', '.join(f'{name} {count}' for name, count in common[:8])
        shown += ' ... {} {}'.format(*common[-1]) if len(common) > 8 else ''
        empty = len(images) - len({a['image_id'] for a in objects})
        lines.append(
            f'{key}: {len(images)} images ({empty} without objects), {len(objects)} objects: '
            f'{shown}'
        )
    sizes = {image['id']: (image['height'], image['width']) for image in train['images']}
    sides = [max(a['bbox'][2] * a['bbox'][3], 0) ** 0.5 for a in train['annotations']]
    return Data(
        found.layout, found.classes, class_palette(found.classes), datasets,
        {key: len(split.content['images']) for key, split in splits.items()},
        sizes=np.array([*sizes.values()], float),
        lines=lines,
        objects=np.array([(s, *sizes[a['image_id']]) for s, a in zip(sides, train['annotations'])]),
    )  # fmt: skip


def label_map_data(
    found: LabelMaps,
    splits: dict[str, list[Pair]],
    data: Path,
    target: Generated,
    notes: list[str],
) -> Data:
    """The data of a segmentor; writes lists of images, and label maps where the values of the files
    are no indices or the files are not as BaseSegDataset expects them."""
    groups = {key: grouped(pairs) for key, pairs in splits.items()}
    if found.codes or max(map(len, groups.values())) > 1:
        notes.append('label maps were written as class indices next to the config')
        for key, pairs in splits.items():
            groups[key] = {('', '', f'{target.name}/labels', '.png'): [p.image for p in pairs]}
            for image, label in pairs:
                path = target.path / f'labels/{image}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                write_indices(data / label, path, found)
    datasets, lines = {}, []
    for key, group in groups.items():
        (((images, suffix, maps, map_suffix), names),) = group.items()
        datasets[key] = dict(
            type='BaseSegDataset',
            img_suffix=suffix,
            seg_map_suffix=map_suffix,
            data_prefix=dict(img_path=images, seg_map_path=maps),
            reduce_zero_label=found.reduce_zero_label,
        )
        if not suffix or names != in_folder(data / images, suffix):
            text = ''.join(f'{name}\n' for name in names)
            datasets[key]['ann_file'] = target.write(f'{key}.txt', text)
        lines.append(f'{key}: {len(names)} images')
    counts = Counter(dict(zip(found.classes, found.pixels)))
    total = max(sum(found.pixels), 1)
    shares = [f'{name} {count / total:.1%}' for name, count in counts.most_common(8)]
    lines.append(f'pixels: {", ".join(shares)}' + (' ...' if len(counts) > 8 else ''))
    return Data(
        found.layout, found.classes, found.palette, datasets,
        {key: len(pairs) for key, pairs in splits.items()},
        sizes=np.array([found.sizes[pair.image] for pair in splits['train']], float),
        lines=lines,
        reduce_zero_label=found.reduce_zero_label,
    )  # fmt: skip


def relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


def grouped(pairs: Sequence[Pair]) -> dict[tuple[str, str, str, str], list[str]]:
    """Names of images by what BaseSegDataset adds to them: folder and suffix of images and label
    maps."""
    by_ends = defaultdict(list)
    for pair in pairs:
        image, label = PurePosixPath(pair.image), PurePosixPath(pair.label)
        name = os.path.commonprefix([image.stem, label.stem])
        if name not in (image.stem, label.stem):
            name = re.sub('[ _.-]?[A-Za-z]*$', '', name)
        folders = [list(path.parts[:-1]) for path in (image, label)]
        inner = []
        while all(folders) and folders[0][-1] == folders[1][-1]:
            inner.insert(0, folders[0].pop())
            folders[1].pop()
        ends = image.name[len(name) :], label.name[len(name) :]
        key = '/'.join(folders[0]), ends[0], '/'.join(folders[1]), ends[1]
        by_ends[key].append('/'.join([*inner, name]))
    found = {}
    for (images, suffix, maps, map_suffix), names in by_ends.items():
        parts = os.path.commonprefix([name.split('/')[:-1] for name in names])
        prefix = '/'.join(parts)
        key = joined(images, prefix), suffix, joined(maps, prefix), map_suffix
        found[key] = sorted(name[len(prefix) :].lstrip('/') for name in names)
    return found


def joined(*parts: str) -> str:
    return '/'.join(filter(None, parts))


def in_folder(folder: Path, suffix: str) -> list[str]:
    """The names that BaseSegDataset finds in a folder of images."""
    found = [p.relative_to(folder).as_posix() for p in folder.rglob(f'*{suffix}') if p.is_file()]
    return sorted(name.removesuffix(suffix) for name in found)


# The config


def config_text(
    cfg: Config, data: Data, task: str, root: Path, base: Path, out: Path
) -> tuple[str, list[str]]:
    """The text of the config `out` for the data in `root`, and lines for people about it; `cfg` is
    the config at `base`."""
    here = Path(os.path.abspath(out)).parent
    scaled = Scales.of(cfg, data.sizes, task)
    recipe = adapted_recipe(cfg, data.images['train'])
    settings = {
        '_base_': relative(Path(os.path.abspath(base)), here),
        'data_root': f'{HERE}/{relative(Path(os.path.abspath(root)), here)}',
        'metainfo': dict(classes=tuple(data.classes), palette=list(data.palette)),
    }
    if changes := model_changes(cfg.model, len(data.classes), scaled):
        settings['model'] = changes
    for key, pipeline in (
        ('train_pipeline', pipeline_of(cfg, 'train')),
        ('test_pipeline', pipeline_of(cfg, 'val')),
        ('tta_pipeline', cfg.get('tta_pipeline')),
    ):
        if pipeline:
            settings[key] = scaled.pipeline(pipeline, data.reduce_zero_label)
    settings |= loaders(cfg, data, recipe.batch) | evaluators(data, task) | recipe.settings
    comments = dict(recipe.comments)
    if scaled.scale != 1:
        comments['train_pipeline'] = f'The base resizes to {scaled.before}.'
    count = sum(data.images.values())
    head = f'# {len(data.classes)} classes, {count} images ({data.layout}). ' + as_called(
        'Written by tools/new_config.py.\n'
        f'#   python tools/check_data.py {out.name}\n#   python tools/train.py {out.name}\n'
    )
    lines = [scaled.line(data.sizes, data.objects), recipe.line]
    return head + text_of_settings(settings, comments), lines


def loaders(cfg: Config, data: Data, batch_size: int) -> dict[str, Any]:
    """The settings of the data loaders."""
    found = {}
    workers = min(cfg.train_dataloader.get('num_workers', 2), os.cpu_count() or 1)
    common = dict(data_root=Code('data_root'), metainfo=Code('metainfo'))
    for split in SPLITS:
        batch = dict(batch_size=batch_size) if split == 'train' else {}
        pipeline = Code('train_pipeline' if split == 'train' else 'test_pipeline')
        dataset = data.datasets.get(split) or data.datasets['val']
        # Without _delete_ mmengine would merge it into the base's.
        dataset = dict(_delete_=True, **dataset, **common, pipeline=pipeline)
        found[f'{split}_dataloader'] = dict(**batch, num_workers=workers, dataset=dataset)
    return found


def evaluators(data: Data, task: str) -> dict[str, Any]:
    """The settings of the metrics."""
    found = {}
    for split in ('val', 'test'):
        metric = dict(type='IoUMetric', iou_metrics=['mIoU'])
        if task != 'segmentation':
            file = (data.datasets.get(split) or data.datasets['val'])['ann_file']
            metric = dict(
                type='CocoMetric',
                ann_file=file if file.startswith(HERE) else Code(f'data_root + {"/" + file!r}'),
                metric=['bbox', 'segm'] if task == 'instance' else 'bbox',
            )
        found[f'{split}_evaluator'] = dict(_delete_=True, **metric)
    return found


def model_changes(model: Any, classes: int, scaled: Scales) -> dict:
    """What changes in a model for another number of classes and size of crops."""
    changed = deepcopy(model.to_dict())
    count = set_classes(changed, classes)
    if not count:
        raise UserError('the model of the base has no num_classes')
    size = changed.get('data_preprocessor', {}).get('size')
    if size and scaled.scale < 1:
        changed['data_preprocessor']['size'] = scaled.crops(size)
    return difference(model.to_dict(), changed)


def set_classes(config: Any, classes: int) -> int:
    """Set the number of classes in all heads of a model's config; returns how many there were."""
    if isinstance(config, list):
        return sum(set_classes(child, classes) for child in config)
    if not isinstance(config, dict):
        return 0
    before = config.get('num_classes')
    if 'num_things_classes' in config:
        before = config['num_things_classes'] + config.get('num_stuff_classes', 0)
        config.update(num_things_classes=classes, num_stuff_classes=0)
    elif isinstance(before, int):
        config['num_classes'] = classes
    if before is not None:
        for loss in config.values():
            weights = loss.get('class_weight') if isinstance(loss, dict) else None
            if isinstance(weights, list) and len(weights) == before + 1:  # the last: no object
                loss['class_weight'] = Code(f'[{weights[0]}] * {classes} + [{weights[-1]}]')
            elif isinstance(weights, list):  # those of the base's classes
                loss['class_weight'] = None
    others = ('rpn_head', 'backbone', 'neck', 'data_preprocessor')
    return (before is not None) + sum(
        set_classes(value, classes) for key, value in config.items() if key not in others
    )


def difference(before: dict, after: dict) -> dict:
    """The settings that turn one config into another."""
    changes = {}
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            if inner := difference(before[key], value):
                changes[key] = inner
        elif key not in before or value != before[key]:
            changes[key] = value
    return changes
