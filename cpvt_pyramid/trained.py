"""Detectors and segmentors that OpenMMLab has trained and published, by name.

    model = load_trained('segformer_b0_ade20k')
    labels = model(image).argmax(1)  # image: (B, 3, H, W) RGB in [0, 1]

The table is trained.csv. Each row is a model of `torchvision_models` or `segmentors`, and a file
with the tensors of MMDetection's or MMSegmentation's own model. classes.csv has the names of the
classes. Both are read without torch.
"""

import csv
import difflib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

if TYPE_CHECKING:
    from torch import Tensor, nn

PACKAGE = Path(__file__).parent
TABLE = PACKAGE / 'trained.csv'
CLASS_TABLE = PACKAGE / 'classes.csv'
METRICS = {'COCO': 'box AP', 'ADE20K': 'mIoU', 'Cityscapes': 'mIoU'}
LONG_SIDES = {'COCO': 1333, 'ADE20K': 2048, 'Cityscapes': 2048}  # of images, in pixels
# Of recipes that predict in windows: their side, and the distance between two.
WINDOWS = {'Cityscapes': (1024, 768)}
FLOAT = 4  # bytes
RESEARCH_ONLY = 'research only'
# The layers that classify, of a segmentor and of a detector
CLASSIFIERS = 'decode_head.conv_seg.weight', 'head.classification_head.cls_logits.weight'
Color = tuple[int, int, int]


def configs_folder() -> Path:
    """The configs in the installed package, or in a clone of the repository."""
    folder = PACKAGE / '.mim' / 'configs'
    return folder if folder.is_dir() else PACKAGE.parent / 'configs'


class Trained(NamedTuple):
    """A trained model.

    Attributes:
        config: a file in configs/, without `.py`.
        head: 'retinanet', 'semantic_fpn', 'upernet' or 'segformer'.
        arch: the backbone, a key of `ARCHS`.
        data: what the model was trained on, a key of `METRICS` and `CLASSES`.
        side: the largest shorter side of its images, in pixels.
        result: the metric at a single scale, as published.
        parameters: of the whole model.
        url: where the file is. The last part of its name begins its SHA-256.
    """

    config: str
    head: str
    arch: str
    data: str
    side: int
    result: str
    parameters: int
    url: str

    @property
    def config_path(self) -> Path:
        """The config in the installed package, or in a clone of the repository."""
        return configs_folder() / f'{self.config}.py'

    @property
    def megabytes(self) -> float:
        """The size of the file, as far as the parameters say."""
        return FLOAT * self.parameters / 1e6

    @property
    def image_sides(self) -> tuple[int, int]:
        """The largest shorter and longer side of the images that it was trained and tested on."""
        return self.side, LONG_SIDES[self.data]

    @property
    def detects(self) -> bool:
        return self.head == 'retinanet'

    @property
    def needs(self) -> str:
        """The packages that it needs, besides those that come with this one."""
        return 'torchvision' if self.detects else 'torch'

    @property
    def licence(self) -> str:
        """Of the weights. NVIDIA licenses those of MiT, from which SegFormer's training begins, for
        research only."""
        return RESEARCH_ONLY if self.arch.startswith('mit_') else 'Apache-2.0'


def read_table() -> dict[str, Trained]:
    """The trained models by name, in the order of trained.csv."""
    models = {}
    with TABLE.open(newline='', encoding='utf-8') as file:
        for row in csv.DictReader(file):
            models[row['name']] = Trained(
                config=row['config'],
                head=row['head'],
                arch=row['arch'],
                data=row['data'],
                side=int(row['side']),
                result=row['result'],
                parameters=int(row['parameters']),
                url=row['url'],
            )
    return models


def read_classes() -> tuple[dict[str, list[str]], dict[str, list[Color]]]:
    """For each data set, the names of its classes, and the colours that they are drawn in."""
    classes: dict[str, list[str]] = {}
    palettes: dict[str, list[Color]] = {}
    with CLASS_TABLE.open(newline='', encoding='utf-8') as file:
        for data, name, red, green, blue in list(csv.reader(file))[1:]:
            classes.setdefault(data, []).append(name)
            palettes.setdefault(data, []).append((int(red), int(green), int(blue)))
    return classes, palettes


TRAINED = read_table()
CLASSES, PALETTES = read_classes()


def find_trained(name: str) -> Trained:
    """The row of a name.

    Raises:
        ValueError: there is none.
    """
    if name in TRAINED:
        return TRAINED[name]
    if similar := similar_name(name):
        raise ValueError(f'no trained model {name}; did you mean {similar}?')
    raise ValueError(f'no trained model {name}; cpvt models lists them')


def weights_of(source: Union[str, Path]) -> Union[str, Path]:
    """What `read_checkpoint` of `checkpoints` takes, from that or from the name of a trained model.

    A file or folder comes before a model of its name.

    Raises:
        FileNotFoundError: there is no such file, but a trained model of a similar name.
    """
    name = str(source)
    if '://' in name or os.path.exists(os.path.expanduser(name)):
        return source
    if name in TRAINED:
        return TRAINED[name].url
    if similar := similar_name(name):
        raise FileNotFoundError(f'no checkpoint at {source}; there is a trained model {similar}')
    return source


def similar_name(name: str) -> str:
    """The trained model that a misspelled or shortened name may mean, or ''."""
    name = name.lower()
    for trained in TRAINED:
        if trained.startswith(f'{name}_'):
            return trained
    similar = difflib.get_close_matches(name, TRAINED, n=1, cutoff=0.8)
    return similar[0] if similar else ''


def load_trained(
    name: str,
    checkpoint: Union[str, Path, None] = None,
    *,
    num_classes: Optional[int] = None,
    **options: Any,
) -> 'nn.Module':
    """Build a trained model. Segmentors need only torch, detectors also torchvision.

    Boxes and labels are those of MMDetection and MMSegmentation, also at borders (`drop_border` of
    `CPVTPyramid`) and with images that are padded to multiples of 32. A segmentor returns the
    scores (B, K, H, W) of images (B, 3, H, W), a detector `boxes`, `scores` and `labels` of each of
    a list of images (3, H, W), as torchvision's do. Images are RGB in [0, 1]; `Predictor` of
    `cpvt_pyramid.app.predict` reads files and resizes images as OpenMMLab does.

    Args:
        name: `cpvt models` lists them.
        checkpoint: the file with the weights; also those of a fine-tuned model, whose number of
            classes may be another. None: it is downloaded once, into the cache of torch.hub.
        num_classes: replaces the layers that classify by new ones for this number of classes, for
            fine-tuning. All others keep their weights.
        **options: of the backbone, such as `drop_path_rate` and `frozen_stages`.

    Returns:
        A `segmentors.SemanticSegmentor` or `torchvision_models.RetinaNet` in evaluation mode, with
        the attributes `classes`, their names, and `image_sides`, the largest shorter and longer
        side in pixels to which images are resized in evaluation. Other sizes work, too.

    Raises:
        ConnectionError: the file cannot be downloaded.
        FileNotFoundError: there is no such file.
        ImportError: torchvision is missing.
        ValueError: an unknown name; or the file is damaged or of another model.

    Examples:
        >>> model = load_trained('segformer_b0_ade20k')  # doctest: +SKIP
        >>> model = load_trained('retinanet_pvt_v2_b2_coco', num_classes=7)  # doctest: +SKIP
    """
    from .checkpoints import local_file, read_checkpoint
    from .checkpoints.downloads import is_downloaded

    trained = find_trained(name)
    if num_classes is not None and num_classes < 1:
        raise ValueError(f'num_classes must be at least 1, got {num_classes}')
    model: Any = build_trained(trained, **options)
    if checkpoint is None:
        checkpoint = trained.url
        if trained.licence == RESEARCH_ONLY and not is_downloaded(trained.url):
            what = 'its weights start from those of MiT, which NVIDIA licenses for research only'
            warnings.warn(f'{name}: {what}', stacklevel=2)
    path = local_file(checkpoint)
    contents = read_checkpoint(path)
    tensors = checkpoint_tensors(trained, contents, path)
    model.classes = tuple(CLASSES[trained.data])
    count = class_count(model, tensors)
    if count != len(model.classes):  # fine-tuned
        model.replace_classifiers(count)
        model.classes = class_names(contents, count)
    load_whole(model, tensors, str(path))
    model.image_sides = trained.image_sides
    if num_classes is not None:
        model.replace_classifiers(num_classes)
        model.classes = numbered(num_classes)
    elif model.classes == numbered(count):
        warnings.warn(
            f'{path} has {count} classes without names; they are called class 0 and so on',
            stacklevel=2,
        )
    return model.eval()


def build_trained(trained: Trained, **options: Any) -> 'nn.Module':
    """The model of a row, with initial weights; `options` are those of the backbone."""
    from torch import nn

    backbone = {
        'arch': trained.arch,
        'drop_border': True,
        'window_padding': 'mmseg',
        **options,
    }
    num_classes = len(CLASSES[trained.data])
    model: Any
    if trained.detects:
        from .torchvision_models import retinanet

        short, long = trained.image_sides
        model = retinanet(
            backbone, num_classes=num_classes, mmdetection=True, min_size=short, max_size=long
        )
        body = model.backbone.body
    else:
        from . import segmentors

        build = getattr(segmentors, trained.head)
        window = WINDOWS.get(trained.data)
        model = build(backbone, num_classes=num_classes, window=window)
        body = model.backbone
    # In OpenMMLab every LayerNorm of a model has one epsilon; the authors' code has two.
    eps = 1e-5 if trained.arch.startswith(('pcpvt', 'svt')) else 1e-6
    for part in body.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = eps
    return model


def checkpoint_tensors(
    trained: Trained, contents: dict, path: Union[str, Path]
) -> dict[str, 'Tensor']:
    """The tensors of a file under the names of our model, but for those of the backbone, which it
    converts itself.

    The names in the file are OpenMMLab's, or our model's own.
    """
    tensors = contents.get('state_dict', contents)
    if not isinstance(tensors, dict):
        raise ValueError(f'{path} holds no tensors by their names')
    tensors = {str(name).removeprefix('module.'): value for name, value in tensors.items()}
    if trained.detects:
        from .torchvision_models import from_mmdetection

        tensors = from_mmdetection(tensors)
    return tensors


def class_count(model: Any, tensors: dict[str, Any]) -> int:
    """How many classes the classifier in a file has. Where the file has none that can be of this
    model, the number of the model's own classes: loading says what is wrong with it."""
    from torch import Tensor

    own_count = len(model.classes)
    own_tensors = model.state_dict()
    for name in CLASSIFIERS:
        own = own_tensors.get(name)
        given = tensors.get(name)
        if own is None or not isinstance(given, Tensor) or given.shape[1:] != own.shape[1:]:
            continue
        rows = len(own) // own_count  # of a class, such as one for each anchor
        if len(given) and len(given) % rows == 0:
            return len(given) // rows
    return own_count


def class_names(contents: dict, count: int) -> tuple[str, ...]:
    """The names that a file has for this number of classes, where OpenMMLab writes them, or else
    numbers."""
    meta = contents.get('meta') or {}
    names = (meta.get('dataset_meta') or {}).get('classes') or ()
    return tuple(names) if len(names) == count else numbered(count)


def numbered(count: int) -> tuple[str, ...]:
    return tuple(f'class {i}' for i in range(count))


def load_whole(model: 'nn.Module', tensors: dict[str, Any], path: str) -> None:
    """Load the tensors of a file, which must be exactly those of the model.

    Raises:
        ValueError: they are not, or some are not finite; one line that names the file.
    """
    from torch import Tensor

    from .checkpoints.files import listed
    from .checkpoints.loading import check_backbones

    for name, own in model.state_dict().items():
        value = tensors.get(name)
        if isinstance(value, Tensor) and not value.isfinite().all() and own.isfinite().all():
            raise ValueError(f'{path} is damaged: {name} has values that are not finite')
    try:
        check_backbones(model, tensors)
        missing, unknown = model.load_state_dict(tensors, strict=False)
    except (RuntimeError, ValueError) as error:  # other shapes; hardly a key in common
        reason = ' '.join(str(error).split())
        raise ValueError(f'{path} does not fit the model: {reason}') from error
    for what, names in (('missing', missing), ('not in the model', unknown)):
        if names:
            raise ValueError(f'{path} does not fit the model; tensors {what}: {listed(names)}')
