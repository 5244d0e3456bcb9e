"""The official `openai` package against `toolstorm serve`: its own parsing, streaming and typed helpers.

Usage: openai_client.py PATH-TO-TOOLSTORM. Starts the server, runs every check, stops it; a failed check fails the run.
"""

import asyncio
import json
import subprocess
import sys

import openai
from pydantic import BaseModel

LEAD = "Make exactly this tool call, copying every character:"
MODEL = "toolstorm-copy"


class Place(BaseModel):
    name: str
    height: int


class FindPlace(BaseModel):
    """Finds a place."""

    city: str
    place: Place
    tags: list[str]


def find_place(number):
    """A call; no 28 bytes of one occur in another."""
    arguments = {
        "city": f"Łódź №{number}",
        "place": {"name": f"🗼{number}\"\\", "height": number * 7919},
        "tags": [f"a{number}", ""],
    }
    return {"name": "FindPlace", "arguments": json.dumps(arguments, ensure_ascii=bool(number % 2))}


def ping(number):
    return {"name": f"ping_{number}", "arguments": "{}"}


def dictate(*calls):
    lines = [f'{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}' for call in calls]
    return "\n".join(["Please.", LEAD, *lines])


def tools(*calls):
    plain = [
        {"type": "function", "function": {"name": call["name"], "parameters": {"type": "object", "properties": {}}}}
        for call in calls
        if call["name"] != "FindPlace"
    ]
    return [openai.pydantic_function_tool(FindPlace), *plain]


def request(*calls, **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": dictate(*calls)}], "tools": tools(*calls), **more}


def pairs(tool_calls):
    return [{"name": call.function.name, "arguments": call.function.arguments} for call in tool_calls or []]


def whole_answer(client):
    want = [find_place(1), ping(2)]
    answer = client.chat.completions.create(**request(*want))
    choice = answer.choices[0]
    assert pairs(choice.message.tool_calls) == want, choice
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert all(call.type == "function" for call in choice.message.tool_calls)
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def raw_stream(client):
    want = [find_place(3), ping(4)]
    calls, reasons, usage = {}, [], None
    stream = client.chat.completions.create(**request(*want), stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for delta in choice.delta.tool_calls or []:
                call = calls.setdefault(delta.index, {"name": "", "arguments": ""})
                call["name"] += delta.function.name or ""
                call["arguments"] += delta.function.arguments or ""
    assert [calls[index] for index in sorted(calls)] == want, calls
    assert reasons == ["tool_calls"] and usage.completion_tokens > 0


def accumulating_stream(client):
    want = [find_place(5), ping(6)]
    done, deltas = [], 0
    with client.chat.completions.stream(**request(*want)) as stream:
        for event in stream:
            deltas += event.type == "tool_calls.function.arguments.delta"
            if event.type == "tool_calls.function.arguments.done":
                done.append({"name": event.name, "arguments": event.arguments})
        final = stream.get_final_completion()
    assert done == want, done
    assert deltas > 20, f"{deltas} deltas: that is no stream"
    assert pairs(final.choices[0].message.tool_calls) == want
    parsed = final.choices[0].message.tool_calls[0].function.parsed_arguments
    assert parsed.place.height == 5 * 7919


def typed_answer(client):
    answer = client.chat.completions.parse(**{**request(find_place(7)), "tools": tools()})
    parsed = answer.choices[0].message.tool_calls[0].function.parsed_arguments
    assert parsed == FindPlace(**json.loads(find_place(7)["arguments"])), parsed


def rounds(client):
    messages = [{"role": "system", "content": "You call tools."}]
    for number in range(10, 16):
        want = [find_place(number)]
        messages.append({"role": "user", "content": dictate(*want)})
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools(), tool_choice="required")
        message = answer.choices[0].message
        assert pairs(message.tool_calls) == want, message
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "x" * 300})
    assert answer.usage.prompt_tokens_details.cached_tokens >= 256, "the history was prefilled again"


def text_answer(client):
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "stop" and message.content == "" and not message.tool_calls


def errors(client):
    def caught(kind, **change):
        try:
            client.chat.completions.create(**{**request(ping(20)), **change})
        except kind as error:
            return error
        raise AssertionError(f"{change} was accepted")

    assert caught(openai.BadRequestError, temperature=9).param == "temperature"
    assert caught(openai.BadRequestError, n=2).param == "n"
    assert caught(openai.NotFoundError, model="gpt-9").code == "model_not_found"
    assert caught(openai.BadRequestError, messages=[{"role": "user", "content": "x" * 99_999}]).code == (
        "context_length_exceeded"
    )


def models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def closed_stream(client):
    stream = client.chat.completions.create(**request(find_place(30)), stream=True)
    next(iter(stream))
    stream.close()


def many_at_once(client):
    async def one(asynchronous, number):
        want = [find_place(number), ping(number)]
        if number % 2:
            answer = await asynchronous.chat.completions.create(**request(*want))
        else:
            async with asynchronous.chat.completions.stream(**request(*want)) as stream:
                answer = await stream.get_final_completion()
        assert pairs(answer.choices[0].message.tool_calls) == want, answer

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as asynchronous:
            await asyncio.gather(*(one(asynchronous, number) for number in range(100, 124)))

    asyncio.run(all_of_them())


CHECKS = [
    whole_answer, raw_stream, accumulating_stream, typed_answer, rounds, text_answer, errors, models, closed_stream,
    many_at_once,
]


def main():
    server = subprocess.Popen([sys.argv[1], "serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        url = json.loads(server.stdout.readline())["listening"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        for check in CHECKS:
            check(client)
            print(f"ok: openai {openai.__version__}: {check.__name__}", flush=True)
    finally:
        server.terminate()
        code = server.wait(timeout=60)
    assert code == 0, f"the server ended with {code}"


main()
