"""Distillation: a small pyramid learns what a published classifier sees in unlabelled photographs.

Modules: photographs (what is in packages, and crops of it), teacher (the classifier), training.
"""
