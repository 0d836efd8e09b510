"""Generated tasks with checkable answers, using only the standard library; `tools.tiny_tasks` is the public interface.

From the bottom up: `words` and `draw`; `grammar` and `sample`; a module for each kind of task (`facts` and `recall`,
`arithmetic`, `lists`, `people`, `stories`, `small_talk`); `mix`, which sets how often each is drawn; `chats`, which
joins tasks. The order of the random draws inside a task is part of it: changing it changes every sample of a seed.
"""
