"""What a data set consists of: `data.yaml`, in the schema of Ultralytics with a few further keys.

    path: ../photos             # folder that all paths are relative to; relative to this file
    format: coco                # a file of `layouts`
    train: train2017            # images: a folder, a text file that lists them, or several
    val: val2017
    annotations:                # of each split, or of all
      train: annotations/instances_train2017.json
      val: annotations/instances_val2017.json
    names: {0: cat, 1: dog}

It is written by `cpvt check-data` or by hand, and all that anything after recognition reads.
Scalars are read as text, because `yes`, `010` and `12:30` are names of classes.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any, NamedTuple, Optional

import yaml

from ..tooling.command import UserError, one_line
from ..tooling.files import write_text
from .files import text_of

SPLITS = 'train', 'val', 'test'
ALIASES = {'valid': 'val', 'validation': 'val'}
MOST_CLASSES = 100_000
IGNORED = 255
NULL = '', '~', 'null', 'Null', 'NULL'
KEYS = (
    'path',
    'format',
    *SPLITS,
    'annotations',
    'lists',
    'names',
    'masks_dir',
    'image_suffix',
    'mask_suffix',
    'colors',
    'ignored',
    'strip_prefix',
    'kpt_shape',
    'nc',
)


class SplitPart(NamedTuple):
    """A part of a split; paths are relative to the folder of the data.

    Attributes:
        images: a folder.
        annotations: the file with those of all images, or the folder in which annotations have
            the names of their images. None: none, or where the layout expects them.
        listed: a text file with the images that count, a path in the folder in each line, with or
            without ending. None: all images in the folder and its subfolders.
    """

    images: str
    annotations: Optional[str] = None
    listed: Optional[str] = None


class Description(NamedTuple):
    """A data set, as `data.yaml` declares it.

    Attributes:
        root: folder that all paths are relative to.
        format: the name of a layout.
        splits: parts of train, val and test.
        names: the classes by label, of masks by value. None: the annotations name them.
        colors: of masks in colours, by name.
        ignored: values of masks that do not count.
        declares_255: whether the file says what 255 is: a class, or ignored.
        masks_dir: replaces `images` in the paths of images.
        image_suffix: what the names of images have after what they share with their masks.
        mask_suffix: the same of masks.
        strip_prefix: begins the names of images in annotations and lists, and is left out.
        has_keypoints: label files of YOLO have keypoints after each box.
        source: the file, for messages.
    """

    root: Path
    format: str
    splits: dict[str, list[SplitPart]]
    names: Optional[dict[int, str]] = None
    colors: Optional[dict[str, tuple[int, int, int]]] = None
    ignored: tuple[int, ...] = (IGNORED,)
    declares_255: bool = True
    masks_dir: Optional[str] = None
    image_suffix: str = ''
    mask_suffix: str = ''
    strip_prefix: str = ''
    has_keypoints: bool = False
    source: str = 'data.yaml'


class Texts(yaml.BaseLoader):
    """Reads all scalars as text, and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        if not all(isinstance(key, str) for key in keys):
            raise yaml.YAMLError('a key is no text')
        repeated = repeated_in(keys)
        if repeated is not None:
            raise yaml.YAMLError(f'the key {repeated[:40]!r} is given twice; write it once')
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, with all scalars as text, and one name for each split.

    Raises:
        UserError: it is no mapping in YAML.
    """
    try:
        settings = yaml.load(text_of(path), Texts)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f'{path} is not YAML: {one_line(error, 120)}') from error
    if not isinstance(settings, dict):
        raise UserError(f'{path} must be a mapping in YAML, such as train: images/train')
    return with_names_of_splits(settings, str(path))


def description_of(settings: dict[str, Any], root: Path, source: str) -> Description:
    """The description that settings declare, with paths relative to `root`.

    Messages show no values of settings that are no text: a few lines of YAML can hold gigabytes.

    Raises:
        UserError: a setting is wrong, or missing.
    """
    settings = {key: value for key, value in settings.items() if value not in NULL}
    unknown = [str(key)[:40] for key in settings if key not in KEYS]
    if unknown:
        raise UserError(f'{source}: unknown key {unknown[0]}; the keys are {", ".join(KEYS)}')
    if not root.is_dir():
        raise UserError(f'{source}: path must be a folder, got {root}; it is relative to the file')
    for key in ('annotations', 'lists'):
        if isinstance(settings.get(key), dict):
            settings[key] = with_names_of_splits(settings[key], f'{source}: {key}')
            check_split_keys(settings[key], f'{source}: {key}')
    splits = {}
    for split in SPLITS:
        if split in settings:
            parts = parts_of(settings, split, source)
            splits[split] = [relative_part(root, part) for part in parts]
    if not splits:
        raise UserError(f'{source} must have train, val or test, a folder or list of images')
    names = names_setting(settings, source)
    colors = colors_setting(settings, source)
    if colors and not names:
        names = dict(enumerate(colors))
    if colors and names and set(colors) != set(names.values()):
        raise UserError(f'{source}: names and colors must have the same classes')
    return Description(
        root,
        text_setting(settings, 'format', source),
        splits,
        names,
        colors,
        ignored_setting(settings, names or {}, source),
        'ignored' in settings or IGNORED in (names or {}),
        text_setting(settings, 'masks_dir', source) or None,
        text_setting(settings, 'image_suffix', source),
        text_setting(settings, 'mask_suffix', source),
        text_setting(settings, 'strip_prefix', source),
        'kpt_shape' in settings,
        source,
    )


def with_names_of_splits(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """Settings with one name for each split."""
    for alias, split in ALIASES.items():
        if alias in settings and split in settings:
            raise UserError(f'{source} must have {split} or {alias}, and has both')
    return {ALIASES.get(key, key): value for key, value in settings.items()}


def check_split_keys(settings: dict[str, Any], source: str) -> None:
    """Check that the keys of a setting are splits."""
    for key in settings:
        if key not in SPLITS:
            raise UserError(f'{source} must be of {", ".join(SPLITS)}, got {key[:40]}')


def relative_part(root: Path, part: SplitPart) -> SplitPart:
    """A part with all paths relative to a folder, and written in one way. A list in the place of
    the images is one of images in that folder."""

    def written(path: Optional[str]) -> Optional[str]:
        return posixpath.relpath(root / path, root) if path else None

    images, annotations, listed = map(written, part)
    if images and listed is None and (root / images).is_file():
        return SplitPart(posixpath.curdir, annotations, listed=images)
    return SplitPart(str(images), annotations, listed)


def text_setting(settings: dict, key: str, source: str) -> str:
    value = settings.get(key, '')
    if not isinstance(value, str):
        raise UserError(f'{source}: {key} must be a text')
    return value


def texts_setting(value: Any, what: str) -> list[str]:
    """One or several texts."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text not in NULL for text in texts):
        raise UserError(f'{what} must be a path or a list of paths')
    return [text.replace('\\', '/') for text in texts]


def parts_of(settings: dict, split: str, source: str) -> list[SplitPart]:
    """The parts of a split: its images, with the annotations and the list of each."""
    images = texts_setting(settings[split], f'{source}: {split}')
    others: dict[str, list[Optional[str]]] = {}
    for key in ('annotations', 'lists'):
        value = settings.get(key)
        if isinstance(value, dict):
            value = value.get(split)
        if value is None or value in NULL:
            others[key] = [None] * len(images)
            continue
        texts: list[Optional[str]] = [*texts_setting(value, f'{source}: {key} of {split}')]
        if len(texts) not in (1, len(images)):
            raise UserError(
                f'{source}: {key} of {split} must be one path or as many as {split} has, '
                f'{len(images)}, got {len(texts)}'
            )
        others[key] = texts * len(images) if len(texts) == 1 else texts
    return [SplitPart(*part) for part in zip(images, others['annotations'], others['lists'])]


def whole_number(text: Any) -> Optional[int]:
    """A whole number of at most 9 digits; None if a text is none."""
    if isinstance(text, int):
        return text
    is_number = isinstance(text, str) and re.fullmatch('[0-9]{1,9}', text.strip())
    return int(text) if is_number else None


def names_setting(settings: dict, source: str) -> Optional[dict[int, str]]:
    """The classes by label."""
    names = settings.get('names')
    if names is None:
        return None
    if isinstance(names, list):
        names = {str(label): name for label, name in enumerate(names)}
    is_mapping = isinstance(names, dict) and bool(names)
    if not is_mapping or not all(isinstance(name, str) and name for name in names.values()):
        raise UserError(f'{source}: names must be a list of names, or number them')
    numbered: dict[int, str] = {}
    for label, name in names.items():
        number = whole_number(label)
        if number is not None and number < MOST_CLASSES:
            numbered[number] = name
    if len(numbered) < len(names):
        raise UserError(f'{source}: names must number the classes from 0, below {MOST_CLASSES}')
    repeated = repeated_in(list(numbered.values()))
    if repeated is not None:
        raise UserError(f'{source}: names has {repeated!r} twice')
    return dict(sorted(numbered.items()))


def repeated_in(names: list[str]) -> Optional[str]:
    """The first name that a list has twice."""
    seen = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def colors_setting(settings: dict, source: str) -> Optional[dict[str, tuple[int, int, int]]]:
    """The colours of masks by name."""
    colors = settings.get('colors')
    if colors is None:
        return None
    found: dict[str, tuple[int, int, int]] = {}
    for name, color in colors.items() if isinstance(colors, dict) else ():
        values = color if isinstance(color, list) else []
        numbers = [n for n in map(whole_number, values) if n is not None and n <= 255]
        if len(numbers) == len(values) == 3:
            red, green, blue = numbers
            found[name] = red, green, blue
    if not found or len(found) < len(colors):
        raise UserError(
            f'{source}: colors must have three numbers from 0 to 255 for each name, such as '
            'road: [128, 64, 128]'
        )
    if len(set(found.values())) < len(found):
        raise UserError(f'{source}: two classes of colors have one colour')
    return found


def ignored_setting(settings: dict, names: dict[int, str], source: str) -> tuple[int, ...]:
    """The values of masks that do not count: 255, unless it has a name or others are declared."""
    given = settings.get('ignored')
    if given is None:
        return () if IGNORED in names else (IGNORED,)
    texts = given if isinstance(given, list) else [given]
    values = [number for number in map(whole_number, texts) if number is not None]
    if len(values) < len(texts):
        raise UserError(f'{source}: ignored must be a value of masks or a list of values')
    both = sorted(set(values) & set(names))
    if both:
        raise UserError(f'{source}: the value {both[0]} has a name and is ignored')
    return tuple(sorted(set(values)))


# Writing


def in_one_line(value: Any) -> str:
    """A value of YAML in one line."""
    text = yaml.safe_dump(
        value, allow_unicode=True, sort_keys=False, default_flow_style=True, width=10**9
    )
    return text.strip('\n').removesuffix('\n...')


def text_of_description(settings: dict[str, Any], comments: list[str]) -> str:
    """The text of `data.yaml`, with comments above it."""
    lines = [f'# {line}' for line in comments]
    for key, value in settings.items():
        if isinstance(value, dict):
            lines.append(f'{key}:')
            lines += [f'  {in_one_line(k)}: {in_one_line(v)}' for k, v in value.items()]
        else:
            lines.append(f'{key}: {in_one_line(value)}')
    return '\n'.join(lines) + '\n'


def write_description(settings: dict[str, Any], root: Path, path: Path, comments: list) -> None:
    """Write settings whose paths are relative to `root` to a file."""
    place = Path(os.path.relpath(root, os.path.abspath(path.parent))).as_posix()
    write_text(path, text_of_description({'path': place, **settings}, comments))
