"""`baton doctor`: checks this machine and, with another one or alone, the transfer path.

A check is a function that returns a `Finding`, mostly of figures that its module's `findings` reads from the machine.
What imports torch or loads a native library runs in a process of its own (`child`), so that a library that crashes is a
finding as well. `transfer` moves KV blocks as nodes do. May import everything; nothing imports it.
"""
