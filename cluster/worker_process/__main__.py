"""`python -m cluster.worker_process --role prefill|decode`: a worker as a plain process."""

from cluster.worker_process.server import start_pool_worker
from worker.shell import worker_main

if __name__ == "__main__":
    worker_main(start_pool_worker)
