"""Exported models: opening, checking and quantizing their files, without torch and OpenMMLab."""
