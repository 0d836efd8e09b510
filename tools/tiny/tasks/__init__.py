"""Generated tasks with checkable answers, in the standard library alone; `tools.tiny_tasks` names what others use.

Upwards: `words` and `draw`; `grammar` and `sample`; a room for each kind of task (`facts` and `recall`, `arithmetic`,
`lists`, `people`, `stories`, `small_talk`); `mix`, which says what is drawn how often; `chats`, which strings tasks
together. The order of the random draws inside a task is part of it: to change it changes every sample of a seed.
"""
