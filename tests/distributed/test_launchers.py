"""The examples under launchers: torchrun's, mpirun's and srun's environment, and themselves and Ray
where they are installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import ostinato as ost
from ostinato.distributed import launch, new_group_id, open_group
from ostinato.errors import NotAvailableError, RankLostError
from ostinato.models import TextGenerator
from tests.distributed.starting import ROOT, environment, free_port, on_threads
from tests.models.model_files import CONFIG, write_gguf

EXAMPLE = str(ROOT / "examples" / "generate_ranks.py")
PROMPT, TOKENS = "ab", 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = replace(CONFIG, context_length=512)
    return str(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", config=config))


@pytest.fixture(scope="module")
def answer(tiny: str) -> str:
    """Of one device."""
    with ost.open_device("host") as device, TextGenerator(device, tiny) as generator:
        return "".join(generator.generate(PROMPT, max_tokens=TOKENS))


def options(tiny: str) -> list[str]:
    return [PROMPT, "--host", "--model", tiny, "--max-tokens", str(TOKENS)]


def torchrun(rank: int, port: str) -> dict[str, str]:
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    return told | {"TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0"}


def open_mpi(rank: int, port: str) -> dict[str, str]:
    told = {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2"}
    found = {f"OMPI_COMM_WORLD_{name}": value for name, value in told.items()}
    return found | {"PMIX_NAMESPACE": f"prterun-here-{port}@1", "PMIX_RANK": str(rank)}


def mpich(rank: int, port: str) -> dict[str, str]:
    told = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank)}
    return told | {"MPI_LOCALNRANKS": "2", "HYDI_CONTROL_FD": "7", "PMI_FD": str(9 + rank)}


def srun(rank: int, port: str) -> dict[str, str]:
    told = {"PROCID": str(rank), "LOCALID": str(rank), "NTASKS": "2", "JOB_ID": port}
    told |= {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost"}
    return {f"SLURM_{name}": value for name, value in told.items()}


SCRIPT = ["sh", "-c", '"$@"; exit $?', "script"]
"""Between a launcher and its ranks, so that it is not the process right above them."""


@pytest.mark.parametrize(
    ("launcher", "between"),
    [
        pytest.param(torchrun, [], id="torchrun"),
        pytest.param(open_mpi, SCRIPT, id="open_mpi, a script"),
        *(
            pytest.param(one, [], id=one.__name__, marks=pytest.mark.slow)
            for one in (open_mpi, mpich, srun)
        ),
    ],
)
def test_the_example_in_a_launchers_environment(
    launcher: Callable[[int, str], dict[str, str]], between: list[str], tiny: str, answer: str
) -> None:
    port = str(free_port())
    # What listens at the launcher's own port is none of ours.
    with socket.create_server(("127.0.0.1", int(port))):
        ranks = [
            subprocess.Popen(
                [*between, sys.executable, EXAMPLE, *options(tiny)],
                env=environment(launcher(rank, port)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        found = [(*rank.communicate(timeout=500), rank.returncode) for rank in ranks]
    assert [status for _, _, status in found] == [0, 0], found
    require_answer(found[0][0], answer)
    assert found[1][0] == ""


def require_answer(out: str, answer: str) -> None:
    assert out.startswith(f"{answer}\n\n{TOKENS} tokens"), out
    assert "one of 2 ranks, which exchange by the group's channel" in out


def launched(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """What a launcher's ranks print, without its own lines."""
    done = subprocess.run(
        command,
        env=environment(dict(environ or {})),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchrun(tiny: str, answer: str) -> None:
    pytest.importorskip("torch.distributed.run")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE]
    require_answer(launched([sys.executable, *command, *options(tiny)]), answer)


@pytest.mark.parametrize("script", [False, True])
def test_mpirun(script: bool, tiny: str, answer: str) -> None:
    """As the launcher's own child, and below a script."""
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("mpirun is not installed")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    more = []
    if "Open MPI" in said.stdout:
        more = ["--allow-run-as-root", "--oversubscribe"]
    ranks = [*(SCRIPT if script else []), sys.executable, EXAMPLE, *options(tiny)]
    require_answer(launched([program, *more, "-n", "2", *ranks]), answer)


# -------------------------------------------------------------------------------------------- Ray


def test_rays_worker_without_ray(tiny: str, answer: str) -> None:
    """What an actor does, on threads: the same text, and an error where another one has left."""
    from examples.ray_generate import Worker

    group_id = new_group_id(2)
    found: dict[int, object] = {}

    def actor(rank: int) -> None:
        worker = Worker(group_id, rank, 2, tiny, host=True)
        try:
            found[rank] = worker.generate(PROMPT, TOKENS)
            if rank == 1:
                worker.generate(PROMPT, TOKENS)
        except RankLostError as error:
            found[rank] = found[rank], str(error)
        finally:
            worker.close()

    on_threads(2, actor)
    assert found == {0: answer, 1: (answer, "rank 0 has left the group")}


def test_ray(tiny: str, answer: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, str(ROOT / "examples" / "ray_generate.py"), PROMPT, "--ranks", "2"]
    more = ["--model", tiny, "--max-tokens", str(TOKENS)]
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    out = launched([*command, *more], {**quiet, "OSTINATO_DEVICE": "host"})
    assert f"{answer}\n" in out


def test_an_actor_that_dies_is_an_error_in_the_others_calls(tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    program = f"""if True:
        import ray
        from examples.ray_generate import Worker
        from ostinato.distributed import new_group_id
        from ostinato.errors import NotAvailableError, RankLostError
        group_id = new_group_id(2)
        ray.init()
        actor = ray.remote(num_cpus=0)(Worker)
        workers = [actor.remote(group_id, rank, 2, {tiny!r}, host=True) for rank in range(2)]
        ray.get([worker.generate.remote("ab", 4) for worker in workers])
        ray.kill(workers[1])
        try:
            ray.get(workers[0].generate.remote("ab", 4))
        except RankLostError as error:
            print("lost:", str(error).splitlines()[-1])
        ray.shutdown()
    """
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    out = launched([sys.executable, "-c", program], {**quiet, "OSTINATO_DEVICE": "host"})
    assert "lost: ostinato.errors.RankLostError: rank 1 died" in out, out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_file_of_another_user_is_not_used(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 says so and leaves no hub; the others go on looking for the file of rank 0."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in (("RANK", rank), ("SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    place = launch.place_of()
    assert place is not None and place.launcher == "mpirun"
    path = launch._meeting_file(place)
    if rank == 0:
        (path / "not empty").mkdir(parents=True)  # what cannot be removed, as in /tmp
        with pytest.raises(NotAvailableError, match=f"rank 0 cannot write {path}"):
            open_group(deadline=5.0)
    else:
        mine = os.getuid()
        path.write_text("127.0.0.1:9:0\n")
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        path.rename(launch._meeting_file(place))
        with pytest.raises(RankLostError, match="found no file"):
            open_group(deadline=0.2)
    assert not [one for one in threading.enumerate() if one.name == "ostinato hub"]
