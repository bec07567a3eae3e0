"""`python -m prefill_worker`: a prefill worker as a plain process."""

from prefill_worker.server import ROLE, add_services
from worker.shell import worker_main

if __name__ == "__main__":
    worker_main(ROLE, add_services)
