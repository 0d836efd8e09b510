"""KV blocks on their way: each transport from pool to pool (`transports`, whose processes are `ends`), and what pushing
costs the streams of the decode node (`interference`)."""
