"""Data sets on disk: reading and checking them by format, pages about them, configs for them.

A layout of folders and the checks of its files are in the file of the format: `coco.py`, `yolo.py`,
`voc.py`, `label_maps.py`. Readers of boxes give `Objects` (`coco.py`) and report to `Defects`
(`defects.py`); `find_objects` tries them in turn. What all of them need of file names is in
`folder.py`, and of images in `images.py`. `checks.py` applies the checks to the data sets of a
config, `new_config.py` writes a config for a folder with a recipe (`recipes.py`), and `page.py`
shows what is in the data.
"""
