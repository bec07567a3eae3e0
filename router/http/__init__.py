"""The OpenAI-compatible HTTP door: another spelling of the gRPC service's calls. Starlette and uvicorn stay in here."""
