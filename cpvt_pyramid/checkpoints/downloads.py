"""Weights by name: those in this package, and addresses and files on the Hugging Face hub, which
are downloaded once."""

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Union
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch

IN_PACKAGE = Path(__file__).parents[1] / 'weights'
SCHEMES = ('cpvt://', 'timm://', 'hf://', 'https://', 'http://')
# torch.hub's convention, NAME-SHA256.pth. Eight digits from 20 on are a date.
DIGEST = re.compile(r'-(?!20\d{6}\.)([0-9a-f]{8,64})\.\w+$')
ON_HUB = re.compile('hf://([^/]+/[^/]+)/(.+)')
TIMEOUT = 10  # seconds to connect


def local_file(source: Union[str, Path]) -> Path:
    """Return the path of a file, downloading it unless it is local or in a cache.

    Args:
        source: a path; `cpvt://pcpvt_nano`, the weights that come with this package;
            `timm://NAME`, the weights that timm publishes under this name on the
            Hugging Face hub; `hf://OWNER/REPO/FILE`, a file on the hub; or an `https://` address.
            The caches are those of huggingface_hub and of torch.hub, which finds addresses by their
            file name. If that ends in a SHA-256 (`NAME-HASH.pth`), a download is checked.

    Raises:
        ConnectionError: the file cannot be downloaded, or what arrives is not the whole file.
        FileNotFoundError: there is no such local file, or none in the package.
        ImportError: a file on the hub without the package huggingface_hub.
        ValueError: an `hf://` name without owner, repository and file.

    Examples:
        >>> local_file('examples/trees/florida.jpg')
        PosixPath('examples/trees/florida.jpg')
    """
    name = str(source)
    if not name.startswith(SCHEMES):
        path = Path(os.path.expanduser(source))  # unlike Path.expanduser, takes unknown users
        if not path.is_file():
            raise FileNotFoundError(f'no checkpoint at {source}')
        return path
    if name.startswith('cpvt://'):
        return from_package(name.removeprefix('cpvt://'))
    on_hub = ON_HUB.fullmatch(re.sub('^timm://(.*)', r'hf://timm/\1/model.safetensors', name))
    if name.startswith('hf://') and not on_hub:
        raise ValueError(f'a file on the hub is hf://OWNER/REPO/FILE, got {name}')
    try:
        if on_hub:
            return from_hub(*on_hub.groups())
        return from_address(name)
    except ImportError as error:
        raise ImportError(f'{name} needs huggingface_hub; pip install huggingface_hub') from error
    except Exception as error:  # the hub's client raises many, from several libraries
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        what = f'{on_hub[2]} of {on_hub[1]}' if on_hub else 'it'
        raise ConnectionError(
            f'cannot download {name} ({reason}). Download {what} elsewhere and give the path of '
            f'the file instead'
        ) from error


def from_package(name: str) -> Path:
    """A file of weights that comes with this package."""
    files = {path.stem: path for path in IN_PACKAGE.glob('*.safetensors')}
    if name not in files:
        raise FileNotFoundError(
            f'no weights cpvt://{name} in this package; it has '
            + ', '.join(f'cpvt://{known}' for known in sorted(files))
        )
    return files[name]


def from_address(url: str) -> Path:
    """The file at an address, in torch.hub's cache."""
    folder = Path(torch.hub.get_dir(), 'checkpoints')
    path = folder / Path(urlsplit(url).path).name
    if path.is_file():
        return path
    # torch.hub itself waits without limit, and keeps what arrived before a connection broke.
    with urlopen(Request(url, headers={'User-Agent': 'torch.hub'}), timeout=TIMEOUT) as response:
        length = response.headers['Content-Length']
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:
        partial = Path(scratch, path.name)
        digest = DIGEST.search(path.name)
        torch.hub.download_url_to_file(url, str(partial), digest and digest[1])
        if length and partial.stat().st_size != int(length):
            raise EOFError(f'{partial.stat().st_size} of {length} bytes arrived')
        os.replace(partial, path)
    return path


def from_hub(repo: str, file: str) -> Path:
    """A file of a repository on the Hugging Face hub, in huggingface_hub's cache."""
    import huggingface_hub as hub

    if not isinstance(hub.try_to_load_from_cache(repo, file), str):
        # Without a network this fails at once; hf_hub_download would try for a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(repo, file), timeout=TIMEOUT)
    return Path(hub.hf_hub_download(repo, file))
