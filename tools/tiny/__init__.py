"""baton-tiny, the embedded model: `tasks` generates its data, `training` makes and measures its weights.

`tools/tiny_tasks.py` is the public interface of the tasks, and `tools/train_tiny.py` is the command that trains.
Training imports the tasks, never the other way round.
"""
