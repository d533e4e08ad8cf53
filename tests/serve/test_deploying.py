"""The examples that start several servers: Kubernetes' manifest, and Ray Serve where it exists."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

pytest.importorskip("openai")
pytest.importorskip("ostinato.serve.server")

from ostinato.serve.server import _LAST_SECONDS
from tests.cli.commands import ROOT, environment, here
from tests.distributed.starting import free_port
from tests.serve.serving import client, until
from tests.serve.test_load import ended, started

EXAMPLES = ROOT / "examples"


def gives(url: str, status: int = 200) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return int(answer.status) == status
    except URLError:
        return False


def test_the_manifest_starts_a_server_that_its_probes_find(
    tiny_model: Path, tmp_path: Path
) -> None:
    yaml = pytest.importorskip("yaml")
    found: list[Any] = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    pod = next(one for one in found if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["ostinato", "serve"]
    options = dict(argument.split("=") for argument in container["args"])
    (port,) = container["ports"]
    assert options["--port"] == str(port["containerPort"])

    (tmp_path / "keys").write_text("one\n")
    here_instead = {"--model": tiny_model, "--api-key-file": tmp_path / "keys", "--port": 0}
    options |= {name: str(value) for name, value in here_instead.items()}
    options |= {"--host": "127.0.0.1", "--slots": "2"}
    process, url = started(tiny_model, *(word for pair in options.items() for word in pair))
    try:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            get = container[probe]["httpGet"]
            assert get["port"] == port["name"] and gives(url + get["path"])
        assert [model.id for model in client(url, "one").models.list()] == [options["--name"]]
        process.send_signal(signal.SIGTERM)
        ended(process)
    finally:
        process.kill()
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = before + int(options["--grace"]) + _LAST_SECONDS
    assert pod["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("ranks", [1, 2])
def test_ray_serve(tiny_model: Path, tmp_path: Path, ranks: int) -> None:
    """The answer is that of `ostinato generate`."""
    pytest.importorskip("ray.serve")
    port = free_port()
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    options = ("--host", "--threads", "1", "--port", str(port), "--tensor-parallel", str(ranks))
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / "ray_serve.py"), "--model", str(tiny_model), *options],
        env=environment(**quiet),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: process.poll() is not None or gives(f"{url}/ready"))
            asked = {"prompt": "ab", "max_tokens": 12, "temperature": 0}
            answer = client(url).completions.create(model=str(tiny_model), **asked)  # type: ignore[call-overload]
        finally:
            process.send_signal(signal.SIGINT)
    wanted = here("generate", "ab", "-m", str(tiny_model), "-n", "12", "--raw", "-q")
    assert answer.choices[0].text == wanted.out.removesuffix("\n")
