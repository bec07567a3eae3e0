"""Makes a configuration definite on this host: a model that is here, ports that are free."""

from collections.abc import Collection
from pathlib import Path

from cluster.doctor.ranks import refuse_ranks
from cluster.processes.starter import Report
from common.config import RouterConfig, ServingConfig
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, expanded, resolve_model
from common.ports import dial_address, free_ports, is_port_free
from common.process import CannotStart


class ClusterError(Exception):
    """A cluster cannot be started or stopped; the message gives the reason and what to do."""


def with_model(config: ServingConfig, config_path: Path, report: Report) -> ServingConfig:
    """Return the configuration with a model that is on this host, without a relative path. Raises ClusterError."""
    if config.model.engine == "fake":
        return config
    if (template := config.model.chat_template) is not None:
        config = _with(config, chat_template=template.expanduser().absolute())
    model = config.model
    try:
        folder = resolve_model(model.id, local_files_only=model.local_files_only)
        if model.generation_config:
            _report_faults(folder, report)
    except ModelNotFound as error:
        if model.id != DEFAULT_MODEL_ID:
            raise ClusterError(f"{config_path}:{error.key}: {error}") from error
        folder = _fetch_default_model(report)
    try:
        refuse_ranks(config, folder)
    except CannotStart as error:
        raise ClusterError(f"{config_path}:{error.key}: {error}") from error
    is_local_folder = model.id != DEFAULT_MODEL_ID and expanded(model.id).is_dir()
    if not is_local_folder:
        return config
    return _with(config, id=str(folder))


def _with(config: ServingConfig, **values: object) -> ServingConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=values)})


def _report_faults(folder: Path, report: Report) -> None:
    """Report the recommended sampling that routers leave out. Raises ModelNotFound."""
    from common.text_files import read_recommended_sampling  # imports tokenizers

    for fault in read_recommended_sampling(folder).faults:
        report(f"generation_config.json of {folder.name}: {fault}; it is left out")


def _fetch_default_model(report: Report) -> Path:
    from engine.default_model import FetchFailed, fetch_default_model  # imports torch

    try:
        return fetch_default_model(report)
    except FetchFailed as error:
        raise ClusterError(str(error)) from error


def with_ports(config: ServingConfig, config_path: Path) -> ServingConfig:
    """Return the configuration with definite ports of the routers, which restarted routers keep.

    Raises ClusterError for a port that is taken.
    """
    router = config.router
    wanted = {"port": router.port}
    if router.http_port is not None:
        wanted["http_port"] = router.http_port
    definite: dict[str, int] = {}
    # Configured ports first: a free port must differ from them.
    for key in sorted(wanted, key=lambda name: wanted[name] == 0):
        taken = {port + idx for port in definite.values() for idx in range(router.count)}
        definite[key] = _definite_port(router, key, taken=taken, config_path=config_path)
    return config.model_copy(update={"router": router.model_copy(update=definite)})


def _definite_port(router: RouterConfig, key: str, *, taken: Collection[int], config_path: Path) -> int:
    """Return the first of `router.count` consecutive free ports: the configured ones, or any for 0.

    Raises ClusterError.
    """
    host, port = router.host, getattr(router, key)
    try:
        if port == 0:
            return free_ports(host, router.count, taken=taken)
        busy = next((each for each in range(port, port + router.count) if not is_port_free(host, each)), None)
    except OSError as error:
        raise ClusterError(f"{config_path}:router.host: cannot listen on {host}: {error.strerror}") from error
    if busy is None:
        return int(port)
    off = ", or null for no HTTP" if key == "http_port" else ""
    raise ClusterError(
        f"{config_path}:router.{key}: {dial_address(host, busy)} is taken by another program;"
        f" choose another port, or 0 for a free one{off}"
    )
