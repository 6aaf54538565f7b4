"""Checkpoints: files of any known format, loaded into the models of this package.

`downloads` finds a file by its name, `reading` reads it, `formats` converts names and shapes as
`table` says, `fit` compares them with a model, `loading` loads them, and `convert` writes them in
another format. `hook` is the part of this that `load_state_dict` of a model does itself.
"""
