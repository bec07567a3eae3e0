"""serving.yaml: the one configuration file, typed and checked at start."""

from common.config.cluster import PlannerConfig, TlsConfig, TracingConfig
from common.config.keys import Need, in_yaml, leaves
from common.config.router import ENV_PREFIX, ROUTER_PORTS, RouterConfig, SloConfig, TenantConfig
from common.config.serving import NEEDS, ConfigError, ServingConfig, load_config, name_in, parse_config
from common.config.workers import ModelConfig, PoolConfig, PoolsConfig, TiersConfig, TransferConfig

__all__ = [
    "ENV_PREFIX",
    "NEEDS",
    "ROUTER_PORTS",
    "ConfigError",
    "ModelConfig",
    "Need",
    "PlannerConfig",
    "PoolConfig",
    "PoolsConfig",
    "RouterConfig",
    "ServingConfig",
    "SloConfig",
    "TenantConfig",
    "TiersConfig",
    "TlsConfig",
    "TracingConfig",
    "TransferConfig",
    "in_yaml",
    "leaves",
    "load_config",
    "name_in",
    "parse_config",
]
