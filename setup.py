"""The build step that pyproject.toml cannot describe; everything else is there."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent


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
            ignored = shutil.ignore_patterns('__pycache__', 'setup_env.sh', 'mmcv_build.py')
            shutil.copytree(here / folder, target / folder, ignore=ignored)
        shutil.copy(here / 'model-index.yml', target)


setup(cmdclass={'build_py': BuildWithConfigs})
