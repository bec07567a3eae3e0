"""`python -m pool_worker --role prefill|decode`: a worker as a plain process."""

from pool_worker.server import add_services
from worker.shell import worker_main

if __name__ == "__main__":
    worker_main(add_services)
