"""Write src/trt_engine/open_inference/inference.binpb: the descriptors of the gRPC services, from the `.proto` files there.

python tools/grpc_descriptors.py            write it
python tools/grpc_descriptors.py --check    exit 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "src" / "trt_engine" / "open_inference"
TARGET = FOLDER / "inference.binpb"
SOURCES = ("inference.proto", "health.proto")


def compile_descriptors() -> bytes:
    """The serialized `FileDescriptorSet` of the services, without comments."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "set.binpb"
        code = protoc.main(["protoc", f"-I{FOLDER}", f"--descriptor_set_out={made}", *SOURCES])
        if code:
            sys.exit(code)
        return made.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    found = compile_descriptors()
    if not parser.parse_args().check:
        TARGET.write_bytes(found)
    elif not TARGET.exists() or TARGET.read_bytes() != found:
        sys.exit(f"{TARGET} is not up to date: python tools/grpc_descriptors.py")


if __name__ == "__main__":
    main()
