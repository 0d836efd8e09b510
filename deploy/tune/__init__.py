"""`baton tune`: reads the metrics of a run, and proposes what to set.

    sources  ->  pages (samples of a process, in order of time)  ->  Figures  ->  rules  ->  proposals, each with why

`figures` and `rules` are pure. May import `baton`; no torch.
"""
