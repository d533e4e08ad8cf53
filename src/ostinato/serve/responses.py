"""Writes the JSON of OpenAI's response endpoint: answers, and the events of streams.  Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ostinato.serve.engine import End
from ostinato.serve.protocol import ApiError, CompletionRequest, event_text


class ResponseWriter:
    """Writes the one answer to a request of the kind "response".

    `head`: its `id`, `created` (seconds since 1970) and `model`.
    """

    def __init__(self, wanted: CompletionRequest, head: Mapping[str, Any]) -> None:
        self._item_id = "msg_" + head["id"].removeprefix("resp_")
        self._number = 0
        self._common = {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            **wanted.repeated,
            "temperature": wanted.sampling.temperature,
            "top_p": wanted.sampling.top_p,
            "background": False,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "truncation": "disabled",
        }

    def answer(self, text: str, end: End, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer.  `usage`: as from `usage_object`."""
        status = "completed" if end is End.STOP else "incomplete"
        found = self._response(status, [self._item(status, text)], usage)
        if status == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        return found

    def begin(self) -> str:
        """Returns the first events of a stream, which come before any text."""
        item = {**self._item("in_progress", ""), "content": []}
        return (
            self._event("response.created", response=self._response("in_progress", []))
            + self._event("response.in_progress", response=self._response("in_progress", []))
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._part_event("response.content_part.added", part=_part(""))
        )

    def more(self, text: str) -> str:
        """Returns the event of further text; none if it is empty."""
        name = "response.output_text.delta"
        return self._part_event(name, delta=text, logprobs=[]) if text else ""

    def end(self, text: str, end: End, usage: Mapping[str, Any]) -> str:
        """Returns the last events.  `text`: the whole one; `usage`: as from `usage_object`."""
        found = self.answer(text, end, usage)
        return (
            self._part_event("response.output_text.done", text=text, logprobs=[])
            + self._part_event("response.content_part.done", part=_part(text))
            + self._event("response.output_item.done", output_index=0, item=found["output"][0])
            + self._event(f"response.{found['status']}", response=found)
        )

    def fail(self, text: str, error: ApiError) -> str:
        """Returns the last event of an answer that failed.  `text`: what there is of it."""
        found = self._response("failed", [self._item("incomplete", text)])
        # The API has a fixed list of codes, of which this is the one for errors of the server.
        found["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=found)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            **self._common,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }

    def _item(self, status: str, text: str) -> dict[str, Any]:
        kind = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**kind, "status": status, "content": [_part(text)]}

    def _part_event(self, name: str, **fields: object) -> str:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, **fields: object) -> str:
        event = event_text({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return f"event: {name}\n{event}"


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
