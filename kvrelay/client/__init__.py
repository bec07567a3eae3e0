"""The Python clients of a kvrelay cluster: everything a user imports.

from kvrelay.client import Client, Token

with Client() as client:
    print(client.chat("What is the capital of France?", temperature=0).text)
"""

from common.errors import (
    AccessDenied,
    Cancelled,
    ClientGone,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unauthenticated,
    UnknownModel,
    Unreachable,
    WorkerError,
    WorkerLost,
)
from common.sampling import SamplingOptions
from kvrelay.client.async_client import AsyncClient
from kvrelay.client.base import DEFAULT_ADDRESS
from kvrelay.client.collect import AsyncGenerationStream, GenerationStream
from kvrelay.client.records import (
    Accepted,
    ChatMessage,
    ChatTurn,
    Completed,
    Event,
    FinishReason,
    Generation,
    ModelInfo,
    PlanChosen,
    PlanKind,
    PositionLogprobs,
    Prompt,
    PromptLogprobs,
    RequestTimings,
    Sample,
    ServiceTerms,
    Token,
    Tokenization,
    TokenLogprob,
    TokenRun,
    TransferStats,
    Usage,
)
from kvrelay.client.requests import GenerateOptions
from kvrelay.client.status import (
    Candidate,
    ClusterStatus,
    Decision,
    DecisionOutcome,
    RouterStatus,
    WorkerLoad,
    WorkerStatus,
    WorkerView,
)
from kvrelay.client.sync_client import Client
from kvrelay.client.traffic import AsyncTrafficStream, RecordedRequest, TrafficStream

__all__ = [
    "DEFAULT_ADDRESS",
    "Accepted",
    "AccessDenied",
    "AsyncClient",
    "AsyncGenerationStream",
    "AsyncTrafficStream",
    "Cancelled",
    "ClientGone",
    "Candidate",
    "ChatMessage",
    "ChatTurn",
    "Client",
    "ClusterStatus",
    "Completed",
    "DeadlineExceeded",
    "Decision",
    "DecisionOutcome",
    "EngineFault",
    "Event",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "GenerationStream",
    "InvalidRequest",
    "KvrelayError",
    "ModelInfo",
    "Overloaded",
    "PlanChosen",
    "PlanKind",
    "PositionLogprobs",
    "Prompt",
    "PromptLogprobs",
    "PromptTooLong",
    "RecordedRequest",
    "RequestError",
    "RequestTimings",
    "RouterStatus",
    "Sample",
    "SamplingOptions",
    "ServiceTerms",
    "Token",
    "TokenLogprob",
    "TokenRun",
    "Tokenization",
    "TrafficStream",
    "TransferStats",
    "Unauthenticated",
    "UnknownModel",
    "Unreachable",
    "Usage",
    "WorkerError",
    "WorkerLoad",
    "WorkerLost",
    "WorkerStatus",
    "WorkerView",
]
