"""Whether a SQLite URL names a file that several connections and processes can safely share."""

import errno
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sqlalchemy import URL

from queue_core.errors import ConfigurationError, SchemaError, UnsupportedDatabase

_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ncpfs", "lustre", "ceph", "glusterfs", "fuse.sshfs", "9p"}
)


def file_name(url: URL) -> str:
    """The file of a URL; refuses a database in memory."""
    name = url.database
    if not name or ":memory:" in name or "mode=memory" in name or url.query.get("mode") == "memory":
        raise UnsupportedDatabase(
            "a SQLite database in memory can't carry a queue: each connection would have one of its own, and shared"
            " ones ignore the busy timeout. Use a file, such as sqlite+aiosqlite:///jobs.db;"
            " for tests, one in a temporary folder"
        )
    return name


def prepare_file(name: str, *, create: bool) -> Path:
    """Refuse what can't carry a queue; make a missing file readable for its owner only. Returns where it is."""
    path = Path(unquote(urlsplit(name).path) if name.startswith("file:") else name).absolute()
    if not path.parent.is_dir():
        raise ConfigurationError(f"the folder of the SQLite file {name} does not exist: create {path.parent} first")
    if path.is_dir():
        raise ConfigurationError(f"{name} is a folder: name a file in it, such as {path.name}/jobs.db")
    kind = _file_system(path)
    if kind in _NETWORK:
        raise UnsupportedDatabase(
            f"{name} is on a network file system ({kind}), where SQLite's locks do not hold and jobs would run twice:"
            " use a local disk, or Postgres (postgresql+asyncpg://…) for several machines"
        )
    if not create and not path.exists():
        raise SchemaError(
            f"the SQLite file {name} does not exist: run 'queue-core migrate --url URL', or leave out migrate=False to"
            " have it made at start"
        )
    try:
        # -wal and -shm take the mode of the file.
        os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        # Not opened, ever: to close it again would drop the locks that SQLite has on it in this process, and another
        # process would then remove the write-ahead log with all that was committed to it.
        refused = _refused(path)
    except OSError as error:
        refused = error.strerror
    else:
        refused = None
    if refused is not None:
        raise ConfigurationError(
            f"the SQLite file {name} can't be opened for writing ({refused}): give this user the right to write the"
            " file and its folder, or name another one"
        )
    return path


def _refused(path: Path) -> str | None:
    """Why the system would not let us write an existing file, without opening it."""
    try:
        path.stat()
    except OSError as error:
        return error.strerror
    return None if os.access(path, os.R_OK | os.W_OK) else os.strerror(errno.EACCES)


def _file_system(path: Path) -> str | None:
    """The kind of file system that a path is on, where the system says."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    best, kind = "", None
    real = path.parent.resolve()
    for line in mounts:
        fields = line.split()
        mount_point = fields[4].encode().decode("unicode_escape")
        if len(mount_point) >= len(best) and real.is_relative_to(mount_point):
            best, kind = mount_point, fields[fields.index("-") + 1]
    return kind
