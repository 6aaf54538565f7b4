"""What docs/ publishes: `position` asks where a model's sense of position comes from, `ports`
compares ports by training.

Both share how models are trained (`training`), in several processes (`parallel`), and how results
are summed up (`statistics`), drawn (`figures`) and written (`report`).
"""
