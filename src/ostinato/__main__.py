"""The commands `ostinato` and `python -m ostinato`."""

import signal


def main() -> None:
    """Runs the command."""
    # Imports take a moment, in which there is nothing to close and no handler for an exception:
    # Ctrl-C just ends the process.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ostinato.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
