"""`trt-engine doctor`: check the installation, with fixes."""

from __future__ import annotations

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result
from trt_engine.device import parse_device
from trt_engine.errors import SetupError, UsageError


@options.verb()
@click.option("--peaks", is_flag=True, help="Also the device peaks, measured once and cached.")
@click.option("--device", type=options.DEVICE, help="With --peaks: only this device, cpu or cuda:0 [default: all].")
@click.option("--remeasure", is_flag=True, help="With --peaks: ignore the cache.")
def command(peaks: bool, device: str | None, remeasure: bool) -> int:
    """Check installed libraries, their consistency and the backends, with a fix for each problem.

    Changes nothing; --peaks caches its results next to the store. Exit code 3 when there is a problem, else 0.
    """
    if not peaks and (device is not None or remeasure):
        flag = "--remeasure" if device is None else "--device"
        raise UsageError(f"`{flag}` belongs to `--peaks`", hint="`trt-engine doctor --peaks`")

    from trt_engine.verbs.doctor.run import doctor

    report = doctor(peaks=_devices(device), remeasure=remeasure) if peaks else doctor()
    warnings = [f"{item.name}: {item.message}" for item in report.diagnoses if item.status in ("warning", "problem")]
    warnings += [f"peaks of {one.device}: {note}" for one in report.peaks for note in one.notes]
    print_result(report, warnings=warnings)
    return SetupError.exit_code if report.problems else 0


def _devices(device: str | None) -> list[str]:
    """The requested device, else the CPU and every GPU."""
    if device is not None:
        kind, number = parse_device(device)
        return [kind if kind == "cpu" else f"{kind}:{number}"]
    from trt_engine.device import info

    return ["cpu", *(f"cuda:{board.index}" for board in info.gpus())]
