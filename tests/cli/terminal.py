"""The command on a terminal: a pseudo-terminal whose keys it gets and whose screen is read."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType

from tests.cli.commands import environment

# The first terminal that a session's first process opens is the one whose keys it gets.
ON_ITS_TERMINAL = """
import os
os.close(os.open(os.ttyname(0), os.O_RDWR))
print("its terminal", flush=True)
from ostinato.__main__ import main
main()
"""
PROMPTS = ("> ", ". ")
PATIENCE = 300.0  # against hangs alone
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """The command as the one process of a terminal; a context manager, which ends it.

    `said`: what was on the screen so far, without the sequences that move the cursor.
    """

    def __init__(self, *arguments: str, python: str = sys.executable, **environ: str) -> None:
        self._mine, theirs = pty.openpty()
        modes = termios.tcgetattr(theirs)
        # By default, Ctrl-C drops output that was not read yet, and shows ^C anywhere within it.
        # Here it drops nothing and shows one byte, which `said` leaves out.
        modes[3] = modes[3] & ~termios.ECHOCTL | termios.NOFLSH
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        self.process = subprocess.Popen(
            [python, "-c", ON_ITS_TERMINAL, *arguments],
            env=environment(TERM="xterm", **environ),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._raw = b""
        self._seen = 0
        self.until("its terminal\r\n")  # before that, keys are no signals

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._mine)
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return _CONTROLS.sub("", self._raw.replace(b"\x03", b"").decode("utf-8", "replace"))

    def send(self, keys: str | bytes) -> None:
        os.write(self._mine, keys if isinstance(keys, bytes) else keys.encode())

    def settle(self) -> None:
        """Waits until the command waits, for keys as a rule.

        Between the prompt and the wait for keys Python takes a signal and handles it only after the
        next key: a person cannot press Ctrl-C in that moment, but a test can.
        """
        quiet = 0
        while quiet < 3 and self.process.poll() is None:
            try:
                stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
                quiet = quiet + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0
            except OSError:  # not Linux
                quiet += 1
            time.sleep(0.02)

    def until(self, text: str) -> str:
        """Reads until a text appears that was not there at the last call; what was said since.

        After a prompt, also until the command waits for keys.
        """
        while (at := self.said.find(text, self._seen)) < 0:
            more = self._read()
            assert more, f"{text!r} did not come: {self.said!r}"
        since = self.said[self._seen : at]
        self._seen = at + len(text)
        if text in PROMPTS:
            self.settle()
        return since

    def end(self) -> int:
        """Reads to the end; the exit status."""
        while self._read():
            pass
        return self.process.wait()

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._mine], [], [], PATIENCE)
        assert ready, f"the command says no more: {self.said!r}"
        try:
            more = os.read(self._mine, 4096)
        except OSError:  # what Linux says of a terminal whose last user is gone
            return b""
        self._raw += more
        return more


def on_a_terminal(text: str) -> str:
    """What a terminal gets of a model's text: signs in place of control characters."""
    signs = (
        {i: 0x2400 + i for i in range(0x20)}
        | {0x7F: 0x2421}
        | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
    )
    return text.translate(signs | {0x09: "\t", 0x0A: "\r\n"})
