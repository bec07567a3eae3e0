"""Fuzzing of the HTTP door over loopback, in front of real workers with fake engines.

    python -m tests.fuzz.http --seconds 60 [--seed 7]

Two sources: requests made from the OpenAPI document by schemathesis (schema_cases.py), and bytes on a connection
(wire_cases.py). What every answer is held to is in oracle.py; after every round nothing may be held anywhere.
"""
