"""The position laboratory: what CPVT claims about position, tested on small models.

`__main__` is its command line. `scenes` draws pictures whose questions need position,
`tasks` asks them and computes what a bag of patches can answer, `runs` trains and remembers,
`questions` puts it together, and `measures` applies `cpvt_pyramid.lab.probes` to the trained models
and to any other.
"""
