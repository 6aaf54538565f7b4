"""Prints the README's table of models, computed from the models.

With --write it updates the table in README.md, docs/models.md (all models) and configs/metafile.yml
(the configs, for mim).
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mmengine.config import Config

    from cpvt_pyramid import Arch, ColumnarArch
    from cpvt_pyramid.flops import Counter

from benchmarks import ROOT
from cpvt_pyramid.tooling.report import markdown_table

README = ROOT / 'README.md'
MODELS_PAGE = ROOT / 'docs' / 'models.md'
METAFILE = ROOT / 'configs' / 'metafile.yml'
BEGIN, END = '<!-- models: benchmarks/model_table.py -->\n', '<!-- end of models -->'


# Published results, PCPVT and SVT: Twins, arXiv 2104.13840, tables 1 to 6; PVT:
# arXiv 2102.12122, section 5; CPVT: arXiv 2102.10882, section 5.


class Backbone(NamedTuple):
    """A published architecture."""

    name: str  # in papers
    short: str  # in names of configs
    top1: float  # on ImageNet


class Recipe(NamedTuple):
    """A training recipe and its published results."""

    config: str  # name of the config, with {} for the backbone's
    head: str
    metrics: dict[str, str]  # task by name
    results: dict[str, tuple[float, ...]]  # values of the metrics by arch; empty: not published


BACKBONES = {
    'pcpvt_small': Backbone('PCPVT-S, CPVTv2-S', 'cpvt_s', 81.2),
    'pcpvt_base': Backbone('PCPVT-B, CPVTv2-B', 'cpvt_b', 82.7),
    'pcpvt_large': Backbone('PCPVT-L, CPVTv2-L', 'cpvt_l', 83.1),
    'pvt_tiny': Backbone('PVT-Tiny', 'pvt_t', 75.1),
    'pvt_small': Backbone('PVT-Small', 'pvt_s', 79.8),
    'pvt_medium': Backbone('PVT-Medium', 'pvt_m', 81.2),
    'pvt_large': Backbone('PVT-Large', 'pvt_l', 81.7),
    'svt_small': Backbone('Twins-SVT-S', 'svt_s', 81.7),
    'svt_base': Backbone('Twins-SVT-B', 'svt_b', 83.2),
    'svt_large': Backbone('Twins-SVT-L', 'svt_l', 83.7),
    'cpvt_tiny': Backbone('CPVT-Ti', 'columnar_cpvt_ti', 73.4),
}
BOX, MASK, SEMANTIC = 'Object Detection', 'Instance Segmentation', 'Semantic Segmentation'
RETINANET_1X = Recipe(
    'retinanet_{}',
    'RetinaNet',
    {'box AP': BOX},
    dict(
        pcpvt_small=(43.0,), pcpvt_base=(44.3,), pcpvt_large=(45.1,),
        pvt_tiny=(36.7,), pvt_small=(40.4,), pvt_medium=(41.9,), pvt_large=(42.6,),
        svt_small=(43.0,), svt_base=(45.3,), svt_large=(45.7,),
    ),
)  # fmt: skip
SEMANTIC_FPN = Recipe(
    'semantic_fpn_{}',
    'Semantic FPN',
    {'mIoU': SEMANTIC},
    dict(
        pcpvt_small=(44.3,), pcpvt_base=(44.9,), pcpvt_large=(46.4,),
        pvt_tiny=(35.7,), pvt_small=(39.8,), pvt_medium=(41.6,), pvt_large=(42.1,),
        svt_small=(43.2,), svt_base=(45.3,), svt_large=(46.7,),
        cpvt_tiny=(),
    ),
)  # fmt: skip
RECIPES = (
    RETINANET_1X,
    Recipe(
        'retinanet_{}_3x',
        'RetinaNet',
        {'box AP': BOX},
        dict(
            pcpvt_small=(45.2,), pcpvt_base=(46.4,), pcpvt_large=(),
            svt_small=(45.6,), svt_base=(46.9,), svt_large=(),
        ),
    ),
    Recipe(
        'mask_rcnn_{}',
        'Mask R-CNN',
        {'box AP': BOX, 'mask AP': MASK},
        dict(
            pcpvt_small=(42.9, 40.0), pcpvt_base=(44.6, 40.9), pcpvt_large=(45.4, 41.5),
            pvt_tiny=(36.7, 35.1), pvt_small=(40.4, 37.8),
            pvt_medium=(42.0, 39.0), pvt_large=(42.9, 39.5),
            svt_small=(43.4, 40.3), svt_base=(45.2, 41.5), svt_large=(45.9, 41.6),
        ),
    ),
    Recipe(
        'mask_rcnn_{}_3x',
        'Mask R-CNN',
        {'box AP': BOX, 'mask AP': MASK},
        dict(
            pcpvt_small=(46.8, 42.6), pcpvt_base=(47.9, 43.2), pcpvt_large=(),
            svt_small=(46.8, 42.6), svt_base=(48.0, 43.0), svt_large=(),
        ),
    ),
    SEMANTIC_FPN,
    Recipe(
        'upernet_{}',
        'UPerNet',
        {'mIoU': SEMANTIC, 'mIoU(ms+flip)': SEMANTIC},
        dict(
            pcpvt_small=(46.2, 47.5), pcpvt_base=(47.1, 48.4), pcpvt_large=(48.6, 49.8),
            svt_small=(46.2, 47.1), svt_base=(47.7, 48.9), svt_large=(48.8, 50.2),
        ),
    ),
    Recipe('dino_{}', 'DINO', {'box AP': BOX}, dict(pcpvt_small=())),
    Recipe('mask2former_{}', 'Mask2Former', {'mIoU': SEMANTIC}, dict(pcpvt_small=())),
)  # fmt: skip
PAPERS = {  # that introduced the heads; arXiv
    'RetinaNet': '1708.02002',
    'Mask R-CNN': '1703.06870',
    'Semantic FPN': '1901.02446',
    'UPerNet': '1807.10221',
    'DINO': '2203.03605',
    'Mask2Former': '2112.01527',
}


# Columnar classifiers: name in the paper, options, ImageNet top-1 of Ti, S and B
COLUMNS = (
    ('CPVT-{}', dict(peg=dict(after=(0, 1, 2, 3, 4, 5))), (73.4, 80.5, 82.3)),
    ('CPVT-{}-GAP', dict(peg=dict(after=(0, 1, 2, 3, 4, 5)), class_token=False), (74.9, 81.5, '')),
    ('DeiT-{}', dict(position='learned'), (72.2, 79.9, 81.8)),
)
SIZES = ((224, 224), (800, 1333))
HEAD = ('parameters', *(f'GFLOPs, {h} x {w}' for h, w in SIZES), 'ImageNet top-1')


def readme_table() -> str:
    """The README's table in Markdown, a row per pyramid."""
    from cpvt_pyramid import ARCHS

    rows = [
        pyramid_row(arch)
        + [recipe.results.get(arch, ('',))[0] for recipe in (RETINANET_1X, SEMANTIC_FPN)]
        for arch in ARCHS
    ]
    head = ['`arch`', 'published as', *HEAD, 'RetinaNet 1x AP', 'Semantic FPN mIoU']
    return markdown_table(head, rows)


@functools.cache
def pyramid_row(arch: str) -> list[object]:
    """Names, parameters, GFLOPs (billions of multiply-additions) of an image, and accuracy.

    The blocks of a stage cost the same, in pairs: a model with one pair per stage is counted.
    """
    from cpvt_pyramid import ARCHS, CPVTPyramid

    name, _, top1 = BACKBONES.get(arch, ('ours, for demo and tests', '', ''))
    row, costs = ARCHS[arch], [millions(CPVTPyramid, arch)]
    for counter in count_pyramid(row._replace(depths=(2, 2, 2, 2))):
        pairs = [counter.by_module[f'CPVTPyramid.blocks.{stage}'] for stage in range(4)]
        more = sum(pair * (depth / 2 - 1) for pair, depth in zip(pairs, row.depths))
        costs.append(f'{(counter.total + more) / 1e9:.1f}')
    return [f'`{arch}`', name, *costs, top1]


@functools.cache
def count_pyramid(arch: Arch) -> list[Counter]:
    from cpvt_pyramid import CPVTPyramid

    return list(count(CPVTPyramid, arch))


def count(model_class: type, arch: Arch | ColumnarArch, **options: object) -> Iterator[Counter]:
    """Counts a pass of one image of each of SIZES."""
    import torch

    from cpvt_pyramid import ops
    from cpvt_pyramid.flops import Counter

    with torch.device('meta'):
        model, images = model_class(arch, **options), [torch.empty(1, 3, *size) for size in SIZES]
    for image in images:
        with Counter() as counter, torch.no_grad(), ops.plain():  # which is quicker to count
            model(image)
        yield counter


def millions(model_class: type, arch: str, **options: object) -> str:
    """Parameters of a model."""
    import torch

    with torch.device('meta'):
        return f'{sum(p.numel() for p in model_class(arch, **options).parameters()) / 1e6:.1f}M'


MODELS_PAGE_TEXT = """\
# Models

Generated by `benchmarks/model_table.py` (`make table`). Parameters and GFLOPs (billions of
multiply-additions for one image) are counted. Accuracies are the published ones; they were not
reproduced here.

## Pyramids

`CPVTPyramid(arch)`, or `timm.create_model(arch)` after `import cpvt_pyramid.timm_models`. The
figures are the backbone's.

{pyramids}
PCPVT and SVT: Twins, [2104.13840](https://arxiv.org/abs/2104.13840), tables 1 and 2. PVT:
[2102.12122](https://arxiv.org/abs/2102.12122), table 2.

## Published weights

`load_weights(model, NAME)`, `init_cfg=dict(type='Pretrained', checkpoint=NAME)` and
`cpvt convert-weights NAME` load all of them; `cpvt export ARCH NAME`,
`python -m experiments.position probe --model ARCH --checkpoint NAME` and
`timm.create_model(ARCH, pretrained=True)` load those of pyramids. `hf://OWNER/REPO/FILE`, any other
file on the Hugging Face hub, and any `https://` address can take the place of `NAME`. `timm://` and
`hf://` need `pip install '.[hub]'`.

A file is downloaded once, into the cache of huggingface_hub or, from an address, of torch.hub,
which finds it by its file name alone: files at different addresses need different names.
If an address ends in a SHA-256 or the beginning of one (`NAME-HASH.pth`), the download is checked.
None of the names below has a hash. Sizes are computed from the number of parameters, in float32.

{weights}
## The columnar CPVT

These are classifiers: `from cpvt_pyramid import CPVT`, or in timm's registry `cpvt_tiny_0to5`,
`cpvt_tiny_0to5_gap` and so on. `DenseCPVT` takes the same options and is a backbone, in Python and
in configs (`type='DenseCPVT'`).

{columns}
CPVT, [2102.10882](https://arxiv.org/abs/2102.10882), section 5; DeiT,
[2012.12877](https://arxiv.org/abs/2012.12877), as cited there. The paper's other variants and their
results are in [`position/peg.py`](../cpvt_pyramid/position/peg.py), class `PEGConfig`.

## Recipes

{recipes}
PCPVT and SVT: Twins, tables 3 to 6; PVT: its section 5. Parameters are those of the whole model;
the papers' numbers are higher by half a million or more, because their code keeps the classifier.

## Checkpoints

`load_weights`, `load_state_dict`, `init_cfg`, `load_from` and timm load all of these formats, of a
backbone alone or within a detector or segmentor. The format is recognized by its keys.
`cpvt convert-weights` writes all of them.

{formats}"""


def models_page() -> str:
    """The text of docs/models.md: models, costs, results and checkpoint formats."""
    from cpvt_pyramid import ARCHS, COLUMNAR_ARCHS, CPVT

    columns = []
    for name, options, results in COLUMNS:
        for (arch, row), letter, top1 in zip(COLUMNAR_ARCHS.items(), ('Ti', 'S', 'B'), results):
            code = ', '.join((repr(arch), *(f'{k}={v!r}' for k, v in options.items())))
            costs = [millions(CPVT, arch, **options)]
            for counter in count(CPVT, row._replace(depth=7), **options):
                # The blocks after the last PEG cost the same.
                total = counter.total + (row.depth - 7) * counter.by_module['CPVT.blocks.6']
                costs.append(f'{total / 1e9:.1f}')
            columns.append([f'`CPVT({code})`', name.format(letter), *costs, top1])
    recipes = []
    for model in models():
        meta, results = model['Metadata'], model.get('Results', ())
        found = [f'{value} {name}' for each in results for name, value in each['Metrics'].items()]
        link, backbone = f'[{model["Name"]}](../{model["Config"]})', meta['Architecture'][:-1]
        cells = [link, ', '.join(backbone), model['In Collection'], meta['Training Data']]
        recipes.append([*cells, f'{meta["Parameters"] / 1e6:.1f}M', ', '.join(found) or 'none'])
    return MODELS_PAGE_TEXT.format(
        pyramids=markdown_table(['`arch`', 'published as', *HEAD], map(pyramid_row, ARCHS)),
        weights=markdown_table(
            ['name', 'model', 'source', 'licence', 'size', 'format'], published_weights()
        ),
        columns=markdown_table(['code', 'published as', *HEAD], columns),
        recipes=markdown_table(
            ['config', 'backbone', 'head', 'data', 'parameters', 'published'], recipes
        ),
        formats=markdown_table(['format', 'whose files', 'models'], formats()),
    )


def published_weights() -> Iterator[list[str]]:
    """For each file that a config starts from: name, model, source, licence, size and format."""
    import timm
    import torch

    import cpvt_pyramid.timm_models  # noqa: F401  registers the models

    for arch, backbone in BACKBONES.items():
        cfg = read(SEMANTIC_FPN.config.format(backbone.short))
        name, model = cfg.model.backbone.init_cfg.checkpoint, f'`{arch}`'
        source, form = ("PVT's authors", 'pvt') if arch.startswith('pvt') else ('timm', 'ours')
        if arch == 'cpvt_tiny':
            model, form = "`cpvt_tiny` with `position='learned'` (DeiT-Ti)", 'vit'
        with torch.device('meta'):
            published = timm.create_model('deit_tiny_patch16_224' if form == 'vit' else arch)
        size = 4 * sum(p.numel() for p in published.parameters())
        yield [f'`{name}`', model, source, 'Apache-2.0', f'{size / 1e6:.0f} MB', f'`{form}`']


def formats() -> Iterator[list[str]]:
    """For each checkpoint format, who uses it and which models it can hold."""
    import torch

    from cpvt_pyramid import CPVT, CPVTPyramid, PEGConfig
    from cpvt_pyramid.checkpoints.formats import FORMATS, to_format

    owners = {
        'ours': 'the authors of Twins; timm (`twins_*`); this package',
        'mmseg': 'mmsegmentation (`PCPVT`, `SVT`)',
        'mmpretrain': 'mmpretrain (`PCPVT`, `SVT`)',
        'mmdet': 'mmdetection (`PyramidVisionTransformer`)',
        'pvt': 'the authors of PVT',
        'vit': 'the authors of DeiT; timm (`deit_*`, `vit_*`)',
        'mmpretrain_vit': 'mmpretrain (`VisionTransformer`)',
    }
    with torch.device('meta'):
        samples = {
            'PCPVT': CPVTPyramid('pcpvt_nano'),
            'SVT': CPVTPyramid('svt_small'),
            'PVT': CPVTPyramid('pvt_tiny'),
            'columnar with a learned table (DeiT)': CPVT('cpvt_tiny', position='learned'),
            'columnar with PEG (CPVT)': CPVT('cpvt_tiny', peg=PEGConfig(after=range(6))),
        }
    for key in ('ours', *FORMATS):
        fitting = []
        for name, model in samples.items():
            try:
                to_format(model.state_dict(), key)
            except ValueError:
                continue
            fitting.append(name)
        yield [
            f'`{key}`',
            owners[key],
            'all' if len(fitting) == len(samples) else ', '.join(fitting),
        ]


def with_table(text: str) -> str:
    """The README's text with the current table between the markers."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + readme_table() + END + rest.split(END)[1]


METAFILE_HEADER = """\
# The configs, for mim. Generated by benchmarks/model_table.py. Results are the backbones'
# published ones, not reproduced here; there are no weights of whole models. Parameters are counted.
"""


def metafile() -> str:
    """The text of configs/metafile.yml: every config, with its published result."""
    import yaml

    collections = [
        {'Name': head, 'Paper': f'https://arxiv.org/abs/{paper}'} for head, paper in PAPERS.items()
    ]
    content = {'Collections': collections, 'Models': models()}
    return METAFILE_HEADER + yaml.safe_dump(content, sort_keys=False, width=100)


@functools.cache
def models() -> list[dict]:
    """The entries of the metafile."""
    entries = []
    for recipe in RECIPES:
        for arch, values in recipe.results.items():
            name = recipe.config.format(BACKBONES[arch].short)
            cfg = read(name)
            dataset = 'COCO' if cfg.default_scope == 'mmdet' else 'ADE20K'
            epochs, iterations = (cfg.train_cfg.get(key) for key in ('max_epochs', 'max_iters'))
            model = {
                'Name': name,
                'In Collection': recipe.head,
                'Config': f'configs/{name}.py',
                'Metadata': {
                    'Architecture': [*BACKBONES[arch].name.split(', '), recipe.head],
                    'Parameters': parameters_of(name.removesuffix('_3x')),  # the same model
                    'Training Data': dataset,
                    'Batch Size': cfg.auto_scale_lr.base_batch_size,
                    **({'Epochs': epochs} if epochs else {'Iterations': iterations}),
                },
            }
            if values:
                model['Metadata']['Results Source'] = 'published with the backbone, not reproduced'
                metrics = defaultdict(dict)  # by task
                for (metric, task), value in zip(recipe.metrics.items(), values):
                    metrics[task][metric] = value
                model['Results'] = [
                    {'Task': task, 'Dataset': dataset, 'Metrics': found}
                    for task, found in metrics.items()
                ]
            entries.append(model)
    return entries


@functools.cache
def read(name: str) -> Config:
    from mmengine.config import Config

    return Config.fromfile(ROOT / 'configs' / f'{name}.py')


@functools.cache
def parameters_of(name: str) -> int:
    """The number of parameters of a config's model."""
    import torch
    from mmengine.registry import MODELS, init_default_scope

    cfg = read(name)
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        return sum(p.numel() for p in MODELS.build(cfg.model).parameters())


def model_table(*, write: bool = False) -> None:
    """Print the table.

    Args:
        write: write README.md, docs/models.md and configs/metafile.yml instead
    """
    if not write:
        print(readme_table(), end='')
        return
    README.write_text(with_table(README.read_text()))
    MODELS_PAGE.write_text(models_page())
    METAFILE.write_text(metafile())


def main(argv: Sequence[str] | None = None) -> int:
    from cpvt_pyramid.tooling.command import run_command

    return run_command(model_table, argv)


if __name__ == '__main__':
    sys.exit(main())
