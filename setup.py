"""Exported models run without torch, which is therefore an extra, like the frameworks.

mmcv is in no extra: its operators must be compiled with torch at hand, which an ordinary
`pip install` does not do. `python -m cpvt_pyramid.doctor` gives the command.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent


OF_THE_CHECKOUT = ('benchmarks', 'demo', 'position_lab.py', 'setup_env.sh')  # in tools/


class BuildWithConfigs(build_py):
    """Puts the configs and tools into the package as well, in the folder where mim looks."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib, 'cpvt_pyramid')
        shutil.rmtree(package, ignore_errors=True)  # what an earlier build left
        super().run()
        target = package / '.mim'
        for folder in ('configs', 'tools'):
            unneeded = OF_THE_CHECKOUT if folder == 'tools' else ()
            ignored = shutil.ignore_patterns('__pycache__', *unneeded)
            shutil.copytree(here / folder, target / folder, ignore=ignored)
        shutil.copy(here / 'model-index.yml', target)


TORCH = ['torch>=2.1']
RUNTIME = ['onnxruntime']

version = re.search(r"__version__ = '(.*)'", (here / 'cpvt_pyramid/__init__.py').read_text())[1]

setup(
    name='cpvt_pyramid',
    version=version,
    description='Position-aware pyramid backbones for detection and segmentation (CPVT, Twins)',
    long_description=(here / 'README.md').read_text(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Science/Research',
        'Operating System :: OS Independent',
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Image Recognition',
        'Typing :: Typed',
    ],
    packages=find_packages(include=['cpvt_pyramid*']),
    package_data={'cpvt_pyramid': ['py.typed', 'page/*']},
    cmdclass={'build_py': BuildWithConfigs},
    entry_points={'console_scripts': ['cpvt = cpvt_pyramid.__main__:main']},
    python_requires='>=3.9',
    install_requires=['numpy', 'pillow>=10.3', 'tqdm'],
    extras_require={
        'torch': TORCH,
        'runtime': RUNTIME,
        'app': [*RUNTIME, 'anyio>=4', 'starlette>=0.49', 'uvicorn>=0.39'],
        'openvino': ['openvino'],
        'mm': [
            *TORCH,
            'onedl-mmengine>=0.10.12',
            'onedl-mmdetection>=3.5.1',
            'onedl-mmsegmentation>=1.4.2',
            'filelock',
            'huggingface_hub>=0.31',  # configs start from timm:// weights
            'matplotlib',
            'pycocotools',
            'pyyaml',
            'safetensors',
            'yapf',
        ],
        'large': ['rasterio'],  # infer.py --tile and --format, bands other than RGB
        # train.py --log-to
        'tensorboard': ['tensorboard'],
        'wandb': ['wandb'],
        'mlflow': ['mlflow-skinny'],
        'timm': [*TORCH, 'timm>=1.0'],
        'torchvision': [*TORCH, 'torchvision>=0.16'],
        'hub': [*TORCH, 'huggingface_hub>=0.31', 'safetensors'],
        'export': ['torch>=2.7', *RUNTIME, 'onnx', 'onnxscript', 'scikit-image'],
        'lab': [*TORCH, 'matplotlib', 'scikit-image', 'scikit-learn'],  # experiments/position
        'dev': [
            'hypothesis',
            'pytest',
            'pytest-timeout',
            'pytest-xdist',
            'ruff',
            'scikit-image',
            'scikit-learn',
        ],
    },
)
