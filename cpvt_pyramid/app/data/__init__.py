"""Data sets on disk: reading and checking them by format, and configs for them.

A layout of folders and the checks of its files are in the file of the format: `coco.py`, `yolo.py`,
`voc.py`, `label_maps.py`. `readers.py` has the first layout read that a folder has: boxes as
`Objects` (`coco.py`), segmentation masks as `LabelMaps`, problems as `Defects` (`defects.py`). What
all of them need of file names is in `folder.py`, and of images in `images.py`. `checks.py` applies
the checks to the data sets of a config. `new_config.py` writes a config for a folder, with a recipe
(`recipes.py`).
"""
