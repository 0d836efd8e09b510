"""Write the protobuf and gRPC stubs beside the .proto files; `--check` fails when the committed ones are stale."""

from __future__ import annotations

import argparse
import importlib.resources
import pathlib
import sys
import tempfile

from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent / "proto"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: pathlib.Path) -> None:
    """Run protoc over every .proto under `proto/` into `out`. Raises RuntimeError when protoc fails."""
    include = importlib.resources.files("grpc_tools") / "_proto"
    protos = sorted(str(p) for p in ROOT.rglob("*.proto"))
    flags = [f"-I{ROOT}", f"-I{include}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *flags, *protos]):
        raise RuntimeError("protoc failed")


def stale(fresh: pathlib.Path) -> list[str]:
    """Paths, relative to `proto/`, whose committed text differs from that in `fresh`."""
    names = [p.relative_to(fresh) for s in SUFFIXES for p in fresh.rglob(f"*{s}")]
    return [str(n) for n in names if not (ROOT / n).exists() or (ROOT / n).read_text() != (fresh / n).read_text()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a committed stub is stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(pathlib.Path(folder))
        old = stale(pathlib.Path(folder))
    for name in old:
        print(f"stale: proto/{name}: run `make stubs`", file=sys.stderr)
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main())
