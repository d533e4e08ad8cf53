"""The text of /metrics: requests, their times, and `statistics()` of every layer below.

Metrics of the layers are derived from their records, field by field:
`DecoderStatistics.host_writes` is `ostinato_decoder_host_writes`, a step's `replayed` is
`ostinato_step_replayed{step="decode"}`, a count by reason has the label `reason`.  Fields that are
not numbers are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ostinato.serve.engine import EngineStatistics, Timing

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKEN_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics(Collector):
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def seconds(name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(
                f"ostinato_{name}_seconds", what, buckets=buckets, registry=self._registry
            )

        self._requests = Counter(
            "ostinato_http_requests",
            "HTTP requests, by path and status.",
            ("path", "status"),
            registry=self._registry,
        )
        self._queued = seconds("queue", "From a request to its slot.")
        self._first = seconds("time_to_first_token", "From a request to its first token.")
        self._over = seconds("answer", "From a request to the end of its answer.")
        self._token = seconds(
            "token", "Between two tokens of an answer, its mean.", buckets=_TOKEN_SECONDS
        )
        self.layers: EngineStatistics | None = None
        """The latest numbers of the layers, for `text`."""
        self._registry.register(self)

    def request(self, path: str, status: int) -> None:
        """Counts an answered HTTP request.  `path` is the route's pattern, which bounds the label's
        values."""
        self._requests.labels(path, str(status)).inc()

    def answer(self, timing: Timing) -> None:
        """Records the times of a finished answer."""
        if timing.placed is not None:
            self._queued.observe(timing.placed)
        if timing.first is not None:
            self._first.observe(timing.first)
            if timing.tokens > 1:
                self._token.observe((timing.over - timing.first) / (timing.tokens - 1))
        self._over.observe(timing.over)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the layers.  The registry calls this for each `text`."""
        found = self.layers
        if found is not None:
            gauges = _Gauges()
            gauges.record("engine", found, skipped=("decoder", "modules"))
            decoder = found.decoder
            gauges.record("decoder", decoder, skipped=("steps", "graph_cache"))
            gauges.record("graph_cache", decoder.graph_cache, skipped=("keys", "gone", "limits"))
            for name, step in decoder.steps.items():
                gauges.record("step", step, {"step": name}, skipped=("last_check", "keys"))
            gauges.record("modules", found.modules)
            yield from gauges.families()


class _Gauges:
    """Families of gauges, built from dataclass records."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[dict[str, str], float]]] = {}

    def record(
        self,
        prefix: str,
        record: object,
        labels: Mapping[str, str] | None = None,
        *,
        skipped: tuple[str, ...] = (),
    ) -> None:
        """Adds the numbers of a dataclass and of the dataclasses in its fields."""
        assert is_dataclass(record)
        for field in fields(record):
            if field.name not in skipped:
                value = getattr(record, field.name)
                self._value(f"{prefix}_{field.name}", value, dict(labels or {}))

    def _value(self, name: str, value: object, labels: dict[str, str]) -> None:
        if isinstance(value, Mapping):
            for reason, count in value.items():
                self._value(name, count, {**labels, "reason": str(reason)})
        elif is_dataclass(value):
            self.record(name, value, labels)
        elif isinstance(value, int | float):
            self._found.setdefault(f"ostinato_{name}", []).append((labels, float(value)))

    def families(self) -> Iterator[Metric]:
        for name, samples in self._found.items():
            names = sorted({label for labels, _ in samples for label in labels})
            family = GaugeMetricFamily(name, name.replace("_", " "), labels=names)
            for labels, value in samples:
                family.add_metric([labels.get(label, "") for label in names], value)
            yield family
