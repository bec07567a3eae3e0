"""Names of enum values on the wire. Separate from `common.wire`, so that clients need no NumPy."""

from kvrelay.v1 import worker_pb2

ROLE_NAMES = {worker_pb2.WORKER_ROLE_PREFILL: "prefill", worker_pb2.WORKER_ROLE_DECODE: "decode"}
ROLE_NUMBERS = {name: number for number, name in ROLE_NAMES.items()}
TRANSPORT_NAMES = {
    worker_pb2.KV_TRANSPORT_GRPC: "grpc",
    worker_pb2.KV_TRANSPORT_SHM: "shm",
    worker_pb2.KV_TRANSPORT_CUDA_IPC: "cuda_ipc",
}
TRANSPORT_NUMBERS = {name: number for number, name in TRANSPORT_NAMES.items()}
