"""Writes the JSON of OpenAI's response endpoint: answers, and the events of streams.  Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from ostinato.serve.calls import ToolCall
from ostinato.serve.engine import End
from ostinato.serve.protocol import ApiError, CompletionRequest, event_text


class ResponseWriter:
    """Writes the one answer to a request of the kind "response", as a whole or as events.

    `head`: its `id`, `created` (seconds since 1970) and `model`.  The answer is a list of items:
    messages, which begin with their first text, and calls.
    """

    def __init__(self, wanted: CompletionRequest, head: Mapping[str, Any]) -> None:
        self._name = head["id"].removeprefix("resp_")
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._text: list[str] | None = None
        """The text of the message under way, or None; its item is the next one."""
        self._common = {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            **wanted.repeated,
            "temperature": wanted.sampling.temperature,
            "top_p": wanted.sampling.top_p,
            "background": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "top_logprobs": 0,
            "truncation": "disabled",
        }

    def answer(
        self, pieces: Iterable[str | ToolCall], end: End, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the whole answer.  `usage`: as from `usage_object`."""
        for piece in pieces:
            self.more(piece)
        return self._finished(end, usage)[1]

    def begin(self) -> str:
        """Returns the first events of a stream."""
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def more(self, piece: str | ToolCall) -> str:
        """Returns the events of further text, or of a call."""
        if isinstance(piece, ToolCall):
            return self._message_end("completed") + self._call(piece)
        events = self._message_begin() if self._text is None else ""
        assert self._text is not None
        self._text.append(piece)
        return events + self._part_event("response.output_text.delta", delta=piece, logprobs=[])

    def end(self, end: End, usage: Mapping[str, Any]) -> str:
        """Returns the last events.  `usage`: as from `usage_object`."""
        events, found = self._finished(end, usage)
        return events + self._event(f"response.{found['status']}", response=found)

    def fail(self, error: ApiError) -> str:
        """Returns the last event of an answer that failed."""
        begun = [] if self._text is None else [self._message("incomplete", "".join(self._text))]
        found = self._response("failed", [*self._items, *begun])
        # The API has a fixed list of codes, of which this is the one for errors of the server.
        found["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=found)

    def _finished(self, end: End, usage: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the events of the last item, and the answer."""
        status = "completed" if end is End.STOP else "incomplete"
        events = ""
        if not self._items and self._text is None:
            events = self._message_begin()
        events += self._message_end(status)
        found = self._response(status, self._items, usage)
        if status == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        return events, found

    def _message_begin(self) -> str:
        self._text = []
        item = {**self._message("in_progress", ""), "content": []}
        return self._item_event("added", item) + self._part_event(
            "response.content_part.added", part=_part("")
        )

    def _message_end(self, status: str) -> str:
        if self._text is None:
            return ""
        text, self._text = "".join(self._text), None
        item = self._message(status, text)
        events = (
            self._part_event("response.output_text.done", text=text, logprobs=[])
            + self._part_event("response.content_part.done", part=_part(text))
            + self._item_event("done", item)
        )
        self._items.append(item)
        return events

    def _call(self, call: ToolCall) -> str:
        item = {
            "id": self._id("fc_"),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        place = {"item_id": item["id"], "output_index": len(self._items)}
        what, arguments = "response.function_call_arguments", call.arguments
        events = (
            self._item_event("added", {**item, "status": "in_progress", "arguments": ""})
            + self._event(f"{what}.delta", **place, delta=arguments)
            + self._event(f"{what}.done", **place, name=call.name, arguments=arguments)
            + self._item_event("done", item)
        )
        self._items.append(item)
        return events

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            **self._common,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None,
            "output": [*output],
            "usage": None if usage is None else _usage(usage),
        }

    def _id(self, prefix: str) -> str:
        return f"{prefix}{self._name}{len(self._items) or ''}"

    def _message(self, status: str, text: str) -> dict[str, Any]:
        kind = {"id": self._id("msg_"), "type": "message", "role": "assistant"}
        return {**kind, "status": status, "content": [_part(text)]}

    def _item_event(self, what: str, item: Mapping[str, Any]) -> str:
        name = f"response.output_item.{what}"
        return self._event(name, output_index=len(self._items), item=item)

    def _part_event(self, name: str, **fields: object) -> str:
        item, index = self._id("msg_"), len(self._items)
        return self._event(name, item_id=item, output_index=index, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> str:
        event = event_text({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return f"event: {kind}\n{event}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
