"""The position laboratory: what CPVT claims about position, tested on small models.

`__main__` is its command line, `questions` lists what can be asked. `scenes` draws pictures whose
questions need position, `tasks` asks them and computes what a bag of patches can answer, `runs`
trains and remembers, `laboratory` says what is compared. `encodings` and `sizes` compare the
trained models. `probe`, `padding`, `shift`, `attention` and `registers` apply
`cpvt_pyramid.lab.probes` to them (`groups`) or to other models (`given_models`).
"""
