"""Images that rasterio (GDAL) opens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Union
from warnings import catch_warnings, filterwarnings

from .command import optional_package

if TYPE_CHECKING:
    from rasterio.io import DatasetReader


class ReadError(OSError):
    """A file that is not a complete image, or of an unsupported kind."""


def import_rasterio(user: str) -> ModuleType:
    """The module rasterio; a UserError that names its user if it is not installed."""
    optional_package('rasterio', user)
    import rasterio.features
    import rasterio.transform

    return rasterio


@contextmanager
def open_raster(path: Union[str, Path], user: str, **options: Any) -> Iterator['DatasetReader']:
    """Open an image to read it in parts; `user` is for the error if rasterio is missing, and
    `options` are settings of GDAL.

    Raises:
        ReadError: not a complete image, also inside the context.
    """
    rasterio = import_rasterio(user)
    from rasterio.errors import NotGeoreferencedWarning, RasterioError

    with catch_warnings(), rasterio.Env(**options):
        filterwarnings('ignore', category=NotGeoreferencedWarning)
        try:
            with rasterio.open(path) as image:
                yield image
        except RasterioError as error:
            raise ReadError(f'not a complete image: {error}') from error
