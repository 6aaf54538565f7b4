"""Models of OpenMMLab: building them, loading their weights, and what they predict."""
