"""Detectors and segmentors that OpenMMLab has trained and published, by name.

    model = load_trained('segformer_b0_ade20k')
    labels = model(image).argmax(1)  # image: (B, 3, H, W) RGB in [0, 1]

The table is trained.csv. Each row is a model of `detectors` or `segmentors`, and a file
with the tensors of MMDetection's or MMSegmentation's own model. classes.csv has the names of the
classes. Both are read without torch.
"""

import csv
import difflib
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

if TYPE_CHECKING:
    from torch import Tensor, nn

PACKAGE = Path(__file__).parents[1]
TABLE = Path(__file__).with_name('trained.csv')
CLASS_TABLE = Path(__file__).with_name('classes.csv')
METRICS = {'COCO': 'box AP', 'ADE20K': 'mIoU', 'Cityscapes': 'mIoU'}
LONG_SIDES = {'COCO': 1333, 'ADE20K': 2048, 'Cityscapes': 2048}  # of images, in pixels
# Of recipes that predict in windows: their side, and the distance between two.
WINDOWS = {'Cityscapes': (1024, 768)}
FLOAT = 4  # bytes
RESEARCH_ONLY = 'research only'
# The layers that classify: of a segmentor; and of a detector here and in MMDetection
SEGMENTOR_CLASSIFIER = 'decode_head.conv_seg.weight'
DETECTOR_CLASSIFIER = 'head.classification_head.cls_logits.weight'
MMDETECTION_CLASSIFIER = 'bbox_head.retina_cls.weight'
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
    image_mean: Optional[Sequence[float]] = None,
    image_std: Optional[Sequence[float]] = None,
    **options: Any,
) -> 'nn.Module':
    """Build a trained model. Segmentors need only torch, detectors also torchvision.

    Boxes and labels are those of MMDetection and MMSegmentation, also at borders (`drop_border` of
    `CPVTPyramid`) and with images that are padded to multiples of 32. A segmentor returns the
    scores (B, K, H, W) of images (B, 3, H, W), a detector `boxes`, `scores` and `labels` of each of
    a list of images (3, H, W), as torchvision's do. Images are RGB in [0, 1]; `Predictor` of
    `cpvt_pyramid.app.predict` reads files and resizes images as OpenMMLab does.

    Args:
        name: one of those that `cpvt models` lists.
        checkpoint: the file with the weights; also those of a fine-tuned model, whose number of
            classes may be another, as OpenMMLab, Lightning, torch.compile, DDP and averages of
            weights save them. What is not part of the model, such as an optimizer, is ignored.
            None: the published file is downloaded once, into the cache of torch.hub.
        num_classes: replaces the layers that classify by new ones for this number of classes, for
            fine-tuning. All others keep their weights. Segmentors need at least 2.
        image_mean: mean of each channel, for images in [0, 1] that are not RGB.
        image_std: standard deviation of each channel, likewise.
        **options: options of the backbone, such as `drop_path_rate`, `frozen_stages`, or
            `in_channels` with `rgb_weights`.

    Returns:
        A `segmentors.SemanticSegmentor` or `detectors.RetinaNet` in evaluation mode, with
        the attributes `classes`, their names, and `image_sides`, the largest shorter and longer
        side in pixels to which images are resized in evaluation. Other sizes work, too.

    Raises:
        ConnectionError: the file cannot be downloaded.
        FileNotFoundError: there is no such file.
        ImportError: torchvision is missing.
        ValueError: an unknown name; means that do not fit the channels; or the file is damaged, of
            another model, or of several.

    Examples:
        >>> model = load_trained('segformer_b0_ade20k')  # doctest: +SKIP
        >>> model = load_trained('retinanet_pvt_v2_b2_coco', num_classes=7)  # doctest: +SKIP
        >>> bands = dict(in_channels=4, rgb_weights='mean')
        >>> scaling = dict(image_mean=[0.4] * 4, image_std=[0.2] * 4)
        >>> model = load_trained('upernet_svt_s_ade20k', **bands, **scaling)  # doctest: +SKIP
    """
    from ..checkpoints.downloads import is_downloaded, local_file
    from ..checkpoints.reading import read_checkpoint

    trained = find_trained(name)
    least = 1 if trained.detects else 2
    if num_classes is not None and num_classes < least:
        raise ValueError(f'num_classes of {name} must be at least {least}, got {num_classes}')
    model: Any = build_trained(trained, image_mean=image_mean, image_std=image_std, **options)
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
    if count < least:
        raise ValueError(
            f'{path} is of a segmentor with one score and a threshold for two classes '
            f'(out_channels=1 in MMSegmentation), and {name} has a score for each class; use the '
            'config that it was trained with'
        )
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


def build_trained(
    trained: Trained,
    image_mean: Optional[Sequence[float]] = None,
    image_std: Optional[Sequence[float]] = None,
    **options: Any,
) -> 'nn.Module':
    """The model of a row, with initial weights; arguments are those of `load_trained`."""
    from torch import nn

    backbone = {
        'arch': trained.arch,
        'drop_border': True,
        'window_padding': 'mmseg',
        **options,
    }
    num_classes = len(CLASSES[trained.data])
    normalization: dict[str, Any] = {}
    if image_mean is not None:
        normalization['image_mean'] = image_mean
    if image_std is not None:
        normalization['image_std'] = image_std
    model: Any
    if trained.detects:
        from .detectors import retinanet

        short, long = trained.image_sides
        model = retinanet(
            backbone,
            num_classes=num_classes,
            mmdetection=True,
            min_size=short,
            max_size=long,
            **normalization,
        )
        body = model.backbone.body
    else:
        from . import segmentors

        build = getattr(segmentors, trained.head)
        window = WINDOWS.get(trained.data)
        model = build(backbone, num_classes=num_classes, window=window, **normalization)
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

    Wrappers are removed as by `load_weights`. The names in the file are OpenMMLab's, or our model's
    own, after a prefix such as `model.` or `module.`.

    Raises:
        ValueError: the file has no tensors, or several models; one line that names the file.
    """
    from ..checkpoints.reading import contents_of, tensors_of, unwrapped

    try:
        tensors = tensors_of(contents)
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from None
    inner, choice = unwrapped(contents)
    if not contents:
        raise ValueError(f'{path} is empty')
    if not tensors:
        raise ValueError(f'{path} holds no tensors, but {contents_of(inner) or "nothing"}')
    if choice:
        warnings.warn(f'{path}: {choice}', stacklevel=3)
    own = (DETECTOR_CLASSIFIER, MMDETECTION_CLASSIFIER)
    prefix = prefix_of_model(tensors, own if trained.detects else (SEGMENTOR_CLASSIFIER,), path)
    tensors = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
    if trained.detects:
        from .detectors import from_mmdetection

        tensors = from_mmdetection(tensors)
    return tensors


def prefix_of_model(
    names: Iterable[str], classifiers: Sequence[str], path: Union[str, Path]
) -> str:
    """What stands in a file before the names of a model, one of whose tensors is a classifier. ''
    if there is no classifier: loading says what is missing."""
    prefixes = set()
    for name in names:
        for classifier in classifiers:
            prefix = name.removesuffix(classifier)
            if prefix != name and (not prefix or prefix.endswith('.')):
                prefixes.add(prefix)
    if len(prefixes) > 1:
        found = ', '.join(sorted(prefix or 'no prefix' for prefix in prefixes))
        raise ValueError(
            f'{path} holds several models, whose names begin with: {found}. Save the state dict of '
            'one of them'
        )
    return prefixes.pop() if prefixes else ''


def class_count(model: Any, tensors: dict[str, Any]) -> int:
    """How many classes the classifier in a file has. Where the file has none that can be of this
    model, the number of the model's own classes: loading says what is wrong with it."""
    own_count = len(model.classes)
    own_tensors = model.state_dict()
    for name in (SEGMENTOR_CLASSIFIER, DETECTOR_CLASSIFIER):
        own = own_tensors.get(name)
        given = tensors.get(name)
        if own is None or given is None or given.shape[1:] != own.shape[1:]:
            continue
        rows = len(own) // own_count  # of a class, such as one for each anchor
        if len(given) and len(given) % rows == 0:
            return len(given) // rows
    return own_count


def class_names(contents: dict, count: int) -> tuple[str, ...]:
    """The names that a file has for this number of classes, where OpenMMLab writes them, or else
    numbers."""
    names: Any = contents
    for key in ('meta', 'dataset_meta', 'classes'):
        names = names.get(key) if isinstance(names, dict) else None
    is_list = isinstance(names, (list, tuple)) and len(names) == count
    return tuple(names) if is_list else numbered(count)


def numbered(count: int) -> tuple[str, ...]:
    return tuple(f'class {i}' for i in range(count))


def load_whole(model: 'nn.Module', tensors: dict[str, Any], path: str) -> None:
    """Load the tensors of a file, which must be exactly those of the model.

    Raises:
        ValueError: they are not, or some are not finite; one line that names the file.
    """
    from torch import Tensor

    from ..checkpoints.files import listed
    from ..checkpoints.loading import check_backbones

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
