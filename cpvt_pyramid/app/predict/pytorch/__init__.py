"""Trained models in PyTorch, without OpenMMLab."""
