"""The Python clients of a kvrelay cluster: everything a user imports.

from kvrelay.client import Client, Token

with Client() as client:
    print(client.chat("What is the capital of France?", temperature=0).text)
"""

from common.errors import (
    Cancelled,
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
from kvrelay.client.async_client import AsyncClient, AsyncGenerationStream
from kvrelay.client.decisions import Candidate, Decision, DecisionOutcome
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
from kvrelay.client.requests import SamplingOptions
from kvrelay.client.status import ClusterStatus, RouterStatus, WorkerLoad, WorkerStatus, WorkerView
from kvrelay.client.sync_client import DEFAULT_ADDRESS, Client, GenerationStream

__all__ = [
    "DEFAULT_ADDRESS",
    "Accepted",
    "AsyncClient",
    "AsyncGenerationStream",
    "Cancelled",
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
