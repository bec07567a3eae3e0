"""`python -m pool_worker --role prefill|decode`: a worker as a plain process."""

from pool_worker.server import start_pool_worker
from worker.shell import worker_main

if __name__ == "__main__":
    worker_main(start_pool_worker)
