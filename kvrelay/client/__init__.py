"""The Python clients of a kvrelay cluster: everything a user imports.

from kvrelay.client import Client, Token

with Client() as client:
    print(client.chat("What is the capital of France?", temperature=0).text)
"""

import sys

from kvrelay.packages import check_packages

check_packages(sys.path, names=("common",))

from common.chat.deltas import ToolCallDelta
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
from common.wire_names import FinishReason, PlanKind
from kvrelay.client.async_client import AsyncClient
from kvrelay.client.base import DEFAULT_ADDRESS
from kvrelay.client.chat import (
    AnswerFormat,
    ChatMessage,
    ChatTurn,
    Message,
    MessageDelta,
    ToolCall,
)
from kvrelay.client.collect import AsyncGenerationStream, GenerationStream
from kvrelay.client.events import (
    Accepted,
    CacheWrite,
    Completed,
    Event,
    Forecast,
    PlanChosen,
    PositionLogprobs,
    PromptLogprobs,
    Queued,
    RequestTimings,
    Token,
    TokenLogprob,
    TokenRun,
    TransferStats,
    Usage,
)
from kvrelay.client.explanations import (
    Candidate,
    Decision,
    DecisionOutcome,
    Diagnosis,
    Finding,
    PoolWalls,
    Prediction,
    TenantWaits,
)
from kvrelay.client.requests import CacheMark, EmbedOptions, GenerateOptions, Prompt, ServiceTerms
from kvrelay.client.results import Embedding, Generation, ModelInfo, Sample, Tokenization
from kvrelay.client.status import (
    ClusterStatus,
    DeviceReport,
    Forgotten,
    ForgottenWorker,
    HotPrefix,
    LinkRate,
    PlannerStatus,
    PlanRecord,
    PlanTerm,
    PoolPlan,
    PrefixHolder,
    RouterStatus,
    StepModel,
    StepTotals,
    TimingReport,
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
    "AnswerFormat",
    "AsyncClient",
    "AsyncGenerationStream",
    "AsyncTrafficStream",
    "Cancelled",
    "ClientGone",
    "CacheMark",
    "CacheWrite",
    "Candidate",
    "ChatMessage",
    "ChatTurn",
    "Client",
    "ClusterStatus",
    "Completed",
    "DeadlineExceeded",
    "Decision",
    "DecisionOutcome",
    "DeviceReport",
    "Diagnosis",
    "EmbedOptions",
    "Embedding",
    "EngineFault",
    "Event",
    "Finding",
    "FinishReason",
    "Forecast",
    "Forgotten",
    "ForgottenWorker",
    "GenerateOptions",
    "Generation",
    "GenerationStream",
    "HotPrefix",
    "InvalidRequest",
    "KvrelayError",
    "LinkRate",
    "Message",
    "MessageDelta",
    "ModelInfo",
    "Overloaded",
    "PlanChosen",
    "PlanKind",
    "PlanRecord",
    "PlanTerm",
    "PlannerStatus",
    "PoolPlan",
    "PoolWalls",
    "PositionLogprobs",
    "Prediction",
    "PrefixHolder",
    "Prompt",
    "PromptLogprobs",
    "PromptTooLong",
    "Queued",
    "RecordedRequest",
    "RequestError",
    "RequestTimings",
    "RouterStatus",
    "Sample",
    "SamplingOptions",
    "ServiceTerms",
    "StepModel",
    "StepTotals",
    "TenantWaits",
    "TimingReport",
    "Token",
    "TokenLogprob",
    "TokenRun",
    "Tokenization",
    "ToolCall",
    "ToolCallDelta",
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
