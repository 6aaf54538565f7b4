"""Position-aware pyramid backbones for detection and segmentation."""

from importlib import import_module

# Imported on first use: `python -m cpvt_pyramid.doctor` must run where torch does not import.
_PUBLIC = {
    'ARCHS': 'archs',
    'Arch': 'archs',
    'CPVT': 'columnar',
    'CPVTPyramid': 'pyramid',
    'DenseCPVT': 'columnar',
    'PEG': 'position',
    'COLUMNAR_ARCHS': 'archs',
    'ColumnarArch': 'archs',
    'PosCNN': 'position',
    'load_weights': 'weights',
}

__all__ = list(_PUBLIC)
__version__ = '0.1.0'


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'.{_PUBLIC[name]}', __name__), name)
