"""OpenEnv servers: one that runs somewhere, or one that this process starts, which ends with it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from verl_atgrpo import EpisodeFailed
from verl_atgrpo.environments.ports.foreign import line

_LAUNCH = Path(__file__).with_name("openenv_launch.py")
_START_SECONDS = 300.0
"""For importing the app, on a busy machine."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """An OpenEnv server; one of ours is started when first needed, and again after it ended."""

    def __init__(
        self,
        where: str,
        url: str | None = None,
        app: str | None = None,
        python: str | None = None,
        folder: str | None = None,
        *,
        variables: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Prepares the server.

        Args:
            where: the option that names it, with its value, for messages.
            url: where it runs; None to start `app`.
            app: "module:app".
            python: the interpreter that has its package; None for this one.
            folder: in which it runs, and from which it imports; None for this one.
            variables: of its process's environment, beside ours.
        """
        self.where = where
        self.process: subprocess.Popen[str] | None = None
        self._url, self._app, self._folder = url, app, folder
        # By its whole path, as the process starts in another folder.
        self._python = os.path.abspath(python) if python and os.sep in python else python or sys.executable
        self._variables = dict(variables)
        self._port = ""
        self._log: IO[bytes] | None = None
        self._lock = threading.Lock()

    def url(self) -> str:
        """Returns its address; raises EpisodeFailed if it does not start."""
        if self._url is not None:
            return self._url.rstrip("/")
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            return f"http://127.0.0.1:{self._port}"

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        try:
            self.process = subprocess.Popen(
                # Its source, as the folder of a script comes first in sys.path, and ours has an openenv.py.
                [self._python, "-c", _LAUNCH.read_text(), str(self._app)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                cwd=self._folder,
                env={**os.environ, **self._variables},
                start_new_session=True,  # not interrupted by Ctrl-C
            )
        except OSError as error:
            place = f"by python={self._python} in folder={os.path.abspath(self._folder or '.')}"
            raise EpisodeFailed("openenv", f"{self.where} cannot be started {place}: {line(error)}") from error
        assert self.process.stdout is not None
        late = threading.Timer(_START_SECONDS, self.process.kill)
        late.start()
        self._port = self.process.stdout.readline().strip()
        if not self._port:
            self.process.wait()
        late.cancel()
        if not self._port:
            raise self.failed("did not start")

    def failed(self, what: str) -> EpisodeFailed:
        """Returns the failure of an episode: what the server did, and how its process ended and with which words."""
        parts = [what]
        if self.process is not None and self._log is not None:
            if (status := self.process.poll()) is not None:
                parts.append(f"its process ended with status {status}")
            # Not by seek: the server writes where our file is.
            end = os.pread(self._log.fileno(), 4096, max(0, os.fstat(self._log.fileno()).st_size - 4096))
            lines = end.decode("utf-8", "replace").splitlines()
            parts += [f"its log ends with {' '.join(text.split())[:200]}" for text in lines[-1:]]
        return EpisodeFailed("openenv", f"{self.where} {'; '.join(parts)}")

    def ask(self, path: str, body: object = None, *, seconds: float) -> Any:
        """Returns the JSON at a path (POST with a body), outside of any session; it waits.

        Raises EpisodeFailed if there is no answer in time, or another status than 200.
        """
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url() + path, data, {"Content-Type": "application/json"})
        try:
            with _DIRECT.open(asked, timeout=seconds) as answer:
                return json.load(answer)
        except (OSError, HTTPException, ValueError) as error:
            raise self.failed(f"does not answer to {path}: {line(error)}") from error


@functools.cache
def server_of(owner: int, where: str, *named: str | None, variables: tuple[tuple[str, str], ...]) -> Server:
    """Returns the server of a process for these arguments of `Server`: all its environments share it.

    Args:
        owner: the process, as a fork must not take its parent's server for its own.
        where, named, variables: as of `Server`.
    """
    return Server(where, *named, variables=variables)
