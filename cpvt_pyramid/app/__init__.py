"""The application: from a folder of data to a trained, tested and exported model.

`cpvt` runs its commands. The rooms, in the order of the work:

- `data`: what is in a folder of data, checks of it, and configs for it;
- `training`: training and testing, with OpenMMLab;
- `predict`: from images to results, with any model;
- `export`: models as one file, compared with PyTorch before it is written; INT8;
- `page`: a web page for an exported model.

What they share: `config` (configs of OpenMMLab), `images` and `predictions` (both as files),
`tooling` (command lines, files, threads), `demo` (data sets) and `doctor` (the installation).
`commands` has a file for each command.

The library below, the rest of `cpvt_pyramid`, imports nothing from here. Importing this lets mmcv
find operators, where it has none of its own.
"""

from ..mmcv_operators import provide

provide()
