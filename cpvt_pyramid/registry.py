"""The scope `cpvt_pyramid` of mmengine's registries: `type='cpvt_pyramid.CPVTPyramid'` finds the
backbone without `custom_imports`. The class itself is registered once, in the root registry.
"""

from mmengine.registry import MODELS as ROOT
from mmengine.registry import Registry

MODELS = Registry('model', parent=ROOT, scope='cpvt_pyramid', locations=['cpvt_pyramid.mm'])
