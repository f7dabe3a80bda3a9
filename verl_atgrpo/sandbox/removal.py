"""Removes what a program left: its folder, and elsewhere what its own user has, if it had one."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import stat
import time

from verl_atgrpo.sandbox.launcher import users

logger = logging.getLogger(__name__)
SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Where everybody may leave files."""
_SECONDS, _PAUSE = 2.0, 0.02
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_root(root: str, level: str) -> None:
    """Removes a program's folder, whatever the program made in its `work`.

    At the levels that restrict no files, also removes what a user of the program's own left directly in
    SHARED_FOLDERS, and its IPC objects. A process that outlives a killed launcher for a moment may still write, so a
    removal that fails is repeated for some seconds.
    """
    user = 0
    until = time.monotonic() + _SECONDS
    while True:
        try:
            if os.path.isdir(root):
                folder = os.open(root, _FOLDER)
                try:
                    user = os.fstat(folder).st_gid  # the program may have removed its `work`
                    _empty(folder)
                finally:
                    os.close(folder)
                os.rmdir(root)
            if level in ("seccomp", "rlimits") and user in users():
                remove_all_of(user)
            return
        except OSError as error:
            if time.monotonic() >= until:
                logger.warning("what the program of %s left cannot be removed: %s", root, error)
                return
        time.sleep(_PAUSE)


def remove_all_of(user: int) -> None:
    """Removes what a user has directly in SHARED_FOLDERS, and its IPC objects of System V; raises OSError."""
    for path in filter(os.path.isdir, SHARED_FOLDERS):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # /tmp may be a link
        try:
            _remove_files_of(user, folder)
        finally:
            os.close(folder)
    libc = ctypes.CDLL(None)
    for kind, control, removal in (
        ("shm", libc.shmctl, (0, None)),
        ("sem", libc.semctl, (0, 0)),
        ("msg", libc.msgctl, (0, None)),
    ):
        if not os.path.exists(f"/proc/sysvipc/{kind}"):  # a kernel without them
            continue
        with open(f"/proc/sysvipc/{kind}") as listing:
            names, *rows = (line.split() for line in listing)
        for row in rows:
            if int(row[names.index("cuid")]) == user:
                control(int(row[1]), *removal)


def _remove_files_of(user: int, folder: int) -> None:
    """Removes what a user has directly in an open folder.

    Other programs run meanwhile: no path is followed that they could replace by a link.
    """
    for name in os.listdir(folder):
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if found.st_uid != user:
                continue
            if not stat.S_ISDIR(found.st_mode):
                os.unlink(name, dir_fd=folder)
                continue
            inner = os.open(name, _FOLDER, dir_fd=folder)
        except FileNotFoundError:  # others use this folder too
            continue
        try:
            _empty(inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=folder)


def _empty(top: int) -> None:
    """Empties an open folder.

    Every folder is moved to the top before it is emptied: so neither the depth of a tree nor the length of its paths
    matters. All folders are locked before they are read: other programs cannot change them.
    """
    names = itertools.count()
    os.fchmod(top, 0o700)
    while folders := [entry.name for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)]:
        for folder in folders:
            os.chmod(folder, 0o700, dir_fd=top)  # a program may have locked its own folders
            inner = os.open(folder, _FOLDER, dir_fd=top)
            try:
                for entry in list(os.scandir(inner)):
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.name, 0o700, dir_fd=inner)
                        os.rename(entry.name, f"moved-{next(names)}", src_dir_fd=inner, dst_dir_fd=top)
                    else:
                        os.unlink(entry.name, dir_fd=inner)
            finally:
                os.close(inner)
            os.rmdir(folder, dir_fd=top)
    for name in os.listdir(top):
        os.unlink(name, dir_fd=top)
