"""Names of enum values on the wire. Separate from `common.wire`, so that clients need no NumPy."""

from kvrelay.v1 import worker_pb2

ROLE_NAMES = {worker_pb2.WORKER_ROLE_PREFILL: "prefill", worker_pb2.WORKER_ROLE_DECODE: "decode"}
ROLE_NUMBERS = {name: number for number, name in ROLE_NAMES.items()}
TRANSPORT_NAMES = {
    number: name.removeprefix("KV_TRANSPORT_").lower() for name, number in worker_pb2.KvTransport.items() if number
}
TRANSPORT_NUMBERS = {name: number for number, name in TRANSPORT_NAMES.items()}
