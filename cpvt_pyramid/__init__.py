"""CPVT, Twins, PVT, PVTv2 and MiT backbones for detection and segmentation.

    from cpvt_pyramid import CPVTPyramid, load_weights

This is the library: backbones, which need torch alone, and what knows other libraries in modules of
its own: `mm.detection` and `mm.segmentation` (plugins for MMDetection and MMSegmentation),
`timm_models` and `hub`. Detectors and segmentors are in `tasks`. The application is the folder
`app`: `cpvt` runs its commands, and `app.predict` runs exported models without torch. Nothing of
the library imports it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# Imported on first use: `cpvt_pyramid.app.predict` and `cpvt_pyramid.app.doctor` run without torch.
_PUBLIC = {
    'ARCHS': 'archs',
    'Arch': 'archs',
    'CPVT': 'columnar',
    'CPVTPyramid': 'model',
    'DenseCPVT': 'columnar',
    'PEGConfig': 'position',
    'COLUMNAR_ARCHS': 'archs',
    'ColumnarArch': 'archs',
    'PosCNN': 'model',
    'accelerate': 'acceleration.accelerate',
    'load_trained': 'tasks.trained',
    'load_weights': 'checkpoints.loading',
}
if TYPE_CHECKING:
    from .acceleration.accelerate import accelerate as accelerate
    from .archs import ARCHS as ARCHS
    from .archs import COLUMNAR_ARCHS as COLUMNAR_ARCHS
    from .archs import Arch as Arch
    from .archs import ColumnarArch as ColumnarArch
    from .checkpoints.loading import load_weights as load_weights
    from .columnar import CPVT as CPVT
    from .columnar import DenseCPVT as DenseCPVT
    from .model import CPVTPyramid as CPVTPyramid
    from .model import PosCNN as PosCNN
    from .position import PEGConfig as PEGConfig
    from .tasks.trained import load_trained as load_trained

__all__ = list(_PUBLIC)
__version__ = '1.0.0rc1'


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    try:
        return getattr(import_module(f'.{_PUBLIC[name]}', __name__), name)
    except ModuleNotFoundError as error:
        if error.name != 'torch':
            raise
        text = f'{name} needs PyTorch, which is not installed; pip install torch'
        raise ImportError(text) from None
    except AttributeError as error:  # Python would say "cannot import name", without the cause
        raise ImportError(f'{name} cannot be imported: {error}') from error


def __dir__() -> list[str]:
    return __all__
