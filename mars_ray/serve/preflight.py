"""What can be said against a job within a moment, before torch and Ray are imported.

`serve/deploy.py` checks the rest; that takes as long as a start, for it reads models.
"""

from pathlib import Path

from mars_ray.autoscale.service_model import load_service_model
from mars_ray.cluster.port import check_port
from mars_ray.config.serve import ServeJob
from mars_ray.errors import ConfigError, ModelError
from mars_ray.serve.ingress.api_keys import ApiKeys
from mars_ray.storage.place import Place, shown


def preflight(job: ServeJob) -> None:
    """Raises ConfigError or ModelError for what is missing, wrong files, and a taken port."""
    check_port(job.host, job.port)
    models = job.each()
    ApiKeys(job.keys_file).check_models(models)
    if job.request_log and not Path(job.request_log).resolve().parent.is_dir():
        raise ConfigError(
            f"request_log={job.request_log}: there is no such directory on this machine; make it, "
            "or name another"
        )
    for model in models.values():
        _check_files(model)


def _check_files(job: ServeJob) -> None:
    engine = job.engine
    for what, name in (
        ("model", job.checkpoint),
        ("draft adapter", engine.draft_adapter),
    ):
        if name and _is_missing(name):
            raise ModelError(
                f"{shown(name)} is no {what}: there is no such directory on this machine; name "
                "one, a name of the hub (org/name), or a URI"
            )
    if job.service_model:
        load_service_model(job.service_model)


def _is_missing(name: str) -> bool:
    place = Place.parse(name)
    return not (place.is_uri or place.is_on_hub or Path(name).is_dir())
