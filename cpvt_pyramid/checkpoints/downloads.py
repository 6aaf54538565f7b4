"""Weights by name: those in this package, and addresses and files on the Hugging Face hub.

What is not on this machine is downloaded once: by huggingface_hub into its cache, and from
addresses into that of torch.hub.
"""

import hashlib
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Optional, Union
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

from .files import INDEX_ENDING, PUBLISHED, missing_file, shard_names

IN_PACKAGE = Path(__file__).parents[1] / 'weights'
SCHEMES = ('cpvt://', 'timm://', 'hf://', 'https://', 'http://')
# torch.hub's convention, NAME-SHA256.pth. Eight digits from 20 on are a date.
DIGEST = re.compile(r'-(?!20\d{6}\.)([0-9a-f]{8,64})\.\w+$')
ON_HUB = re.compile('hf://([^/]+/[^/]+)(?:/(.+))?')
TIMEOUT = 10  # seconds to connect, and between two parts of a file
PART = 1 << 17  # bytes that are read at a time


def local_file(source: Union[str, Path]) -> Path:
    """Return the path of a file or folder, downloading it unless it is local or in a cache.

    Args:
        source: a path; `cpvt://pcpvt_nano`, the weights that come with this package; `timm://NAME`,
            the weights that timm publishes under this name on the Hugging Face hub;
            `hf://OWNER/REPO`, the weights of a repository on the hub; `hf://OWNER/REPO/FILE`,
            another file of it; or an `https://` address.
            The caches are those of huggingface_hub and of torch.hub, which finds addresses by their
            file name. If that ends in a SHA-256 (`NAME-HASH.pth`), the file is checked, also one
            that was in the cache.

    Raises:
        ConnectionError: the file cannot be downloaded, or what arrives is not the whole file.
        FileNotFoundError: there is no such local file, or none in the package or repository.
        ValueError: an `hf://` name without owner and repository; or a file in the cache is damaged.

    Examples:
        >>> local_file('examples/trees/florida.jpg')
        PosixPath('examples/trees/florida.jpg')
    """
    name = str(source)
    if not name.startswith(SCHEMES):
        path = Path(os.path.expanduser(source))  # unlike Path.expanduser, takes unknown users
        if not path.exists():
            raise FileNotFoundError(missing_file(source))
        return path
    if name.startswith('cpvt://'):
        return from_package(name.removeprefix('cpvt://'))
    on_hub = ON_HUB.fullmatch(re.sub('^timm://(.*)', r'hf://timm/\1/model.safetensors', name))
    if name.startswith('hf://') and not on_hub:
        raise ValueError(
            f'a name on the hub is hf://OWNER/REPO or hf://OWNER/REPO/FILE, got {name}'
        )
    if not on_hub and is_downloaded(name):
        return checked(cached_path(name))
    try:
        found = from_hub(*on_hub.groups()) if on_hub else from_address(name)
    except Exception as error:  # the hub's client raises many, from several libraries
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        what = f'{on_hub[2] or PUBLISHED[0]} of {on_hub[1]}' if on_hub else 'it'
        advice = f'Download {what} elsewhere and give the path of the file instead'
        if not on_hub:
            advice += f', or put it into {downloads_folder()}'
        raise ConnectionError(f'cannot download {name} ({reason}). {advice}') from error
    if found is None:
        raise FileNotFoundError(f'{name} has no {", ".join(PUBLISHED)}; give {name}/FILE')
    return found


def from_package(name: str) -> Path:
    """A file of weights that comes with this package."""
    files = {path.stem: path for path in IN_PACKAGE.glob('*.safetensors')}
    if name not in files:
        raise FileNotFoundError(
            f'no weights cpvt://{name} in this package; it has '
            + ', '.join(f'cpvt://{known}' for known in sorted(files))
        )
    return files[name]


def downloads_folder() -> Path:
    """Where torch.hub keeps files from addresses."""
    return Path(torch.hub.get_dir(), 'checkpoints')


def is_downloaded(url: str) -> bool:
    """True if the file at an address is in the cache."""
    return cached_path(url).is_file()


def cached_path(url: str) -> Path:
    return downloads_folder() / Path(urlsplit(url).path).name


def from_address(url: str) -> Path:
    """Download the file at an address to torch.hub's cache, where it is complete or not at all."""
    path = cached_path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as scratch:
        partial = Path(scratch, path.name)
        receive(url, partial)
        if difference := other_hash(partial):
            raise ValueError(difference)
        os.replace(partial, path)
    return path


def receive(url: str, path: Path) -> None:
    """Write the file at an address to a path, with a bar on a terminal.

    torch.hub's function waits without limit for a server, and takes what arrived before a
    connection broke for the file.

    Raises:
        OSError: the server does not have it, or sends nothing for `TIMEOUT` seconds.
        EOFError: the connection broke.
    """
    from tqdm import tqdm

    request = Request(url, headers={'User-Agent': 'torch.hub'})
    with urlopen(request, timeout=TIMEOUT) as response, path.open('wb') as file:
        length = response.headers['Content-Length']  # None: the server does not say it
        total = None if length is None else int(length)
        with tqdm(
            total=total,
            unit='B',
            unit_scale=True,
            unit_divisor=1024,
            disable=not sys.stderr.isatty(),
        ) as bar:
            while part := response.read(PART):
                file.write(part)
                bar.update(len(part))
        received = file.tell()
    if total is not None and received != total:
        raise EOFError(f'{received} of {total} bytes arrived')


def checked(path: Path) -> Path:
    """A file in the cache, unless it has changed since it was downloaded, or was put there by hand
    and is another one.

    Raises:
        ValueError: it does not have the hash in its name.
    """
    if difference := other_hash(path):
        raise ValueError(
            f'{path} is damaged or another file: {difference}. Delete it, and it is downloaded '
            'again'
        )
    return path


def other_hash(path: Path) -> str:
    """How the SHA-256 of a file differs from that in its name; empty if it does not, or if the name
    has none."""
    expected = DIGEST.search(path.name)
    if not expected:
        return ''
    sha256 = hashlib.sha256()
    with path.open('rb') as file:
        while part := file.read(PART):
            sha256.update(part)
    found = sha256.hexdigest()[: len(expected[1])]
    if found == expected[1]:
        return ''
    return f'its SHA-256 begins with {found}, not {expected[1]}'


def from_hub(repo: str, file: Optional[str]) -> Optional[Path]:
    """A file of a repository on the Hugging Face hub, in huggingface_hub's cache.

    Args:
        repo: OWNER/REPO.
        file: its path in the repository. None: the first of `PUBLISHED` that the repository has,
            with the shards that it lists.

    Returns:
        The path, or None if the repository has none of `PUBLISHED`.
    """
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if file:
        return hub_file(repo, file)
    for name in sorted(PUBLISHED, key=lambda name: not is_cached(repo, name)):
        try:
            path = hub_file(repo, name)
        except LocalEntryNotFoundError:  # without a network
            raise
        except EntryNotFoundError:
            continue
        if name.endswith(INDEX_ENDING):
            for shard in shard_names(path):
                hub_file(repo, shard)
        return path
    return None


def hub_file(repo: str, file: str) -> Path:
    """One file of a repository, downloaded unless it is in the cache."""
    import huggingface_hub as hub

    if not is_cached(repo, file):
        # Without a network this fails at once; hf_hub_download would try for a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(repo, file), timeout=TIMEOUT)
    return Path(hub.hf_hub_download(repo, file))


def is_cached(repo: str, file: str) -> bool:
    import huggingface_hub as hub

    return isinstance(hub.try_to_load_from_cache(repo, file), str)
