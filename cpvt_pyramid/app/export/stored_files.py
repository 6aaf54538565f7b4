"""The files of a model: an ONNX file may keep tensors in others, an .xml file of OpenVINO has its
weights in a .bin file. Read without the package onnx, which `cpvt quantize` does not need.

An ONNX file is a protocol buffer: fields with a number and, for what is read here, a length and
content. The numbers are those of onnx.proto.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

# Which fields of a message lead to tensors, and to what: model -> graph -> node -> attribute -> ...
TENSOR, ENTRY = 'tensor', 'entry'
FIELDS: Mapping[str, Mapping[int, str]] = {
    'model': {7: 'graph', 25: 'function'},
    'graph': {1: 'node', 5: TENSOR, 15: 'sparse'},
    'function': {7: 'node'},
    'node': {5: 'attribute'},
    'attribute': {5: TENSOR, 6: 'graph', 10: TENSOR, 11: 'graph', 22: 'sparse', 23: 'sparse'},
    'sparse': {1: TENSOR, 2: TENSOR},
    TENSOR: {13: ENTRY},  # of `external_data`: a key and a value
}
VARINT, LONG, CONTENT, SHORT = 0, 1, 2, 5  # kinds of fields
LOCATION = b'location'  # the key of the file's name


def stored_files(path: Path) -> list[Path]:
    """The files of a model.

    Raises:
        ValueError: an ONNX file is not complete.
    """
    if path.suffix == '.xml':
        return [path, path.with_suffix('.bin')]
    names = {*locations(np.memmap(path, np.uint8, 'r'), 'model')}
    return [path, *(path.parent / name for name in sorted(names))]


def locations(message: np.ndarray, kind: str) -> Iterator[str]:
    """The names of the files in which the tensors of a message are."""
    for number, content in fields(message):
        inner = FIELDS[kind].get(number)
        if inner == ENTRY:
            entry = {key: value.tobytes() for key, value in fields(content)}
            if entry.get(1) == LOCATION:
                yield entry[2].decode()
        elif inner is not None:
            yield from locations(content, inner)


def fields(message: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The numbers and contents of a message's fields that have a length."""
    place = 0
    while place < len(message):
        tag, place = varint(message, place)
        kind = tag & 7
        if kind == VARINT:
            _, place = varint(message, place)
        elif kind == CONTENT:
            length, place = varint(message, place)
            yield tag >> 3, message[place : place + length]
            place += length
        elif kind in (LONG, SHORT):
            place += 8 if kind == LONG else 4
        else:
            raise ValueError(f'not a protocol buffer: a field of kind {kind}')


def varint(message: np.ndarray, place: int) -> tuple[int, int]:
    """A number of variable length at a place, and the place after it."""
    value = shift = 0
    while True:
        if place >= len(message):
            raise ValueError('not a complete protocol buffer')
        byte = int(message[place])
        value |= (byte & 127) << shift
        place += 1
        shift += 7
        if byte < 128:
            return value, place
