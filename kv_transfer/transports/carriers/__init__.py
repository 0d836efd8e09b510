"""The carriers, which move the bytes of a pair transport: CUDA IPC or shared memory, NCCL, NIXL."""
