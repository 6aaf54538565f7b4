"""The metadata of an exported model, checked when it is written and when it is read.

docs/export.md describes the keys.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Optional

from ..tooling.command import UserError, one_line
from .sessions import Session

FORMAT = 1
# For each task that the runtime runs, sets of outputs of which the file must have one.
OUTPUTS: dict[str, tuple[set[str], ...]] = {
    'detection': ({'boxes', 'scores', 'labels'},),
    'instance': ({'boxes', 'scores', 'labels', 'masks'},),
    'segmentation': ({'labels'}, {'probabilities'}),
}
LONGEST = 1e6  # side of an image, in pixels


def number(low: float, high: float) -> Callable[[Any], bool]:
    """Whether a value is a number in [low, high]."""
    return lambda v: type(v) in (int, float) and low <= v <= high


def items(check: Callable[[Any], bool], count: Optional[int] = None) -> Callable[[Any], bool]:
    """Whether a value is a list of `count` values, each of which passes a check."""
    return lambda v: isinstance(v, (list, tuple)) and count in (None, len(v)) and all(map(check, v))


def sides(v: Any) -> bool:
    """Whether a value holds the longest shorter and longer side of an image."""
    if not isinstance(v, Mapping):
        return False
    short: Any = v.get('short')
    long: Any = v.get('long')
    return items(number(1, LONGEST))([short, long]) and short <= long


def suppression(v: Any) -> bool:
    """Whether a value describes a non-maximum suppression."""
    if not isinstance(v, Mapping):
        return False
    numbers = v.get('iou_threshold'), v.get('score_thr', 0)
    return all(map(number(0, 1), numbers)) and isinstance(v.get('class_agnostic'), bool)


def null_or(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: v is None or check(v)


# What must hold of each key, and in words.
KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    'classes': (items(lambda v: isinstance(v, str)), 'a list of names'),
    'palette': (items(items(number(0, 255), 3)), 'a list of colours, 3 numbers from 0 to 255'),
    'resize': (null_or(sides), 'null or short and long, numbers from 1, short <= long'),
    'stride': (lambda v: type(v) is int and v >= 1, 'a whole number from 1'),
    'masks': (lambda v: v in (None, 'box', 'image'), 'null, box or image'),
    'score_thr': (number(0, 1), 'a number in [0, 1]'),
    'size': (null_or(items(number(1, LONGEST), 2)), 'null or a height and a width from 1'),
    'resized': (lambda v: v in (None, 'logits', 'probabilities'), 'null, logits or probabilities'),
    'threshold': (null_or(number(0, 0.999999)), 'null or a number in [0, 1)'),
    'nms': (
        null_or(suppression),
        'null or an iou_threshold and a score_thr in [0, 1] and class_agnostic',
    ),
}
OPTIONAL = ('size', 'resized', 'threshold', 'nms')


def check_metadata(about: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first key with a wrong value."""
    for key, (check, rule) in KEYS.items():
        value = about.get(key, None if key in OPTIONAL else 'nothing')
        if not check(value):
            raise ValueError(f'{key} must be {rule}, got {shortened(value)}')


def parse_metadata(path: Path, session: Session) -> dict[str, Any]:
    """The metadata of an opened file, of any task.

    Raises:
        UserError: the file has none, or of another format.
    """
    if session.metadata is None:
        raise UserError(f'{path} has no metadata cpvt_pyramid; export the model with cpvt export')
    try:
        about = json.loads(session.metadata)
        version = about['format']
        about['task']
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f'{path}: damaged metadata: {one_line(error)}') from error
    if version != FORMAT:
        raise UserError(
            f'{path}: its format must be {FORMAT}, got {shortened(version)}; export the model '
            'again, or update cpvt_pyramid'
        )
    is_right, rule = KEYS['stride']
    if not is_right(about.get('stride', 1)):  # files of features may have none
        raise UserError(
            f'{path}: damaged metadata: stride must be {rule}, got {shortened(about["stride"])}'
        )
    return about


def read_metadata(path: Path, session: Session) -> dict[str, Any]:
    """The metadata of an opened file.

    Raises:
        UserError: the runtime cannot run the file.
    """
    about = parse_metadata(path, session)
    task = about['task']
    if task not in list(OUTPUTS):
        tasks = ', '.join(OUTPUTS)
        raise UserError(f'{path}: its task must be one of {tasks}, got {shortened(task)}')
    try:
        check_metadata(about)
        lacks_masks = task == 'instance' and not about['masks']
        if not about['classes'] or lacks_masks:
            both = shortened([about['classes'], about['masks']])
            raise ValueError(f'classes must be names, masks of instances box or image, got {both}')
    except ValueError as error:
        raise UserError(f'{path}: damaged metadata: {error}') from error
    outputs = OUTPUTS['instance' if about['masks'] else task]
    if not any(names <= {*session.names} for names in outputs):
        described = ' or '.join(', '.join(sorted(names)) for names in outputs)
        got = ', '.join(session.names)
        raise UserError(f'{path} must have the outputs {described}, got {got}')
    needed = ['images']
    if task == 'segmentation' and 'labels' in session.names:
        needed.append('original')  # to whose size the file resizes the segmentation mask
    given = session.shapes.keys() - {'valid'}
    images = session.shapes.get('images', [])
    if given != {*needed} or len(images) != 4 or 0 in images:
        raise UserError(
            f'{path} must take {" and ".join(needed)}, the images of 4 dimensions, and, at most, '
            f'valid besides; got {session.shapes}; export it again'
        )
    if images[0] is not None:
        raise UserError(
            f'{path} must take batches of any size, got the fixed batch size {images[0]}; export '
            'it again'
        )
    return about


def reference_name(about: Mapping[str, Any]) -> str:
    """What the test data in a file come from, in words."""
    if about.get('quantized'):
        return 'its results where it was quantized'
    return 'PyTorch'
