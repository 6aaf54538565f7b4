"""Prints the README's table of families of models, computed from the models.

    python -m benchmarks.model_table
    python -m benchmarks.model_table --write

With --write it updates that table, the tables of docs/models.md (all models) and
configs/metafile.yml (the configs, for mim).
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from cpvt_pyramid.app.tooling.command import imports_of, prepare_for_torch, run_command
from cpvt_pyramid.app.tooling.report import markdown_table

prepare_for_torch()  # before torch is imported

with imports_of('model_table'):
    import timm
    import yaml
    from mmengine.config import Config
    from mmengine.registry import MODELS, init_default_scope

    import cpvt_pyramid.timm_models  # noqa: F401  registers the models
    from benchmarks import ROOT
    from benchmarks.costs import count_operations, count_parameters, meta_model
    from benchmarks.pages import README, with_section
    from benchmarks.published import (
        BACKBONES,
        COLUMNS,
        PAPERS,
        RECIPES,
        RETINANET_1X,
        SEGFORMER,
        SEMANTIC_FPN,
        Recipe,
        family_of,
        published_by,
    )
    from cpvt_pyramid import ARCHS, COLUMNAR_ARCHS, CPVT, CPVTPyramid, PEGConfig
    from cpvt_pyramid.checkpoints.downloads import IN_PACKAGE
    from cpvt_pyramid.checkpoints.formats import FORMATS, to_format
    from cpvt_pyramid.tasks.trained import CLASSES, METRICS, TRAINED

MODELS_PAGE = ROOT / 'docs' / 'models.md'
METAFILE = ROOT / 'configs' / 'metafile.yml'

SIZES = ((224, 224), (800, 1333))  # height and width of the images that operations are counted for
COSTS = ('parameters', *(f'GFLOPs, {h} x {w}' for h, w in SIZES))


# The README


def readme_table() -> str:
    """A row for each family of pyramids."""
    families = defaultdict(list)
    for arch in ARCHS:
        if arch in BACKBONES:
            families[family_of(arch).title].append(arch)
    head = [
        *('family', '`arch`', 'parameters', 'ImageNet top-1', 'RetinaNet 1x AP', 'ADE20K mIoU'),
        'published by',
    ]
    return markdown_table(head, [family_row(title, archs) for title, archs in families.items()])


def family_row(title: str, archs: Sequence[str]) -> list[str]:
    """Names, and the ranges of parameters and published results."""
    tops = [BACKBONES[arch].top1 for arch in archs]
    box_aps = [RETINANET_1X.results[arch][0] for arch in archs if RETINANET_1X.results.get(arch)]
    segmentor = 'SegFormer' if archs[0] in SEGFORMER.results else 'Semantic FPN'
    results = {**SEMANTIC_FPN.results, **SEGFORMER.results}
    mious = [results[arch][0] for arch in archs if results.get(arch)]
    smallest, largest = (meta_model(CPVTPyramid, arch) for arch in (archs[0], archs[-1]))
    return [
        title,
        ', '.join(f'`{arch}`' for arch in archs),
        f'{parameters(smallest)} to {parameters(largest)}',
        span(tops),
        span(box_aps),
        f'{span(mious)} ({segmentor})',
        sources(archs),
    ]


def sources(archs: Sequence[str]) -> str:
    """Who published the accuracies of pyramids of a family: the authors, but for some metrics."""
    family = family_of(archs[0]).name
    found = ['authors']
    for metric, recipe in (('AP', RETINANET_1X), ('mIoU', SEGFORMER)):
        if family in recipe.others and any(recipe.results.get(arch) for arch in archs):
            found.append(f'{metric}: {recipe.others[family]}')
    return '; '.join(found)


def span(values: Sequence[float]) -> str:
    """The smallest and the largest of published values; nothing without values."""
    if not values:
        return ''
    if min(values) == max(values):
        return f'{values[0]:.1f}'
    return f'{min(values):.1f} to {max(values):.1f}'


def parameters(model: Any) -> str:
    """The number of parameters, in millions."""
    return f'{count_parameters(model) / 1e6:.1f}M'


# docs/models.md


def models_page(text: str) -> str:
    """The text of docs/models.md with the current tables."""
    tables = {
        'pyramids': (
            (
                *('`arch`', 'published as', *COSTS),
                *('ImageNet top-1', 'RetinaNet 1x AP', 'Semantic FPN mIoU', 'published by'),
            ),
            [pyramid_row(arch) for arch in ARCHS],
        ),
        'weights': (
            ('name', 'model', 'source', 'licence', 'size', 'format'),
            published_weights(),
        ),
        'trained': (
            (
                *('name', 'config', 'data', 'classes', 'published', 'parameters', 'download'),
                *('needs', 'weights'),
            ),
            trained_models(),
        ),
        'columnar': (('code', 'published as', *COSTS, 'ImageNet top-1'), columnar_rows()),
        'recipes': (
            ('config', 'backbone', 'head', 'data', 'parameters', 'published', 'by'),
            [recipe_row(entry) for entry in metafile_entries()],
        ),
        'formats': (('format', 'whose files', 'models'), format_rows()),
    }
    for name, (head, rows) in tables.items():
        text = with_section(text, name, markdown_table(head, rows))
    return text


def costs(model: Any) -> list[str]:
    """Parameters, and GFLOPs (billions of multiply-additions) of an image of each of SIZES."""
    counts = [count_operations(model, *size) for size in SIZES]
    return [parameters(model), *(f'{count / 2 / 1e9:.1f}' for count in counts)]


def pyramid_row(arch: str) -> list[object]:
    """Names, costs and published accuracies of a pyramid."""
    name = 'ours, for demo and tests'
    top1: object = ''
    by = ''
    if arch in BACKBONES:
        name = BACKBONES[arch].name
        top1 = BACKBONES[arch].top1
        by = sources([arch])
    box_ap = RETINANET_1X.results.get(arch, ('',))[0]
    miou = SEMANTIC_FPN.results.get(arch, ('',))[0]
    if arch in SEGFORMER.results:
        miou = f'{SEGFORMER.results[arch][0]:.1f} (SegFormer)'
    model = meta_model(CPVTPyramid, arch)
    return [f'`{arch}`', name, *costs(model), top1, box_ap, miou, by]


def trained_models() -> Iterator[list[object]]:
    """The rows of `cpvt models`, with links to the configs and files."""
    for name, model in TRAINED.items():
        yield [
            f'`{name}`',
            f'[{model.config}](../configs/{model.config}.py)',
            model.data,
            len(CLASSES[model.data]),
            f'{model.result} {METRICS[model.data]}',
            f'{model.parameters / 1e6:.1f}M',
            f'[{model.megabytes:.0f} MB]({model.url})',
            model.needs,
            model.licence,
        ]


def columnar_rows() -> Iterator[list[object]]:
    """Code, name, costs and accuracy of the columnar classifiers."""
    for name, options, accuracies in COLUMNS:
        for arch, letter, top1 in zip(COLUMNAR_ARCHS, ('Ti', 'S', 'B'), accuracies):
            arguments = [repr(arch), *(f'{key}={value!r}' for key, value in options.items())]
            model = meta_model(CPVT, arch, **options)
            yield [f'`CPVT({", ".join(arguments)})`', name.format(letter), *costs(model), top1]


def recipe_row(entry: dict) -> list[str]:
    """Config, backbone, head, data, parameters, results and their source, of an entry of the
    metafile."""
    meta = entry['Metadata']
    found = []
    for result in entry.get('Results', ()):
        found += [f'{value} {metric}' for metric, value in result['Metrics'].items()]
    *backbone, head = meta['Architecture']
    return [
        f'[{entry["Name"]}](../{entry["Config"]})',
        ', '.join(backbone),
        head,
        meta['Training Data'],
        f'{meta["Parameters"] / 1e6:.1f}M',
        ', '.join(found) or 'none',
        meta.get('Results Source', '').removesuffix(NOT_REPRODUCED),
    ]


def weights_of(arch: str) -> str:
    """The name of the published weights of a backbone, from a config that starts from them."""
    for recipe in RECIPES:
        if arch in recipe.results:
            config = read_config(recipe.config.format(BACKBONES[arch].short))
            return config.model.backbone.init_cfg.checkpoint
    return f'timm://{arch}.in1k'


def published_weights() -> Iterator[list[str]]:
    """For each file that a config starts from: name, model, source, licence, size and format."""
    for arch in BACKBONES:
        if arch not in ARCHS:
            continue
        family = family_of(arch)
        if family.name == 'MiT':  # whose files have no classifier
            model = meta_model(CPVTPyramid, arch)
        else:
            model = meta_model(timm.create_model, arch, num_classes=1000)
        size = megabytes(4 * count_parameters(model))
        form = f'`{family.form}`'
        yield [f'`{weights_of(arch)}`', f'`{arch}`', family.weights, family.licence, size, form]
    name = f'`{weights_of("cpvt_tiny")}`'
    size = megabytes(4 * count_parameters(meta_model(timm.create_model, 'deit_tiny_patch16_224')))
    ours = "`cpvt_tiny` with `position='learned'` (DeiT-Ti)"
    yield [name, ours, 'timm', 'Apache-2.0', size, '`vit`']
    for path in sorted(IN_PACKAGE.glob('*.safetensors')):
        name = f'`cpvt://{path.stem}`'
        source = 'this package, [distilled](models.md#weights-in-this-package)'
        size = megabytes(path.stat().st_size)
        yield [name, f'`{path.stem}`', source, 'Apache-2.0', size, '`ours`']


def megabytes(size: int) -> str:
    return f'{size / 1e6:.0f} MB'


def format_rows() -> Iterator[list[str]]:
    """For each checkpoint format, who uses it and which models it can hold."""
    samples = {
        'PCPVT': meta_model(CPVTPyramid, 'pcpvt_nano'),
        'SVT': meta_model(CPVTPyramid, 'svt_small'),
        'PVT': meta_model(CPVTPyramid, 'pvt_tiny'),
        'PVTv2, MiT': meta_model(CPVTPyramid, 'pvt_v2_b0'),
        'PVTv2-B2-Li': meta_model(CPVTPyramid, 'pvt_v2_b2_li'),
        'columnar with a learned position embedding (DeiT)': meta_model(
            CPVT, 'cpvt_tiny', position='learned'
        ),
        'columnar with PEG (CPVT)': meta_model(CPVT, 'cpvt_tiny', peg=PEGConfig(after=range(6))),
    }
    for key, form in FORMATS.items():
        fitting = []
        for name, model in samples.items():
            try:
                to_format(model.state_dict(), key)
            except ValueError:
                continue
            fitting.append(name)
        names = 'all' if len(fitting) == len(samples) else ', '.join(fitting)
        yield [f'`{key}`', form.owners, names]


# configs/metafile.yml


DATA = {'CocoDataset': 'COCO', 'ADE20KDataset': 'ADE20K', 'CityscapesDataset': 'Cityscapes'}
METAFILE_HEADER = """\
# The configs, for mim. Generated by benchmarks/model_table.py. Results are published ones, of the
# paper or the library that is named; they were not reproduced here. `cpvt models` lists trained
# models. Parameters are counted.
"""
NOT_REPRODUCED = ', not reproduced'


def metafile() -> str:
    """The text of configs/metafile.yml: every config, with its published result."""
    collections = [
        {'Name': head, 'Paper': f'https://arxiv.org/abs/{paper}'} for head, paper in PAPERS.items()
    ]
    content = {'Collections': collections, 'Models': metafile_entries()}
    return METAFILE_HEADER + yaml.safe_dump(content, sort_keys=False, width=100)


@functools.cache
def metafile_entries() -> list[dict]:
    """The entries of the metafile."""
    entries = []
    for recipe in RECIPES:
        for arch in recipe.results:
            entries.append(metafile_entry(recipe, arch))
    return entries


def metafile_entry(recipe: Recipe, arch: str) -> dict:
    """The entry of a config, in the schema of OpenMMLab's metafiles."""
    name = recipe.config.format(BACKBONES[arch].short)
    cfg = read_config(name)
    dataset = DATA[cfg.train_dataloader.dataset.type]
    meta = {
        'Architecture': [*BACKBONES[arch].name.split(', '), recipe.head],
        'Parameters': parameters_of(name.removesuffix('_3x')),  # the same model
        'Training Data': dataset,
        'Batch Size': cfg.auto_scale_lr.base_batch_size,
    }
    if epochs := cfg.train_cfg.get('max_epochs'):
        meta['Epochs'] = epochs
    else:
        meta['Iterations'] = cfg.train_cfg.max_iters
    entry = {
        'Name': name,
        'In Collection': recipe.head,
        'Config': f'configs/{name}.py',
        'Metadata': meta,
    }
    values = recipe.results[arch]
    if values:
        meta['Results Source'] = f'{published_by(recipe, arch)}{NOT_REPRODUCED}'
        by_task: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (metric, task), value in zip(recipe.metrics.items(), values):
            by_task[task][metric] = value
        entry['Results'] = []
        for task, metrics in by_task.items():
            entry['Results'].append({'Task': task, 'Dataset': dataset, 'Metrics': metrics})
    return entry


@functools.cache
def read_config(name: str) -> Config:
    return Config.fromfile(ROOT / 'configs' / f'{name}.py')


@functools.cache
def parameters_of(name: str) -> int:
    """The number of parameters of a config's model."""
    cfg = read_config(name)
    init_default_scope(cfg.default_scope)
    return count_parameters(meta_model(MODELS.build, cfg.model))


def model_table(*, write: bool = False) -> None:
    """Print the table.

    Args:
        write: update README.md, docs/models.md and configs/metafile.yml instead
    """
    if not write:
        print(readme_table(), end='')
        return
    README.write_text(with_section(README.read_text(), 'models', readme_table()))
    MODELS_PAGE.write_text(models_page(MODELS_PAGE.read_text()))
    METAFILE.write_text(metafile())


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(model_table, argv)


if __name__ == '__main__':
    sys.exit(main())
