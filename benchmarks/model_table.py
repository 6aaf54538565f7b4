"""Prints the README's table of families of models, computed from the models.

With --write it updates that table, docs/models.md (all models) and configs/metafile.yml (the
configs, for mim).
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmengine.config import Config
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    from cpvt_pyramid import Arch, ColumnarArch

from benchmarks import ROOT
from benchmarks.published import (
    BACKBONES,
    COLUMNS,
    PAPERS,
    RECIPES,
    RETINANET_1X,
    SEGFORMER,
    SEMANTIC_FPN,
    Recipe,
)
from cpvt_pyramid.app.tooling.report import markdown_table

README = ROOT / 'README.md'
MODELS_PAGE = ROOT / 'docs' / 'models.md'
METAFILE = ROOT / 'configs' / 'metafile.yml'
BEGIN = '<!-- models: benchmarks/model_table.py -->\n'
END = '<!-- end of models -->'


SIZES = ((224, 224), (800, 1333))
HEAD = ('parameters', *(f'GFLOPs, {h} x {w}' for h, w in SIZES), 'ImageNet top-1')


FAMILIES = {  # by the beginning of their archs
    'pcpvt_': 'PCPVT (Twins), CPVTv2',
    'svt_': 'Twins-SVT',
    'pvt_v2_': 'PVTv2',
    'pvt_': 'PVT',
    'mit_': 'MiT (SegFormer)',
}


def readme_table() -> str:
    """The README's table in Markdown, a row per family of pyramids."""
    from cpvt_pyramid import ARCHS

    archs = defaultdict(list)
    for arch in ARCHS:
        prefix = next(prefix for prefix in FAMILIES if arch.startswith(prefix))
        if arch in BACKBONES:
            archs[prefix].append(arch)
    head = ['family', '`arch`', 'parameters', 'ImageNet top-1', 'RetinaNet 1x AP', 'ADE20K mIoU']
    return markdown_table(head, [family_row(FAMILIES[prefix], archs[prefix]) for prefix in archs])


def family_row(name: str, archs: Sequence[str]) -> list[str]:
    """Names, and the ranges of parameters and published results."""
    tops = [BACKBONES[arch].top1 for arch in archs]
    box_aps = [RETINANET_1X.results[arch][0] for arch in archs if RETINANET_1X.results.get(arch)]
    segmentor = 'SegFormer' if archs[0] in SEGFORMER.results else 'Semantic FPN'
    results = {**SEMANTIC_FPN.results, **SEGFORMER.results}
    mious = [results[arch][0] for arch in archs if results.get(arch)]
    return [
        name,
        ', '.join(f'`{arch}`' for arch in archs),
        f'{millions_of(archs[0])} to {millions_of(archs[-1])}',
        span(tops),
        span(box_aps),
        f'{span(mious)} ({segmentor})',
    ]


def millions_of(arch: str) -> str:
    from cpvt_pyramid import CPVTPyramid

    return millions(CPVTPyramid, arch)


def span(values: Sequence[float]) -> str:
    """The smallest and the largest of published values; nothing without values."""
    if not values:
        return ''
    if min(values) == max(values):
        return f'{values[0]:.1f}'
    return f'{min(values):.1f} to {max(values):.1f}'


@functools.cache
def pyramid_row(arch: str) -> list[object]:
    """Names, parameters, GFLOPs (billions of multiply-additions) of an image, and accuracy.

    The blocks of a stage cost the same, in pairs: a model with one pair per stage is counted.
    """
    from cpvt_pyramid import ARCHS, CPVTPyramid

    name = 'ours, for demo and tests'
    top1 = ''
    if arch in BACKBONES:
        name = BACKBONES[arch].name
        top1 = BACKBONES[arch].top1
    row = ARCHS[arch]
    costs = [millions(CPVTPyramid, arch)]
    for counter in count_pyramid(row._replace(depths=(2, 2, 2, 2))):
        total = multiply_additions(counter, 'Global')
        for stage, depth in enumerate(row.depths):
            blocks = [f'CPVTPyramid.blocks.{stage}.{j}' for j in (0, 1)]
            pair = sum(multiply_additions(counter, block) for block in blocks)
            total += pair * (depth - 2) // 2
        costs.append(f'{total / 1e9:.1f}')
    return [f'`{arch}`', name, *costs, top1]


@functools.cache
def count_pyramid(arch: Arch) -> list[FlopCounterMode]:
    from cpvt_pyramid import CPVTPyramid

    return list(count(CPVTPyramid, arch))


def count(
    model_class: type, arch: Arch | ColumnarArch, **options: object
) -> Iterator[FlopCounterMode]:
    """Counts a pass of one image of each of SIZES, on the meta device, where fused attention counts
    as its two matrix products."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from tests.models.meta import without_values

    with without_values():
        model = model_class(arch, **options)
    for size in SIZES:
        image = torch.empty(1, 3, *size, device='meta')
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(image)
        yield counter


def multiply_additions(counter: FlopCounterMode, module: str) -> int:
    """Those of a module, by its name in the counter, or of the whole pass ('Global')."""
    return sum(counter.get_flop_counts()[module].values()) // 2


def millions(model_class: type, arch: str, **options: object) -> str:
    """Parameters of a model."""
    from tests.models.meta import without_values

    with without_values():
        model = model_class(arch, **options)
    return f'{size_of(model) / 1e6:.1f}M'


def size_of(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


MODELS_PAGE_TEXT = """\
# Models

This page has all models, their published weights and accuracies, and the formats of checkpoints.
The accuracies were not reproduced here. Parameters and GFLOPs (billions of multiply-additions for
one image) are counted. `make table` generates the page.

## Pyramids

![Four stages of patches, blocks and a PEG; each returns a map](architecture.svg)

`CPVTPyramid(arch)` builds a pyramid. After `import cpvt_pyramid.timm_models`, so does
`timm.create_model(arch)`, where PVTv2 is called `cpvt_pvt_v2_b2` and so on, because timm has a
PVTv2 of its own. Parameters and GFLOPs are those of the backbone.

{pyramids}
PCPVT and SVT: Twins, [2104.13840](https://arxiv.org/abs/2104.13840), tables 1 and 2. PVT:
[2102.12122](https://arxiv.org/abs/2102.12122), table 2. PVTv2:
[2106.13797](https://arxiv.org/abs/2106.13797), table 2. MiT, the backbone of SegFormer:
[2105.15203](https://arxiv.org/abs/2105.15203), table 6.

## Published weights

`load_weights(model, NAME)`, `init_cfg=dict(type='Pretrained', checkpoint=NAME)` and
`cpvt convert-weights NAME` load all weights of the table. `cpvt export ARCH NAME` and
`timm.create_model(ARCH, pretrained=True)` load those of pyramids. Instead of `NAME`, you can give
`hf://OWNER/REPO/FILE` for a file on the Hugging Face hub, or an `https://` address.

A file is downloaded once: from the hub into the cache of huggingface_hub, and from an address into
that of torch.hub, which knows a file only by its name. If a name ends in the beginning of a SHA-256
(`NAME-HASH.pth`), as those of MiT do, the file is checked. The sizes in the table are computed from
the number of parameters in float32.

{weights}
### Weights in this package

`cpvt://pcpvt_nano` needs no download. It is made for small detectors and segmentors that have
little data or little time, and for tries without a network. The backbone has learned the feature
maps and logits of EfficientNet-Lite0, which was trained on ImageNet-1k, on crops of 64 photographs
without labels; it has seen no image of ImageNet. [Its card](../cpvt_pyramid/weights/README.md) says
what it is good for, measured, and how it was made.

## Trained detectors and segmentors

OpenMMLab has trained and published these models. They need torch and torchvision, but neither
OpenMMLab nor a compiler: `pip install '.[torch]'`. `cpvt models` prints the table, and
[`cpvt infer NAME`, `cpvt app NAME` and `Predictor(NAME)`](predict.md) run a model by its name.

```python
import torch
from cpvt_pyramid import load_trained

model = load_trained('segformer_b0_ade20k')  # an nn.Module in evaluation mode
images = torch.rand(1, 3, 96, 128)  # RGB in [0, 1], of any size
labels = model(images).argmax(1)
print(model.classes, model.image_sides)  # 150 names; tested with sides of up to 512, 2048 pixels

model = load_trained('retinanet_pvt_v2_b2_coco', num_classes=7)  # for fine-tuning
```

A file is downloaded once, into the cache of torch.hub (`$TORCH_HOME/hub/checkpoints`), and
checked by the SHA-256 in its name. Without a network, put the file there or give its path:
`cpvt infer NAME FILE.pth photos/`, `Predictor(NAME, FILE)`, `load_trained(NAME, FILE)`.

Detectors are `retinanet` of [torchvision_models](ecosystems.md#torchvision), and return what
torchvision's return. Segmentors come from [segmentors.py](../cpvt_pyramid/segmentors.py). You can
also build and train them, on any backbone of this package:

```python
from cpvt_pyramid.segmentors import segformer, semantic_fpn, upernet

model = semantic_fpn('pcpvt_small', num_classes=6)
loss = model.loss(images, labels % 6)  # the cross entropy; pixels of label 255 are ignored
scores = model.eval()(images)  # (1, 6, 96, 128)
```

[Examples](../examples/README.md#training-without-openmmlab) fine-tune a detector and a segmentor.
With OpenMMLab, you can use a name as the `load_from` of a training on your own classes, and
`cpvt export NAME` exports the model of the config. `load_weights(backbone, weights_of(NAME))`, with
`weights_of` of `cpvt_pyramid.trained`, loads only the backbone.

{trained}
The column "published" has the published results at a single scale. The sizes of files are
computed from the number of parameters. SegFormer's weights start from those of MiT, which NVIDIA
licenses for research only.

None of the files could be downloaded where this package is developed. The tests therefore use
files of the same layout with random weights, saved from MMDetection's and MMSegmentation's own
models. They compare the results for photographs, whose sides are multiples of 32 or not: at least
99.9 % of the boxes are equal within 0.05 pixels and 1e-4 of score, and at least 99.99 % of the
labels of pixels (`tests/mm/foreign/test_trained.py`). To reach this, the named models treat
borders as OpenMMLab's do (`drop_border` and `window_padding='mmseg'` of `CPVTPyramid`), and do
not mask the padding of an image to multiples of 32. The configs of the same names mask it and
keep the borders, so that `cpvt export NAME` and `cpvt infer configs/CONFIG.py FILE.pth` give
slightly different results. In Python, a detector resizes images in floating point, while
`cpvt infer` and `Predictor` round as OpenCV does.

## The columnar CPVT

These classifiers keep one resolution from the first block to the last, as ViT does. In Python,
import them with `from cpvt_pyramid import CPVT`; in timm's registry, they are `cpvt_tiny_0to5`,
`cpvt_tiny_0to5_gap` and so on. `DenseCPVT` takes the same options and is a backbone, in Python
and in configs (`type='DenseCPVT'`).

{columns}
CPVT, [2102.10882](https://arxiv.org/abs/2102.10882), section 5; DeiT,
[2012.12877](https://arxiv.org/abs/2012.12877), as cited there. The paper's other variants and their
results are in [`position/settings.py`](../cpvt_pyramid/position/settings.py), class `PEGConfig`.

## Recipes

{recipes}
The results of PCPVT and SVT are from tables 3 to 6 of Twins, those of PVT from section 5 of its
paper, those of PVTv2 from MMDetection (RetinaNet) and section 4 of its paper, and those of
SegFormer from MMSegmentation. Parameters are those of the whole model. The papers' numbers are
higher by half a million or more, because their code keeps the classifier.

## Checkpoints

`load_weights`, `load_state_dict`, `init_cfg`, `load_from` and timm load all formats of the table
below, and `cpvt convert-weights` writes them. The format that knows most of the names in a file
is taken for the format of the file.

`load_weights(model, NAME)` takes the path of a file or of a folder with one checkpoint (shards with
their index, a snapshot of the Hugging Face hub), `timm://pvt_v2_b2.in1k`, `hf://nvidia/mit-b0`,
`hf://OWNER/REPO/FILE` or an `https://` address. It finds the backbone within a detector, a
segmentor or any other model, also in DDP, FSDP, compiled, averaged or saved by Lightning. If a file
has several backbones that fit, it asks for the `prefix` of one. It refuses damaged files and other
architectures, and after an error the model is as it was. `init_cfg=dict(type='Pretrained', ...)`
does the same.

`load_state_dict` works as in any module of PyTorch, also for missing, additional and infinite
values. In addition, it converts the names of a published file, if they are at the root of the
backbone, and leaves out tensors that a backbone does not have, such as the classifier and later
stages. It does not remove wrappers and prefixes. For timm's `load_checkpoint`,
`filter_fn=cpvt_pyramid.timm_models.checkpoint_filter_fn` does that.

{formats}"""


def models_page() -> str:
    """The text of docs/models.md: models, costs, results and checkpoint formats."""
    return MODELS_PAGE_TEXT.format(
        pyramids=pyramids_table(),
        weights=markdown_table(
            ['name', 'model', 'source', 'licence', 'size', 'format'], published_weights()
        ),
        trained=markdown_table(
            [
                *('name', 'config', 'data', 'classes', 'published', 'parameters', 'download'),
                *('needs', 'weights'),
            ],
            trained_models(),
        ),
        columns=markdown_table(['code', 'published as', *HEAD], column_rows()),
        recipes=markdown_table(
            ['config', 'backbone', 'head', 'data', 'parameters', 'published'],
            [recipe_row(model) for model in models()],
        ),
        formats=markdown_table(['format', 'whose files', 'models'], formats()),
    )


def pyramids_table() -> str:
    """A row per pyramid."""
    from cpvt_pyramid import ARCHS

    rows = []
    for arch in ARCHS:
        box_ap = RETINANET_1X.results.get(arch, ('',))[0]
        miou = SEMANTIC_FPN.results.get(arch, ('',))[0]
        if arch in SEGFORMER.results:
            miou = f'{SEGFORMER.results[arch][0]:.1f} (SegFormer)'
        rows.append([*pyramid_row(arch), box_ap, miou])
    head = ['`arch`', 'published as', *HEAD, 'RetinaNet 1x AP', 'Semantic FPN mIoU']
    return markdown_table(head, rows)


def trained_models() -> Iterator[list[object]]:
    """The rows of `cpvt models`, with links to the configs and files."""
    from cpvt_pyramid.trained import CLASSES, METRICS, TRAINED

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


def column_rows() -> Iterator[list[object]]:
    """Code, name, parameters, GFLOPs and accuracy of the columnar classifiers."""
    from cpvt_pyramid import COLUMNAR_ARCHS, CPVT

    for name, options, accuracies in COLUMNS:
        for (arch, row), letter, top1 in zip(COLUMNAR_ARCHS.items(), ('Ti', 'S', 'B'), accuracies):
            arguments = [repr(arch), *(f'{key}={value!r}' for key, value in options.items())]
            costs = [millions(CPVT, arch, **options)]
            for counter in count(CPVT, row._replace(depth=7), **options):
                # The blocks after the last PEG cost the same.
                total = multiply_additions(counter, 'Global')
                total += (row.depth - 7) * multiply_additions(counter, 'CPVT.blocks.6')
                costs.append(f'{total / 1e9:.1f}')
            yield [f'`CPVT({", ".join(arguments)})`', name.format(letter), *costs, top1]


def recipe_row(model: dict) -> list[str]:
    """Config, backbone, head, data, parameters and results of an entry of the metafile."""
    meta = model['Metadata']
    found = []
    for result in model.get('Results', ()):
        found += [f'{value} {metric}' for metric, value in result['Metrics'].items()]
    *backbone, head = meta['Architecture']
    return [
        f'[{model["Name"]}](../{model["Config"]})',
        ', '.join(backbone),
        head,
        meta['Training Data'],
        f'{meta["Parameters"] / 1e6:.1f}M',
        ', '.join(found) or 'none',
    ]


def weights_of(arch: str) -> str:
    """The name of the published weights of a backbone, from a config that starts from them."""
    for recipe in RECIPES:
        if arch in recipe.results:
            config = read(recipe.config.format(BACKBONES[arch].short))
            return config.model.backbone.init_cfg.checkpoint
    return f'timm://{arch}.in1k'


def published_weights() -> Iterator[list[str]]:
    """For each file that a config starts from: name, model, source, licence, size and format."""
    import timm

    import cpvt_pyramid.timm_models  # noqa: F401  registers the models
    from cpvt_pyramid import CPVTPyramid
    from cpvt_pyramid.checkpoints.downloads import IN_PACKAGE
    from tests.models.meta import without_values

    for arch in BACKBONES:
        name = weights_of(arch)
        model = f'`{arch}`'
        timm_name = arch
        source = 'timm'
        form = 'ours'
        licence = 'Apache-2.0'
        if arch.startswith('pvt_v2'):
            form = 'timm_pvt_v2'
        elif arch.startswith('pvt'):
            source = "PVT's authors"
            form = 'pvt'
        elif arch.startswith('mit'):
            timm_name = ''
            source = "MMSegmentation, converted from SegFormer's authors"
            form = 'mm_pvt_v2'
            licence = "NVIDIA's, for research only"
        elif arch == 'cpvt_tiny':
            model = "`cpvt_tiny` with `position='learned'` (DeiT-Ti)"
            timm_name = 'deit_tiny_patch16_224'
            form = 'vit'
        with without_values():
            if timm_name:
                published = timm.create_model(timm_name, num_classes=1000)
            else:
                published = CPVTPyramid(arch)
        megabytes = 4 * size_of(published) / 1e6
        yield [f'`{name}`', model, source, licence, f'{megabytes:.0f} MB', f'`{form}`']
    for path in sorted(IN_PACKAGE.glob('*.safetensors')):
        megabytes = path.stat().st_size / 1e6
        source = 'this package, [distilled](models.md#weights-in-this-package)'
        yield [
            f'`cpvt://{path.stem}`',
            f'`{path.stem}`',
            source,
            'Apache-2.0',
            f'{megabytes:.0f} MB',
            '`ours`',
        ]


def formats() -> Iterator[list[str]]:
    """For each checkpoint format, who uses it and which models it can hold."""

    from cpvt_pyramid import CPVT, CPVTPyramid, PEGConfig
    from cpvt_pyramid.checkpoints.formats import FORMATS, to_format
    from tests.models.meta import without_values

    owners = {
        'ours': 'the authors of Twins; timm (`twins_*`); this package',
        'mmseg': 'mmsegmentation (`PCPVT`, `SVT`)',
        'mmpretrain': 'mmpretrain (`PCPVT`, `SVT`)',
        'mmdet': 'mmdetection (`PyramidVisionTransformer`)',
        'pvt': 'the authors of PVT',
        'vit': 'the authors of DeiT; timm (`deit_*`, `vit_*`)',
        'mmpretrain_vit': 'mmpretrain (`VisionTransformer`)',
        'pvt_v2': 'the authors of PVTv2 and of SegFormer',
        'timm_pvt_v2': 'timm (`pvt_v2_*`)',
        'timm_pvt_v2_maps': 'timm (`pvt_v2_*` with `features_only=True`)',
        'mm_pvt_v2': (
            'mmdetection (`PyramidVisionTransformerV2`), mmsegmentation (`MixVisionTransformer`)'
        ),
        'transformers': 'files of transformers (SegFormer)',
        'transformers_5': 'the modules of SegFormer in transformers 5',
    }
    with without_values():
        samples = {
            'PCPVT': CPVTPyramid('pcpvt_nano'),
            'SVT': CPVTPyramid('svt_small'),
            'PVT': CPVTPyramid('pvt_tiny'),
            'PVTv2, MiT': CPVTPyramid('pvt_v2_b0'),
            'PVTv2-B2-Li': CPVTPyramid('pvt_v2_b2_li'),
            'columnar with a learned position embedding (DeiT)': CPVT(
                'cpvt_tiny', position='learned'
            ),
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
        names = 'all' if len(fitting) == len(samples) else ', '.join(fitting)
        yield [f'`{key}`', owners[key], names]


def with_table(text: str) -> str:
    """The README's text with the current table between the markers."""
    return with_section(text, BEGIN, END, readme_table())


def with_section(text: str, begin: str, end: str, section: str) -> str:
    """A text with another section between two markers."""
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return before + begin + section + end + after


DATA = {'CocoDataset': 'COCO', 'ADE20KDataset': 'ADE20K', 'CityscapesDataset': 'Cityscapes'}
METAFILE_HEADER = """\
# The configs, for mim. Generated by benchmarks/model_table.py. Results are the backbones'
# published ones, not reproduced here; `cpvt models` lists trained models. Parameters are counted.
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
        for arch in recipe.results:
            entries.append(metafile_entry(recipe, arch))
    return entries


def metafile_entry(recipe: Recipe, arch: str) -> dict:
    name = recipe.config.format(BACKBONES[arch].short)
    cfg = read(name)
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
        meta['Results Source'] = 'published with the backbone, not reproduced'
        by_task = defaultdict(dict)
        for (metric, task), value in zip(recipe.metrics.items(), values):
            by_task[task][metric] = value
        entry['Results'] = []
        for task, metrics in by_task.items():
            entry['Results'].append({'Task': task, 'Dataset': dataset, 'Metrics': metrics})
    return entry


@functools.cache
def read(name: str) -> Config:
    from mmengine.config import Config

    return Config.fromfile(ROOT / 'configs' / f'{name}.py')


@functools.cache
def parameters_of(name: str) -> int:
    """The number of parameters of a config's model."""
    from mmengine.registry import MODELS, init_default_scope

    from tests.models.meta import without_values

    cfg = read(name)
    init_default_scope(cfg.default_scope)
    with without_values():
        return size_of(MODELS.build(cfg.model))


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
    from cpvt_pyramid.app.tooling.command import run_command

    return run_command(model_table, argv)


if __name__ == '__main__':
    sys.exit(main())
