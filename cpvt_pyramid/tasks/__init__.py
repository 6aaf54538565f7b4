"""Detectors and segmentors on the backbones, and those that OpenMMLab has trained, by name."""
