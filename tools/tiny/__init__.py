"""baton-tiny, the embedded model: `tasks` generates its data, `training` trains and evaluates it.

`tools/tiny_tasks.py` is the public interface of the tasks, and `tools/train_tiny.py` is the training command. Training
imports the tasks, never the other way round.
"""
