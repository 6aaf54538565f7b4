"""Data sets on disk, and configs for them.

    folder -> settings of a data.yaml -> Description -> reader -> Data -> check -> config

`layouts` is a table with a file for each layout: how it is recognized from the names in a folder
(`listing.py`, `splits.py`, `folders.py`), and how it is read. `recognize.py` goes through the
table; what it does not decide is declared in a `data.yaml` (`description.py`), and nothing after it
guesses. `describe.py` is the way of all commands to data: described, read into one record
(`data.py`: images with objects, which have outlines and may have holes, or with masks), and checked
(`check.py`), with the kinds of defects of `defects.py`. `adapt.py` and
`recipes.py` adapt a base, and `new_config.py` writes the config. `config_data.py` checks the data
sets of a config with the same check, and `report.py` is `cpvt check-data`.
"""
