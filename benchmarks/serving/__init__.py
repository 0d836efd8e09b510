"""A cluster over HTTP, as its clients see it.

`streams` loads it with concurrent streams (`make bench`). `mixed_steps`: prompts on a decode node; `failover`: pauses
when a node is lost; `startup`: from launch to ready; `observability`: what it costs to watch; `hostile`: what hostile
clients and peers do to others. `bench_agreement` and `bench_transformers` compare `baton bench` with other tools, and
baton with another server, through it.
"""
