"""How good any model is on any data: what is true, AP and mIoU, and a page about them.

Nothing here needs torch or OpenMMLab.
"""
