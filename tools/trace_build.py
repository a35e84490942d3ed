"""The way of a model through `te.build`: modules that receive it, stays, returns, and the names it has as a parameter.

    python tools/trace_build.py [MODEL]

traces one build (the default: examples/digits/model.onnx with the default backend, into an empty store). A call counts
when one of its arguments is the model: its path, its `Model`, its parsed proto, the index of it, or an object that has
one of them as an attribute `model` or `source`; a function that calls another one many times (once for each node) counts
once. A stay is a run of such calls in one module; a return is a stay in a module left before.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

_DIGITS = Path(__file__).resolve().parents[1] / "examples" / "digits" / "model.onnx"


def main(args: list[str]) -> int:
    model = Path(args[0]) if args else _DIGITS
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRT_ENGINE_STORE"] = str(Path(folder) / "store")
        import onnx

        import trt_engine as te

        build = te.build  # imported before the trace
        stays: list[str] = []
        names: dict[str, int] = {}
        calls: set[tuple[object, object]] = set()

        def is_model(value: Any) -> bool:
            if isinstance(value, str | Path):
                return str(value) == str(model)
            if isinstance(value, onnx.ModelProto):
                return True
            if type(value).__name__ == "GraphIndex":
                return True
            return type(value).__name__ == "Model" and str(getattr(value, "path", "")) == str(model)

        def trace(frame: FrameType, event: str, _: Any) -> None:
            module = frame.f_globals.get("__name__", "")
            if event != "call" or not module.startswith("trt_engine.") or frame.f_code.co_name.startswith("<"):
                return
            code, caller = frame.f_code, frame.f_back.f_code if frame.f_back is not None else None
            if (caller, code) in calls:
                return
            taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = {name: frame.f_locals.get(name) for name in taken}
            carriers = [getattr(value, part, None) for value in values.values() for part in ("model", "source")]
            found = [name for name, value in values.items() if name not in ("self", "cls") and is_model(value)]
            for name in found:
                names[name] = names.get(name, 0) + 1
            if found or any(map(is_model, carriers)):
                calls.add((caller, code))
                stays.extend([module] * (stays[-1:] != [module]))

        sys.setprofile(trace)
        try:
            build(model, out=Path(folder) / "net.engine.onnx")
        finally:
            sys.setprofile(None)
    returns = sum(module in stays[:at] for at, module in enumerate(stays))
    shown = ", ".join(f"{name} {count}" for name, count in sorted(names.items(), key=lambda item: -item[1]))
    lines = [f"modules {len(set(stays))}", f"stays {len(stays)}", f"returns {returns}", f"names {len(names)}: {shown}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
