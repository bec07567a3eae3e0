"""One model on several processes of a host: tensor parallelism on CPUs, with the bits of one process."""
