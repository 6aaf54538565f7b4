"""Kinds of files, and the checkpoint that a folder holds."""

import codecs
import json
import os
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

# The files that huggingface_hub and transformers write, in the order in which they are taken. An
# index says which file holds which tensor.
INDEX_ENDING = '.index.json'
PUBLISHED = (
    'model.safetensors',
    f'model.safetensors{INDEX_ENDING}',
    'pytorch_model.bin',
    f'pytorch_model.bin{INDEX_ENDING}',
)
ENDINGS = ('.safetensors', '.pth', '.pt', '.bin', '.ckpt', '.tar')
BEGINNING = 512  # bytes of a file that tell what it is
WANTED = 'a checkpoint is a file of tensors, .pth or .safetensors'
IMAGE = f'is an image; {WANTED}'
PROTO = 0x80  # the opcode that a pickle begins with, followed by its protocol
UNPACK = 'decompress it first'
EXPORTED = 'it holds a program; save the state_dict() of its model with torch.save'
# What files of other kinds begin with, and what to say of them.
BEGINNINGS = (
    (b'\x1f\x8b', f'is compressed with gzip; {UNPACK}'),
    (b'BZh', f'is compressed with bzip2; {UNPACK}'),
    (b'\xfd7zXZ', f'is compressed with xz; {UNPACK}'),
    (b'\x28\xb5\x2f\xfd', f'is compressed with zstd; {UNPACK}'),
    (b'\x93NUMPY', 'is a NumPy array; save tensors by their names with torch.save'),
    (b'version https://git-lfs', 'is a pointer of Git LFS, not the file itself; run git lfs pull'),
    (b'\x89PNG', IMAGE),
    (b'\xff\xd8\xff', IMAGE),  # JPEG
    (b'GIF8', IMAGE),
    (b'II*\x00', IMAGE),  # TIFF
    (b'MM\x00*', IMAGE),
    (b'<', 'is a web page or an XML file; download the checkpoint itself'),
)


def describe_file(path: Path) -> Optional[str]:
    """What a file is that cannot be read as a checkpoint, and what to do; None if unknown.

    Examples:
        >>> Path('nano.pth.gz').write_bytes(gzip.compress(b'weights'))
        >>> describe_file(Path('nano.pth.gz'))
        'is compressed with gzip; decompress it first'
    """
    with path.open('rb') as file:
        start = file.read(BEGINNING)
    if not start:
        return 'is empty'
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return describe_archive(archive)
    except Exception:  # whatever the bytes of a damaged archive lead to
        return None
    for beginning, description in BEGINNINGS:
        if start.lstrip().startswith(beginning):
            return description
    if start[:4] == b'RIFF' and start[8:12] == b'WEBP':
        return IMAGE
    # A protocol buffer with field 1 (ir_version), then 2 (producer) or 7 (graph).
    if start[:1] == b'\x08' and start[2:3] in (b'\x12', b':'):
        return f'is an ONNX model: {EXPORTED}'
    if tarfile.is_tarfile(path):
        return 'is a tar archive; unpack it first'
    if is_text(start):
        return f'is a text file; {WANTED}'
    return describe_pickle(start)


def is_text(start: bytes) -> bool:
    """Whether the first bytes of a file are text in UTF-8, whose last character may be cut. So few
    that an archive may begin with them (PK) are not."""
    if len(start) <= len('PK'):
        return False
    try:
        text = codecs.getincrementaldecoder('utf-8')().decode(start)
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in '\t\n\r\f\ufeff' for character in text)


def describe_archive(archive: zipfile.ZipFile) -> Optional[str]:
    """What a zip archive is that cannot be read as a checkpoint; None if it looks like one."""
    names = archive.namelist()
    leaves = [name.rpartition('/')[2] for name in names]
    if 'constants.pkl' in leaves and any('/code/' in name for name in names):
        return f'is a TorchScript archive: {EXPORTED}'
    if 'archive_format' in leaves or 'serialized_exported_program.json' in leaves:
        return f'is an exported program of torch.export: {EXPORTED}'
    if leaves and all(leaf.endswith('.npy') for leaf in leaves):
        return 'is a NumPy archive (.npz); save tensors by their names with torch.save'
    if 'data.pkl' not in leaves:
        contents = listed(names, 3) or 'nothing'
        advice = 'unpack it first' if any(leaf.endswith(ENDINGS) for leaf in leaves) else WANTED
        return f'is a zip archive that holds {contents}; {advice}'
    with archive.open(names[leaves.index('data.pkl')]) as file:
        return describe_pickle(file.read(BEGINNING))


def describe_pickle(start: bytes) -> Optional[str]:
    """Say which protocol a pickle has, if torch.load does not read it safely."""
    if len(start) < 2 or start[0] != PROTO or start[1] not in (3, 4, 5):
        return None
    return (
        f'was pickled with protocol {start[1]}; only protocol 2, the default of torch.save, is '
        f'read without running code. Write it again with torch.save'
    )


def is_safetensors(path: Path) -> bool:
    """True if a file, whatever its name, begins like a safetensors file: with the length of a
    header, 8 bytes, and the header, which is JSON."""
    with path.open('rb') as file:
        length = int.from_bytes(file.read(8), 'little')
        return file.read(1) == b'{' and length <= path.stat().st_size


def pick_from_folder(folder: Path) -> Path:
    """The checkpoint of a folder: what huggingface_hub and transformers write, or the only file
    that can be one.

    Raises:
        FileNotFoundError: there is none.
        ValueError: there are several, or it is of a kind that is not read.
    """
    for name in PUBLISHED:
        if (folder / name).is_file():
            return folder / name
    if (folder / '.metadata').is_file():
        raise ValueError(
            f'{folder} is a checkpoint of torch.distributed.checkpoint; make one file of it with '
            f'python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE.pth'
        )
    if (folder / 'adapter_config.json').is_file():
        raise ValueError(
            f"{folder} is an adapter of peft, not a model's weights; load these first, then the "
            f'adapter with PeftModel.from_pretrained'
        )
    if snapshots := sorted(folder.glob('snapshots/*/')):  # of a repository in the hub's cache
        if len(snapshots) > 1:
            raise ValueError(
                f'{folder} holds several snapshots: {listed([str(s) for s in snapshots])}. Give '
                f'one of them'
            )
        return pick_from_folder(snapshots[0])
    files = [path.name for path in folder.iterdir() if path.is_file()]
    found = sorted(name for name in files if name.endswith(ENDINGS))
    if len(found) > 1:
        raise ValueError(f'{folder} holds several checkpoints: {listed(found)}. Give one of them')
    if not found:
        raise FileNotFoundError(
            f'no checkpoint in the folder {folder}; it must hold {PUBLISHED[0]}, an index of '
            f'shards ({PUBLISHED[1]}) or one file ending in {", ".join(ENDINGS)}'
        )
    return folder / found[0]


def missing_file(path: Union[str, Path]) -> str:
    """What to say of a path without a file: it, and the checkpoints in its folder, newest first."""
    folder = Path(os.path.expanduser(path)).parent
    try:
        files = [file for file in folder.iterdir() if file.name.endswith(ENDINGS)]
        files.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
    except OSError:  # no such folder
        files = []
    if not files:
        return f'no checkpoint at {path}'
    where = 'this folder' if folder == Path() else folder
    return f'no checkpoint at {path}; {where} has {listed([file.name for file in files])}'


def shards_of(index: Path) -> list[Path]:
    """The files that an index of shards lists.

    Raises:
        FileNotFoundError: one of them is missing.
        ValueError: see `shard_names`.
    """
    shards = [index.parent / name for name in shard_names(index)]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise FileNotFoundError(f'{index} lists files that are not there: {listed(missing)}')
    return shards


def shard_names(index: Path) -> list[str]:
    """The names of the files that an index of shards lists.

    Raises:
        ValueError: the index is damaged, or lists files elsewhere.
    """
    try:
        names = set(json.loads(index.read_text(encoding='utf-8'))['weight_map'].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index} must hold a 'weight_map' of tensors to files") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f'{index} must list files of its own folder')
    return sorted(names)


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first names, shortened, and how many more there are."""
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(name[:100] for name in names[:most]) + more
