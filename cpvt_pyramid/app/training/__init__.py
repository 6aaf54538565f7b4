"""Training and testing the models of configs."""
