"""`python -m router`: the router as a plain process (common/service_process.py)."""

from pathlib import Path

from common.config import ServingConfig, load_config
from common.log import setup_logging
from common.model_files import resolve_model
from common.ports import names_of
from common.service_process import parse_service_args, reported_failures, run_service, service_parser
from common.trust.credentials import Credentials
from router.server import RunningRouter, start_router

STOP_GRACE_S = 10.0


def main() -> None:
    """Parse the command line and serve until SIGTERM or SIGINT."""
    parser = service_parser("router", "The kvrelay router.")
    parser.add_argument("--host", help="address to listen on; default: serving.yaml's")
    parser.add_argument("--port", type=int, help="0 picks a free one; default: serving.yaml's")
    parser.add_argument("--index", type=int, default=0, help="number of this router; added to the ports of the file")
    args = parse_service_args(parser)
    setup_logging(f"router-{args.index}")
    with reported_failures():
        config = load_config(args.config).for_router(args.index)
        model_dir = _model_dir(config)
        host = config.router.host if args.host is None else args.host
        port = config.router.port if args.port is None else args.port

        async def start(credentials: Credentials) -> RunningRouter:
            return await start_router(config, credentials, model_dir=model_dir, host=host, port=port)

        run_service(start, grace_s=lambda _router: STOP_GRACE_S, hosts=lambda: [*names_of(host), *config.tls.names])


def _model_dir(config: ServingConfig) -> Path | None:
    if config.model.engine == "fake":
        return None
    return resolve_model(config.model.id, local_files_only=config.model.local_files_only)


if __name__ == "__main__":
    main()
