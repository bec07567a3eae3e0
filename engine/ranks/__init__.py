"""One model on several processes of a host: tensor parallelism on CPUs, in compiled kernels with one process's bits."""
