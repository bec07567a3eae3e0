"""The router as an actor."""

import asyncio

from common.model_files import resolve_model
from common.process import RunningService
from common.service_actor import ServiceActor, ServiceParams
from common.trust.credentials import Credentials


class RouterActor(ServiceActor):
    """Runs `start_router`."""

    async def start_service(self, params: ServiceParams, credentials: Credentials, host: str) -> RunningService:
        """Start the router. Raises ModelNotFound when the tokenizer's files are not on this host."""
        from router.server import start_router

        model = params.config.model
        model_dir = None
        if model.engine != "fake":
            model_dir = await asyncio.to_thread(resolve_model, model.id, local_files_only=model.local_files_only)
        return await start_router(params.config, credentials, model_dir=model_dir, host=host, port=params.port)
