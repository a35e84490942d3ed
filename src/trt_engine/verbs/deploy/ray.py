"""`deploy ray`: the application file of Ray Serve, with the engines and models beside it."""

from __future__ import annotations

import yaml

from trt_engine.graph.load import open_model
from trt_engine.records.deploy import DeployedModel, DeployedSetting
from trt_engine.verbs.deploy.config import RayConfig
from trt_engine.verbs.deploy.job import DeployJob, Written

APP = "app.yaml"
_BUILDER = "trt_engine.verbs.deploy.ray_app:build_app"


def write(job: DeployJob) -> Written:
    """Write `app.yaml` and `engines/`. Nothing of Ray is needed here."""
    config: RayConfig = job.config
    files = {}
    for name, path in job.sources.items():
        files[name] = f"engines/{name}/{path.name}"
        if name in job.engines:
            job.copy_engine(job.engines[name], files[name])
        else:
            _copy_model(job, name, files[name])
    job.write(APP, yaml.safe_dump(_document(job, config, files), sort_keys=False))
    chosen = (
        DeployedSetting("autoscaling_config.max_replicas", str(config.max_replicas), "as given or by default"),
        DeployedSetting(
            "autoscaling_config.target_ongoing_requests", f"{config.target_requests:g}", "as given or by default"
        ),
    )
    models = tuple(
        DeployedModel(
            name, str(path), job.digest(name),
            job.engines[name].passport.backend if name in job.engines else config.backend or None, chosen,
            () if name in job.engines else ("built where a replica starts, once for each kind of device",),
        )
        for name, path in job.sources.items()
    )  # fmt: skip
    return Written(
        models, f"serve run {job.out / APP}",
        ("every node opens the folder by the same path: share it, or copy it to each",),
    )  # fmt: skip


def _copy_model(job: DeployJob, name: str, target: str) -> None:
    """The model, and the files that its weights are in."""
    model = open_model(job.sources[name])
    job.copy_file(model.path, target)
    for item in model.external:
        job.copy_file(item.path, f"{target.rpartition('/')[0]}/{item.location}")


def _document(job: DeployJob, config: RayConfig, files: dict[str, str]) -> dict[str, object]:
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.host, "port": config.port},
        "applications": [
            {
                "name": "trt-engine",
                "route_prefix": "/",
                "import_path": _BUILDER,
                "args": {"folder": str(job.out.absolute()), "models": files, "backend": config.backend},
                "deployments": [
                    {
                        "name": "Engines",
                        "max_ongoing_requests": 64,
                        "ray_actor_options": {"num_cpus": 1, "num_gpus": config.gpus},
                        "autoscaling_config": {
                            "min_replicas": config.min_replicas,
                            "max_replicas": config.max_replicas,
                            "target_ongoing_requests": config.target_requests,
                            "upscale_delay_s": 10,
                            "downscale_delay_s": 120,
                        },
                    }
                ],
            }
        ],
    }
