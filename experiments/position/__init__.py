"""Where does a model's sense of position come from, and does it carry over to other sizes?

`python -m experiments.position` is the command line. `encodings` compares encodings on pictures
(`scenes`) with questions that need position (`tasks`), at the size of the training and at others
(`sizes`); `paper` repeats the CPVT paper's own experiment with photographs (`fashion`).
"""
