"""Data sets on disk, and configs for them: recognize, describe, read, check, adapt, write.

`recognize` turns the names of a folder's files into the settings of a `data.yaml`, or questions;
`description.py` is that file. `read.py` reads what it declares with the reader of its format into
one form in memory (`data.py`), which `check.py` checks, with the kinds of defects of `defects.py`.
`adapt.py` and `recipes.py` adapt a base, and `new_config.py` writes the config. `config_data.py`
checks the data sets of a config with the same check, and `report.py` is `cpvt check-data`.
"""
