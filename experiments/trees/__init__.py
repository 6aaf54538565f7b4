"""The demo's detector of trees over several seeds: do distilled weights help it?

Modules: runs (one training and its measures).
"""
