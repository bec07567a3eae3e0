"""The KV connector for vLLM's own servers: `vllm serve --kv-transfer-config` names `KvrelayConnector` of this module.

docs/engines.md has the two commands.
"""

from collections.abc import Sequence

from torch import Tensor

from engine.kv_store import KvShape
from engine.vllm.connector.pages import RankPages, copies_of
from engine.vllm.connector.plugin import ConnectorPlugin
from engine.vllm.connector.routes import RankPlace
from worker.connector_config import ConnectorConfig
from worker.rank_endpoint import RankEndpoint


class KvrelayConnector(ConnectorPlugin):
    """See the module."""

    def open_endpoint(self, layers: Sequence[Tensor], shape: KvShape, place: RankPlace) -> RankEndpoint:
        """See `ConnectorPlugin`."""
        config = ConnectorConfig.model_validate(self._kv_transfer_config.kv_connector_extra_config)
        num_slots = max(1, (config.ring_mib << 20) // shape.block_bytes)
        return RankEndpoint(RankPages(copies_of(layers), shape, num_slots=num_slots), config, place)
