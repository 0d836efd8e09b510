"""The self-test of the transfer path, between `baton doctor --listen` and `baton doctor --peer`.

    peer: sends, as a prefill node                         listener: receives, as a decode node
      CLOCK  ...................................... round trips
      STREAM ...................................... plain TCP: the ceiling of sockets
      TRANSFER: pool -> KvSender -> transport ===== KvReceiver -> pool, checked block by block

Each is a connection of its own (`control`) to the listener's one port. `ends` moves the blocks, in a process of its own
at either side; `links` says what the way between them should carry, and `verdicts` compares.
"""
