"""Detections and label maps: what they are, how they are written, drawn and compared.

Imports neither torch nor mm: the tools and exported models share it.
"""
