"""Serves an OpenEnv app on a free port, in the interpreter that has its package; `openenv_server` runs this source.

It imports nothing of this package, which that interpreter need not have.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

_GRACE_SECONDS = 5.0
"""For the server to end by itself."""


def end_with_parent() -> None:
    """Ends the server and the processes that it started when the parent has ended, however that did."""
    while os.read(0, 1):  # the parent holds the other end; sys.stdin would be locked when this process ends
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Imports the app that the first argument names as "module:app", prints the port and serves."""
    import uvicorn

    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the app prints belongs to its log
    threading.Thread(target=end_with_parent, daemon=True).start()
    # No pings: a model may think for longer than their time-out.
    config = uvicorn.Config(sys.argv[1], log_level="warning", ws_ping_interval=None)
    config.load()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    told.write(f"{listener.getsockname()[1]}\n")
    told.close()
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
