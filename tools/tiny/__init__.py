"""baton-tiny, the embedded model: `tasks` generates its data, `training` makes and measures its weights.

`tools/tiny_tasks.py` is the public face of the tasks and `tools/train_tiny.py` the command of the training. The arrow
points down: training uses the tasks, and the tasks know nothing of it.
"""
