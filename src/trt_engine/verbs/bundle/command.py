"""`trt-engine bundle META.json -o DIR`: all engines of a multi-component model, with logs and one report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result
from trt_engine.config.build import BuildConfig, BundleConfig
from trt_engine.errors import UsageError

_SOURCE = tuple(  # size options of the trtexec-driven RNNT-TDT builder: `--encoder-max-T 512`
    (component, which, dim)
    for component, dims in (("encoder", "T"), ("predictor", "U"), ("joint", "TU"))
    for dim in dims
    for which in ("min", "opt", "max")
)


def _source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for component, which, dim in _SOURCE:
        name = f"{component}_{which}_{dim}".lower()
        function = click.option(f"--{component}-{which}-{dim}", name, type=click.IntRange(min=0), hidden=True)(function)
    return function


@options.verb(dry_run=True)
@click.argument("meta", metavar="META", required=False, type=options.FILE)
@click.option("--meta", "meta_option", type=options.FILE, hidden=True)
@options.config_options(BundleConfig)
@options.config_options(
    BuildConfig,
    leave_out=("profiles", "batch", "shapes", "inputs"),
    helps={"timing_cache": "the file tactics' timings are kept in [default: timing.cache in the folder]"},
)
@options.out_option("The folder for engines, logs and report.", hint="name a folder, as `-o engines`")
@click.option("--workspace-mb", "workspace_mb", type=click.IntRange(min=1), hidden=True)
@click.option("--builder-opt-level", "level", type=click.IntRange(0, 5), hidden=True)
@_source_options
def command(meta: Path | None, meta_option: Path | None, out: Path | None, dry_run: bool, **values: Any) -> None:
    """Build every component in META (a model_meta.json) into one folder: engines, logs, timing cache, report.

    META without `components` describes an RNNT-TDT: encoder.onnx, predictor.onnx and joint.onnx next to it. Connections
    are checked before building. A repeated command builds only what changed.

    \b
      trt-engine bundle export/model_meta.json -o engines --backend trtexec --precision fp16
      trt-engine bundle export/model_meta.json -o engines --dim T=16:64:512 --run
      trt-engine inspect engines --run
    """
    if meta is not None and meta_option is not None and meta != meta_option:
        raise UsageError(f"META is `{meta}` and `--meta` is `{meta_option}`", hint="leave `--meta` out")
    source = meta or meta_option
    if source is None:
        raise UsageError("no META is given", hint="`trt-engine bundle model_meta.json -o engines`")
    if out is None:
        raise UsageError("no output folder is given", hint=f"`trt-engine bundle {source} -o engines`")
    _translate_source_options(values)
    bundled: BundleConfig = options.config_from(BundleConfig, values)
    config: BuildConfig = options.config_from(BuildConfig, values)

    from trt_engine.verbs.bundle import bundle_plan
    from trt_engine.verbs.bundle import run as bundle

    planned = bundle_plan.plan(source, out, bundled, config, command=options.command_line())
    if dry_run:
        print_result(bundle.planned_report(planned))
        return
    made = bundle.execute(planned)
    print_result(made.report)
    if made.error is not None:
        raise made.error


def _translate_source_options(values: dict[str, Any]) -> None:
    """Replace the options of the trtexec-driven builder by those of `bundle`."""
    sizes = []
    for component, which, dim in _SOURCE:
        if (given := values.pop(f"{component}_{which}_{dim}".lower())) is not None:
            span = ":".join(str(given) if which == part else "" for part in ("min", "opt", "max"))
            sizes.append(f"{component}.{dim}={span}")
    values["dims"] = (*sizes, *values["dims"])
    if (workspace_mb := values.pop("workspace_mb")) is not None:
        if values.get("workspace_mib") is not None:
            raise UsageError(
                "`--workspace-mb` and `--workspace` set the same option", hint="leave `--workspace-mb` out"
            )
        values["workspace_mib"] = f"{workspace_mb}MiB"
    if (level := values.pop("level")) is not None:
        values["options"] = (*(values.get("options") or ()), f"optimization_level={level}")
