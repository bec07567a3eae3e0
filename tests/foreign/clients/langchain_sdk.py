"""LangChain's `ChatOpenAI`."""

from typing import Any

from cases import WEATHER, Person, base_url, run
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

ASK = [SystemMessage("Be brief."), HumanMessage("Who is it?")]


def _chat(seed: int) -> ChatOpenAI:
    return ChatOpenAI(
        model="fake", base_url=base_url(), api_key="any", max_retries=0, temperature=1, max_tokens=400, seed=seed
    )


def structured_output() -> Any:
    """`with_structured_output` by each of its ways that the schema binds."""
    ways = ("json_schema", "function_calling")
    found = [_chat(1).with_structured_output(Person, method=way).invoke(ASK) for way in ways]
    assert all(isinstance(person, Person) for person in found)
    return [person.model_dump() for person in found]


def tools() -> Any:
    """`bind_tools`, the result as a message, and the answer."""
    first = _chat(2).bind_tools([WEATHER], tool_choice="required").invoke(ASK)
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in first.tool_calls]
    second = _chat(3).bind_tools([WEATHER], tool_choice="none").invoke([*ASK, first, *results])
    return {
        "arguments": [call["args"] for call in first.tool_calls],
        "prompts": [each.usage_metadata["input_tokens"] for each in (first, second)],
    }


def stream() -> Any:
    """A stream adds up, with its usage."""
    whole = _chat(4).invoke(ASK)
    chunks = list(_chat(4).stream(ASK, stream_usage=True))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    return {"text": total.content, "chunks": len(chunks)}


def streamed_tools() -> Any:
    """Calls of a stream add up."""
    total = None
    for chunk in _chat(5).bind_tools([WEATHER], tool_choice="get_weather").stream(ASK):
        total = chunk if total is None else total + chunk
    return [call["args"] for call in total.tool_calls]


def responses() -> Any:
    """The same class over `/v1/responses`, whole and streamed."""
    chat = ChatOpenAI(
        model="fake",
        base_url=base_url(),
        api_key="any",
        max_retries=0,
        max_tokens=400,
        use_responses_api=True,
        extra_body={"seed": 6},
    )
    person = chat.with_structured_output(Person).invoke(ASK)
    return {"person": person.model_dump(), "text": "".join(chunk.text for chunk in chat.stream(ASK))}


def embeddings() -> Any:
    """Vectors of several texts, of the text itself: LangChain would cut it into OpenAI's tokens."""
    model = OpenAIEmbeddings(model="fake", base_url=base_url(), api_key="any", check_embedding_ctx_length=False)
    return [len(vector) for vector in model.embed_documents(["one", "two"])]


if __name__ == "__main__":
    run(structured_output, tools, stream, streamed_tools, responses, embeddings)
