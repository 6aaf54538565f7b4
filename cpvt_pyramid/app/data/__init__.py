"""Data sets on disk, and configs for them.

    folder -> settings of a data.yaml -> Description -> DataSet -> check -> config

`layouts` is a table with a file for each layout: how it is recognized from the names in a folder
(`listing.py`, `folders.py`, `splits.py`), and how it is read. `recognize.py` goes through the
table; what it does not decide is declared in a `data.yaml` (`description.py`), and nothing after it
guesses. Layouts with a file for each image share one reader (`annotation_files.py`).

All are read into one record (`data.py`: images with objects, which have outlines and may have
holes, or with masks, see `mask_values.py`), and checked (`check.py`), with the kinds of defects of
`defects.py`. `read.py` is this way for all commands. `new_config.py` writes a config, for which
`adapt.py` and `recipes.py` adapt a base; `config_data.py` checks the data sets of a config with the
same check, and `report.py` is `cpvt check-data`.
"""
