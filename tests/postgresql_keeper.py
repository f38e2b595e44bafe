"""Start the server of a test run, and end it when the run is over, however it ended.

    python -m tests.postgresql_keeper FOLDER

Returns as soon as the server answers; a child that belongs to nobody then waits for the end of the
pipe in the run's folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from pathlib import Path

from tests.postgresql import Server


def main(folder: Path) -> int:
    """Fork the keeper, and answer for how its server started."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        os.setsid()
        try:
            keep(folder, writing)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    print(said)
    return 0 if said == "up" else 1


def keep(folder: Path, answer: int) -> None:
    """Start the server, say so, and stop it when the run has closed its end of the pipe."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    server = Server(folder / "server")
    server.folder.mkdir(exist_ok=True)
    (folder / "kept").touch()
    try:
        try:
            server.start()
            os.write(answer, b"up")
        except BaseException:
            os.write(answer, traceback.format_exc().encode())
            raise
        finally:
            os.close(answer)
        # Not to wait for a writer that has gone already; then waiting for the last to go.
        pipe = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(pipe, True)
        os.read(pipe, 1)
    finally:
        server.stop("immediate")
        # A run that was killed cannot clear up after itself.
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
