"""`python -m cluster.worker_process --role prefill|decode`: a worker as a plain process (common/service_process.py)."""

from cluster.worker_process.server import start_pool_worker
from common.config import load_config
from common.log import setup_logging
from common.service_process import parse_service_args, reported_failures, run_service, service_parser
from common.wire_names import ROLE_NUMBERS


def main() -> None:
    """Parse the command line and serve until SIGTERM or SIGINT."""
    parser = service_parser("cluster.worker_process", "A kvrelay worker.")
    parser.add_argument("--role", choices=list(ROLE_NUMBERS), required=True, help="the pool in which it begins")
    parser.add_argument("--worker-id", help="name in its logs until it is enrolled (default ROLE-0)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="control port; 0 picks a free one of its pool's `ports`")
    args = parse_service_args(parser)
    setup_logging(args.worker_id or f"{args.role}-0")
    with reported_failures():
        config = load_config(args.config).for_worker()
        run_service(
            lambda credentials: start_pool_worker(
                config, credentials, role=ROLE_NUMBERS[args.role], host=args.host, port=args.port
            ),
            grace_s=lambda worker: worker.runtime.pool_config.drain_grace_s,
        )


if __name__ == "__main__":
    main()
