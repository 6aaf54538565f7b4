"""The detector of trees over several seeds: do distilled weights help it, and does padding harm it?

Modules: runs (one training and its measures), padded_batches (its tests in padded batches).
"""
