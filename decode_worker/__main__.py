"""`python -m decode_worker`: a decode worker as a plain process."""

from decode_worker.server import ROLE, add_services
from worker.shell import worker_main

if __name__ == "__main__":
    worker_main(ROLE, add_services)
