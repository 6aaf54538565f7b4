"""The build steps that pyproject.toml cannot describe; everything else is there."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
RELATIVE = r'\((?!\w+:)([^)\s]+)\)'  # the target of a link to a file of the repository


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
            ignored = shutil.ignore_patterns('__pycache__', 'setup_env.sh')
            shutil.copytree(here / folder, target / folder, ignore=ignored)
        shutil.copy(here / 'model-index.yml', target)


def for_index(readme: str, pyproject: str) -> str:
    """The README as a package index shows it, where relative links lead nowhere.

    They become links to `Repository` of [project.urls]. While that has no owner, pictures are left
    out, and of links the text stays.
    """
    repository = re.search(r'^Repository = "((?!.*/OWNER/).+)"$', pyproject, re.M)
    if not repository:
        without_pictures = re.sub(rf'!\[[^\]]*\]{RELATIVE}', '', readme)
        return re.sub(rf'\[([^\]]*)\]{RELATIVE}', r'\1', without_pictures)
    picture = rf'(!\[[^\]]*\]){RELATIVE}'
    with_pictures = re.sub(picture, rf'\1({repository[1]}/raw/HEAD/\2)', readme)
    return re.sub(rf'\]{RELATIVE}', rf']({repository[1]}/blob/HEAD/\1)', with_pictures)


if __name__ == '__main__':
    setup(
        cmdclass={'build_py': BuildWithConfigs},
        long_description=for_index(
            (here / 'README.md').read_text(encoding='utf-8'),
            (here / 'pyproject.toml').read_text(encoding='utf-8'),
        ),
        long_description_content_type='text/markdown',
    )
